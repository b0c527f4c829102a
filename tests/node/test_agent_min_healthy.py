"""--restart-policy min-healthy with real processes: who dies is the wrapper's business while MIN nodes are good."""

import json
import os
import signal

import pytest
from agent_harness import UP, ended, kill, up

pytestmark = pytest.mark.process


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


def test_a_dead_rank_is_told_to_the_wrappers_and_below_the_minimum_all_are_restarted(rig):
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
    rig.ends_well("end1", first, second)
    told = [(fault["rank"], fault["exit_code"], fault["cycle"]) for fault in rig.result["faults"]]
    assert told[0] == (1, -9, 0) and rig.result["restarts_used"] == 1


def test_helpers_of_a_dead_worker_live_until_the_cycle_ends(rig):
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
