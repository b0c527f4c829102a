"""A machine that has no more descriptors, processes, threads or space, or whose file systems hang.

The job ends with a result of its own or goes on without what it could not have; no agent breaks, and all is said.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest
from agent_harness import UP
from waits import WAIT_S

USER = 61_234  # has no other processes: RLIMIT_NPROC does not bind root
LACKS = "may open only|Too many open files|Resource temporarily unavailable|no thread can be made"
FAILS_ONCE = UP + "if CYCLE == 0 and LOCAL == 1:\n    gate()\n    os._exit(3)\n"
FLAGS = ("--nproc-per-node=2", "--max-restarts=1", "--ft-cycle-info-dir=cycles", "--ft-rank-heartbeat-timeout=60")
LIBC = ctypes.CDLL(None, use_errno=True)
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user, and mount"),
]


@pytest.fixture
def cgroup(rig):
    """The job is in a cgroup of its own, and has a user of its own."""
    made = next(path for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")) if path.is_dir()) / rig.mark
    try:
        made.mkdir()
        (made / "pids.max").write_text("max")
    except OSError as error:
        pytest.skip(f"no cgroup with a limit of processes can be made here: {error}")
    for path in (rig.dir, rig.dir / "tmp"):
        os.chown(path, USER, USER)
    rig.before = f"import os, resource\nopen('{made}/cgroup.procs', 'w').write(str(os.getpid()))\n"
    rig.before += f"os.setgroups([]), os.setgid({USER}), os.setuid({USER})\n"
    yield made
    made.rmdir()


@contextlib.contextmanager
def mounted(where, kind, options):
    if LIBC.mount(b"test", os.fsencode(where), kind, 0, options):
        pytest.skip(f"nothing can be mounted here: {os.strerror(ctypes.get_errno())}")
    yield
    assert LIBC.umount2(os.fsencode(where), 2) == 0  # MNT_DETACH


def judge(rig, one, *codes):
    """How it ended: with one of these codes, as result.json says, without a traceback of ours."""
    code = one.wait()
    assert code in codes and re.search(LACKS, one.text), one.text
    assert "Traceback" not in one.text and "internal error" not in one.text
    if code in (0, 1) and not re.search("cannot write .*result.json", one.text):
        assert rig.result["code"] == code


def running(rig, script="work.py"):
    """Until both ranks are up in cycle 0."""
    one = rig.run(rig.script(FAILS_ONCE, script), *FLAGS)
    one.ranks("up 0 ")
    one.monitored()
    return one


START = [*(("NOFILE", most) for most in (9, 24, 34, 39)), *itertools.product(("NPROC", "pids"), (1, 2, 3, 5))]


@pytest.mark.parametrize("limit, most", START)
def test_little_is_left_at_the_start(rig, cgroup, limit, most):
    if limit == "pids":
        (cgroup / "pids.max").write_text(str(most))
    else:
        rig.before += f"resource.setrlimit(resource.RLIMIT_{limit}, ({most}, {most}))\n"
    rig.open()
    judge(rig, rig.run(rig.script(FAILS_ONCE), *FLAGS), *((2,) if most == 9 else (0, 1, 95)))


@pytest.mark.parametrize("limit", ["nofile", "nproc", "pids"])
def test_nothing_is_left_at_a_restart(rig, cgroup, limit):
    one = running(rig)
    most = 1 if limit == "nproc" else max(map(int, os.listdir(f"/proc/{one.pid}/fd"))) + 2
    if limit == "pids":
        (cgroup / "pids.max").write_text("1")
    else:
        told = ["prlimit", f"--pid={one.pid}", f"--{limit}={most}"]
        subprocess.run(told, user=USER, group=USER, timeout=WAIT_S, check=True)
    rig.open()
    judge(rig, one, 0, 1)


@pytest.mark.parametrize("restart", [False, True])
def test_no_space_is_left_in_tmpdir(rig, restart):
    """At the start the agent goes elsewhere; at a restart what it frees is enough for what it needs next."""
    with mounted(rig.dir / "tmp", b"tmpfs", b"size=64k,nr_inodes=16"):
        one = running(rig) if restart else None
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            for number in itertools.count():
                (rig.dir / "tmp" / f"full{number}").touch()
        one = one or running(rig)
        rig.open()
        assert one.wait() == 0 and one.cycles == [0, 1]


@pytest.mark.parametrize("what", ["tmp", "src"])
def test_a_file_system_that_hangs_at_a_restart_is_named(rig, what):
    """TMPDIR's, where it holds up the agent itself, or the script's."""
    (rig.dir / "src").mkdir()
    one = running(rig, "src/work.py")
    with open("/dev/fuse", "r+b", buffering=0) as nobody_answers:
        options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % nobody_answers.fileno()
        with mounted(rig.dir / what, b"fuse", options):
            rig.open()
            one.line(f"{rig.dir}/{what}/.*did not return", timeout_s=10)
    assert one.wait() in (0, 1)


FILLS = """
ballast = os.environ["NVRX_TEST_GATES"] + "/logs/ballast"
if CYCLE == 0:
    with contextlib.suppress(OSError), open(ballast, "wb", 0) as file:
        while True:
            file.write(bytes(4096))
    print("x" * 4096, flush=True)
os.unlink(ballast)
"""


def test_a_full_disk_under_the_logs_is_named(rig):
    """A rank that cannot print ends, and can say nothing of it: its agent does."""
    rig.logs.mkdir()
    with mounted(rig.logs, b"tmpfs", b"size=1m"):
        one = rig.run(rig.script(f"import contextlib\n{FILLS}"), "--max-restarts=1")
        one.line(f"could not write to its log.*{os.strerror(errno.ENOSPC)}: {rig.logs}")
        one.line(r"rule: logs-full \(storage, likely\)")
        one.line("to do: .*logs.*quota")
        assert one.wait() == 0
        assert "could not write to its log" in rig.result["restarts"][0]["cause"]
