"""--restart-policy min-healthy with real processes: who dies is the wrapper's business while MIN nodes are good."""

from __future__ import annotations

import contextlib
import json
import os
import signal

import minicluster_init as init
import pytest
from agent_harness import UP, Rig, ended, kill, up

POLICY = ("--restart-policy=min-healthy",)
# Says what is on the board once rank 1 is on it.
BOARD = """
def board():
    with open(os.environ["NVRX_BOARD"]) as file:
        return [json.loads(line) for line in file]
if CYCLE == 0 and RANK != 1:
    while 1 not in {rank for note in board() for rank in note["ranks"]}:
        time.sleep(0.01)
    say("board", json.dumps(board()[0]))
"""


def test_a_dead_rank_is_told_to_the_wrappers_and_below_the_minimum_all_are_restarted(rig: Rig) -> None:
    script = rig.script(UP + BOARD + 'gate(f"end{CYCLE}")\n')
    first, second, third = rig.nodes(3, "2:3", script, "--max-restarts=3", *POLICY)
    workers = [up(one, 0) for one in (first, second, third)]
    assert [group for group, _ in workers] == [0, 1, 2]
    os.kill(workers[1][1], signal.SIGKILL)
    for one in (first, third):
        note = json.loads(one.line(r"board (\{.*\})$")[1])
        assert (note["v"], note["cycle"], note["ranks"]) == (1, 0, [1])
        assert "was killed by SIGKILL" in note["why"]
    first.line("going on: 2 of 3 nodes are good, 2 are needed")
    kill(third, workers[2][1])
    first.line(r"node 2 \(.*\) was lost: .*; restart 1 of 3")
    assert (up(first, 1)[0], up(second, 1)[0]) == (0, 1)
    rig.open("end1")
    assert [first.wait(), second.wait()] == [0, 0]
    told = [(fault["rank"], fault["exit_code"], fault["cycle"]) for fault in rig.result["faults"]]
    assert told[0] == (1, -9, 0) and rig.result["restarts_used"] == 1


def test_helpers_of_a_dead_worker_live_until_the_cycle_ends(rig: Rig) -> None:
    """The wrapper's monitor process speaks for its dead rank, and may hold the store of all of them."""
    script = rig.script(
        "if RANK == 1:\n    helper = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    say('helper', helper.pid)\n    os._exit(3)\nif CYCLE == 0 and RANK == 0:\n    gate()\n    os._exit(4)\n"
    )
    first, second = rig.nodes(2, "1:2", script, "--max-restarts=3", *POLICY)
    helper = int(second.line(r"helper (\d+)$")[1])
    first.line("going on: 1 of 2 nodes are good")
    fd = os.pidfd_open(helper)
    assert not ended(fd, 0.5)  # it lives
    rig.open("go")
    second.line(r"cycle 1: group rank 1")
    assert ended(fd)
    os.close(fd)
    assert [first.wait(), second.wait()] == [0, 0]


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


@pytest.mark.torch
def test_a_dead_rank_and_then_its_node_are_the_wrappers_business_and_no_process_is_restarted(rig: Rig) -> None:
    """No process of the lost node tells of it: the agents do, long before a heartbeat is late."""
    pytest.importorskip("torch")
    flags = (*POLICY, "--nproc-per-node=2", "--max-restarts=3", "--ft-preload=torch")
    first, second = rig.nodes(2, "1:2", rig.script(WRAPPED), *flags)
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
