"""Ranks that are wrapped by `inprocess.Wrapper` under --restart-policy min-healthy: what the agents do for them."""

from __future__ import annotations

import contextlib
import os
import signal

import minicluster_init as init
import pytest
from agent_harness import Rig, ended

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

POLICY = ("--restart-policy=min-healthy", "--nproc-per-node=2", "--max-restarts=3")
LOADED_S = 90.0  # until ranks have imported torch, on a machine that has other things to do
# Waits in two iterations, returns in the third one. No heartbeat is missed within a test's patience.
WRAPPED = """
from datetime import timedelta
from nvrx_slurm import inprocess
@inprocess.Wrapper(last_call_wait=timedelta(0), heartbeat_timeout=timedelta(seconds=110))
def train(call: inprocess.CallWrapper):
    say("entered", CYCLE, call.iteration, "as", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid())
    while call.iteration < 2:
        time.sleep(0.01)
train()
say("returned")
"""


def entered(launcher, iteration: int, rank: int, size: int) -> int:
    """Waits until a rank is in this iteration of cycle 0; its pid."""
    return int(launcher.line(rf"entered 0 {iteration} as {rank} of {size} pid (\d+)$", LOADED_S)[1])


def test_a_dead_rank_and_then_its_node_are_the_wrappers_business_and_no_process_is_restarted(rig: Rig) -> None:
    """No process of the lost node tells of it: the agents do, long before a heartbeat is late."""
    first, second = rig.nodes(2, "1:2", rig.script(WRAPPED), *POLICY)
    pids = [entered((first, second)[rank // 2], 0, rank, 4) for rank in range(4)]
    os.kill(pids[3], signal.SIGKILL)
    assert [entered((first, second)[rank // 2], 1, rank, 3) for rank in range(3)] == pids[:3]
    first.line("going on: 1 of 2 nodes are good, 1 are needed")
    family, fds = init.descendants(second.pid), list[int]()
    for one in family:
        with contextlib.suppress(ProcessLookupError):  # the dead rank's monitor may have ended meanwhile
            fds.append(os.pidfd_open(one.pid))
    second.signal(signal.SIGSTOP)
    for one in family:
        init.signal_process(one, signal.SIGKILL)  # a monitor may have ended with its parent
    second.signal(signal.SIGKILL)
    assert second.wait() == -signal.SIGKILL
    assert [entered(first, 2, rank, 2) for rank in (0, 1)] == pids[:2]
    assert first.wait() == 0
    assert "restart 1" not in first.text and first.text.count("returned") == 2
    for fd in fds:
        assert ended(fd)
        os.close(fd)
