"""A machine that has no more descriptors, processes, threads or space, at the start or at a restart.

The job ends with a result of its own or goes on without what it could not have; no agent breaks, and all is said.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_harness import UP, WAIT_S, Launcher, Rig

USER = 61_234  # has no other processes
LACKS = "Too many open files|Resource temporarily unavailable|no thread can be made|No space left on device"
# Rank 1 fails once, and has said that it is there.
FAILS_ONCE = UP + "if CYCLE == 0 and LOCAL == 1:\n    gate()\n    os._exit(3)\n"
FLAGS = ("--nproc-per-node=2", "--max-restarts=1", "--ft-rank-heartbeat-timeout=60")


def merged(rig: Rig) -> tuple[str, ...]:
    """Flags that give a job more processes, threads and files."""
    return (*FLAGS, f"--ft-per-cycle-applog-prefix={rig.dir}/merged", f"--ft-cycle-info-dir={rig.dir}/cycles")


@pytest.fixture
def pids(rig: Rig) -> Iterator[Path]:
    """A cgroup of its own for the job, where cgroups can be made here."""
    root = next((path for path in map(Path, ("/sys/fs/cgroup/pids", "/sys/fs/cgroup")) if path.is_dir()), Path())
    made = root / rig.mark
    try:
        made.mkdir()
        (made / "pids.max").write_text("max")
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of processes can be made here: {error}")
    rig.before += f"import os\nopen('{made}/cgroup.procs', 'w').write(str(os.getpid()))\n"
    yield made
    made.rmdir()


@pytest.fixture
def small_tmp(rig: Rig) -> Iterator[Path]:
    """TMPDIR is a small file system."""
    tmp = rig.dir / "tmp"
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=16", "tmpfs", str(tmp)]
    if subprocess.run(mount, capture_output=True, timeout=WAIT_S, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    yield tmp
    subprocess.run(["umount", "-l", str(tmp)], timeout=WAIT_S, check=True)


def fill(directory: Path) -> None:
    """No inode and no byte is left."""
    for number in itertools.count():
        try:
            (directory / f"full{number}").write_bytes(bytes(8192))
        except OSError as error:
            assert error.errno == errno.ENOSPC
            return


def as_user(rig: Rig) -> None:
    """RLIMIT_NPROC does not bind root."""
    if os.geteuid():
        pytest.skip("only root can become a user without other processes")
    for path in (rig.dir, rig.dir / "tmp"):
        os.chown(path, USER, USER)
    rig.before += f"import os\nos.setgroups([]), os.setgid({USER}), os.setuid({USER})\n"


def judge(rig: Rig, one: Launcher, *codes: int) -> None:
    """How it ended: with one of these codes, as result.json says, without a traceback of ours."""
    code = one.wait()
    assert code in codes, one.text
    assert "Traceback" not in one.text and "internal error" not in one.text
    assert re.search(LACKS, one.text), one.text
    if code in (0, 1) and not re.search("cannot write .*result.json", one.text):
        assert rig.result["code"] == code


@pytest.mark.parametrize("most", [9, 24, 34, 42])
def test_few_descriptors_at_the_start(rig: Rig, most: int) -> None:
    rig.before = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))"
    rig.open()
    judge(rig, rig.run(rig.script(FAILS_ONCE), *merged(rig)), 0, 1, *((2,) if most == 9 else (95,)))


@pytest.mark.parametrize("most", [1, 2, 5, 9])
@pytest.mark.parametrize("limit", ["cgroup", "user"])
def test_few_processes_at_the_start(rig: Rig, request: pytest.FixtureRequest, limit: str, most: int) -> None:
    if limit == "cgroup":
        (request.getfixturevalue("pids") / "pids.max").write_text(str(most))
    else:
        as_user(rig)
        rig.before += f"import resource\nresource.setrlimit(resource.RLIMIT_NPROC, ({most}, {most}))"
    rig.open()
    judge(rig, rig.run(rig.script(FAILS_ONCE), *merged(rig)), 0, 1)


def running(rig: Rig) -> Launcher:
    """Until both ranks are up in cycle 0."""
    one = rig.run(rig.script(FAILS_ONCE), *merged(rig))
    for rank in (0, 1):
        one.line(rf"\[rank {rank}\] up 0 ")
    one.monitored()
    return one


def test_no_descriptor_at_a_restart(rig: Rig) -> None:
    one = running(rig)
    held = max(map(int, os.listdir(f"/proc/{one.pid}/fd")))
    resource.prlimit(one.pid, resource.RLIMIT_NOFILE, (held + 1, held + 1))
    rig.open()
    judge(rig, one, 1)


@pytest.mark.parametrize("limit", ["cgroup", "user"])
def test_no_process_at_a_restart(rig: Rig, request: pytest.FixtureRequest, limit: str) -> None:
    if limit == "cgroup":
        cgroup = request.getfixturevalue("pids")
    else:
        as_user(rig)
    one = running(rig)
    if limit == "cgroup":
        (cgroup / "pids.max").write_text("1")
    else:
        subprocess.run(["prlimit", f"--pid={one.pid}", "--nproc=1"], user=USER, group=USER, timeout=WAIT_S, check=True)
    rig.open()
    judge(rig, one, 1)


def test_no_space_in_tmpdir_at_the_start(rig: Rig, small_tmp: Path) -> None:
    """The agent has its sockets elsewhere."""
    fill(small_tmp)
    rig.open()
    one = rig.run(rig.script(FAILS_ONCE), *merged(rig))
    assert one.wait() == 0 and one.cycles == [0, 1]


def test_no_space_in_tmpdir_at_a_restart(rig: Rig, small_tmp: Path) -> None:
    """What the agent frees is enough for what it needs next."""
    one = running(rig)
    fill(small_tmp)
    rig.open()
    assert one.wait() == 0 and one.cycles == [0, 1]
