"""Ranks that are wrapped by `inprocess.Wrapper` under --restart-policy min-healthy: what the agents do for them."""

from __future__ import annotations

import os
import signal

import minicluster_init as init
import pytest
from agent_harness import Rig, ended

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

POLICY = ("--restart-policy=min-healthy", "--nproc-per-node=2", "--max-restarts=3")
LOADED_S = 90.0  # until ranks have imported torch, on a machine that has other things to do
# Waits in the first iteration, returns in the next one. No heartbeat is missed within a test's patience.
WRAPPED = """
from datetime import timedelta
from nvrx_slurm import inprocess
@inprocess.Wrapper(last_call_wait=timedelta(0), heartbeat_timeout=timedelta(seconds=110))
def train(call: inprocess.CallWrapper):
    say("entered", CYCLE, call.iteration, "as", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "pid", os.getpid())
    while call.iteration == 0:
        time.sleep(0.01)
train()
say("returned")
"""


def entered(launcher, iteration: int, rank: int, size: int) -> int:
    """Waits until a rank is in this iteration of cycle 0; its pid."""
    return int(launcher.line(rf"entered 0 {iteration} as {rank} of {size} pid (\d+)$", LOADED_S)[1])


def test_a_dead_rank_is_the_wrappers_business_and_no_process_is_restarted(rig: Rig) -> None:
    first, second = rig.nodes(2, "1:2", rig.script(WRAPPED), *POLICY)
    pids = {rank: entered((first, second)[rank // 2], 0, rank, 4) for rank in range(4)}
    os.kill(pids[1], signal.SIGKILL)
    again = [entered(first, 1, 0, 3), entered(second, 1, 1, 3), entered(second, 1, 2, 3)]
    assert again == [pids[0], pids[2], pids[3]]
    assert [first.wait(), second.wait()] == [0, 0]
    assert "going on: 1 of 2 nodes are good, 1 are needed" in first.text
    assert "restart 1" not in first.text and first.text.count("returned") + second.text.count("returned") == 3


def test_a_lost_node_is_told_by_the_agents_long_before_a_heartbeat_is_late(rig: Rig) -> None:
    """Nobody of that node lives to tell it, the wrapper's monitor processes neither."""
    first, second = rig.nodes(2, "1:2", rig.script(WRAPPED), *POLICY)
    pids = [entered((first, second)[rank // 2], 0, rank, 4) for rank in range(4)]
    family = init.descendants(second.pid)
    assert len(family) == 7  # two workers, each with the launcher's monitor and the wrapper's; the health checks
    fds = [os.pidfd_open(one.pid) for one in family]
    second.signal(signal.SIGSTOP)
    for one in family:
        assert init.signal_process(one, signal.SIGKILL)
    second.signal(signal.SIGKILL)
    assert second.wait() == -signal.SIGKILL
    assert [entered(first, 1, 0, 2), entered(first, 1, 1, 2)] == pids[:2]
    assert first.wait() == 0
    assert "restart 1" not in first.text and first.text.count("returned") == 2
    for fd in fds:
        assert ended(fd)
        os.close(fd)
