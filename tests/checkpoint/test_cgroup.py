"""A memory limit of a real cgroup: a save that would break it is refused before anything is written."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

MB = 1 << 20
LIMIT = 300 * MB
PLACES = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}
# It joins the group, saves what fits and what does not, and tells; no process of the group is killed.
PROGRAM = """
import mmap, os, sys
from pathlib import Path
from nvrx_slurm.checkpoint import link, messages as m
from nvrx_slurm.system.limits import oom_kills

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
link.start(sys.argv[2], os.environ, os.getpid(), linger_s=0.1)
one = link.Link(sys.argv[2], m.Join(0, 1, 1, os.getpid()))
for iteration, size in ((1, 50 << 20), (2, 50 << 20), (3, 50 << 20), (4, 200 << 20)):
    try:
        _, fd = one.ask(m.AskSpace(iteration, size), m.Space)
    except link.CheckpointError as error:
        print(iteration, error)
        continue
    with mmap.mmap(fd, 0) as memory:
        memory[:] = bytes(len(memory))
    os.close(fd)
    one.ask(m.SaveDone(), m.Accepted)
print(one.ask(m.AskHeld(), m.HeldSaves)[0].saves, oom_kills())
"""


@pytest.fixture
def group():
    """With a limit; skips where this user may make none."""
    for top, limit in PLACES.items():
        path = top / f"nvrx-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / limit).write_text(str(LIMIT))
        except OSError:
            path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("needs root and a cgroup for memory")


def test_a_save_that_the_limit_does_not_allow_is_refused(group):
    name = f"nvrx-keeper-test-{group.name}"
    argv = [sys.executable, "-c", PROGRAM, str(group), name]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused, held = done.stdout.splitlines()
    assert refused.startswith("4 ") and group.name in refused
    assert held == "((0, 3), (0, 2)) 0"
    wait_until_empty(group)


def wait_until_empty(group):
    """The keeper ends by itself."""
    for pid in map(int, (group / "cgroup.procs").read_text().split()):
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        assert select.select([pidfd], [], [], 30.0)[0]
        os.close(pidfd)
