"""Scripts that import nothing of ours and make no step for long: a hang is ended, a pause is told and goes on."""

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300.0)]
BOUND_S = 150.0
OFTEN = "from nvrx_slurm.node.monitors import paces\npaces.EVERY_S = 0.5"
ZOO = Path(__file__).parents[1] / "data" / "step_zoo.py"
FLAGS = ("--nproc-per-node=3", "--max-restarts=1", "--ft-step-timeout-min=3", "--ft-preload=torch")
ALWAYS = {"sleeps", "stops", "forks", "reads"}  # the others need minutes together
CULPRIT = 1
NOBODY = {"leaves_out_a_collective"}  # all wait in collectives: without NCCL's flight recorder nobody knows for whom

# What rank 1 does, to the launcher.
HANGS = (
    *("sleeps", "stops", "in_c", "locks_twice", "of_a_queue", "of_a_queue_of_processes", "of_a_semaphore"),
    *("hears_nothing", "reads_an_empty_pipe", "opens_a_fifo", "waits_for_a_child", "waits_for_a_loader"),
    *("waits_for_a_lock_of_another", "joins_a_thread", "waits_for_a_signal", "of_an_event_loop", "asks_the_store"),
    "leaves_out_a_collective",
)
COMPUTES = (
    *("evaluates", "compresses", "counts", "in_a_thread", "forks", "in_a_pool", "in_an_executor", "compiles"),
    *("starts_python", "loads_and_computes"),
)
MOVES = (
    *("loads_and_reads", "reads", "writes", "saves", "copies", "prints", "reads_a_pipe", "downloads"),
    *("downloads_by_http", "uploads"),
)
PAUSES = dict.fromkeys(COMPUTES, "computes") | dict.fromkeys(MOVES, "(reads or writes|computes)")


def tiered(kinds):
    """Some in each run, all in the matrix."""
    return [
        pytest.param(kind, marks=pytest.mark.process if kind in ALWAYS else pytest.mark.matrix, id=kind)
        for kind in kinds
    ]


@pytest.mark.parametrize("kind", tiered(HANGS))
def test_a_rank_that_does_nothing_while_others_wait_is_ended(rig, kind):
    rig.before = OFTEN
    one = rig.run(str(ZOO), *FLAGS, "--ft-crash-loop-backoff=0", args=(kind, str(CULPRIT)))
    assert one.wait(BOUND_S) == 0
    (restart,) = rig.result["restarts"]
    found = json.loads((rig.run_dir / "cycle_0" / "hang.json").read_text())
    if kind in NOBODY:
        assert found["culprits"] == []
    else:
        assert (restart["rank"], found["culprits"]) == (CULPRIT, [CULPRIT])


@pytest.mark.process
@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_wait_in_ddp_wait(rig, who):
    """For the gradients, in C++ below backward(); for the buffers, those of rank 0, in forward()."""
    rig.before = OFTEN
    one = rig.run(str(ZOO), *FLAGS, "--ft-crash-loop-backoff=0", args=("sleeps", str(who), "ddp"))
    assert one.wait(BOUND_S) == 0
    (restart,) = rig.result["restarts"]
    assert restart["rank"] == who and "2 ranks wait for it" in restart["cause"], restart


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", tiered(PAUSES))
def test_a_rank_that_may_go_on_is_told_and_left_alone(rig, kind, who):
    rig.before = OFTEN
    one = rig.run(str(ZOO), *FLAGS, args=(kind, str(who)))
    said = one.line("made no step for (.*) but nothing proves a hang: (.*)$", BOUND_S)
    (rig.dir / "told").touch()
    assert re.search(r"rank \d waits at .*step_zoo.py:\d+ in train, as 1 more", said[2]), said[2]
    # A rank that is blocked in the kernel at that moment prints no stack.
    assert re.search(f"rank {who} {PAUSES[kind]} at (.*step_zoo.py|an unknown place)", said[2]), said[2]
    assert one.wait(BOUND_S) == 0 and not rig.result["restarts"]


TWO_NODES = ("--nproc-per-node=2", *FLAGS[1:])


@pytest.mark.matrix
@pytest.mark.parametrize("kind, who", [("sleeps", 3), ("stops", 3), ("locks_twice", 0)])
def test_a_hang_on_one_of_two_nodes_is_found(rig, kind, who):
    rig.before = OFTEN
    args = (kind, str(who))
    nodes = rig.nodes(2, "2", str(ZOO), *TWO_NODES, "--ft-crash-loop-backoff=0", args=args)
    assert [node.wait(BOUND_S) for node in nodes] == [0, 0]
    (restart,) = rig.result["restarts"]
    found = json.loads((rig.run_dir / "cycle_0" / "hang.json").read_text())
    assert (restart["rank"], restart["infra_rank"], found["culprits"]) == (who, who // 2, [who])


@pytest.mark.matrix
@pytest.mark.parametrize("kind, who", [("evaluates", 0), ("reads", 3)])
def test_a_pause_on_one_of_two_nodes_is_told_with_its_node(rig, kind, who):
    rig.before = OFTEN
    nodes = rig.nodes(2, "2", str(ZOO), *TWO_NODES, args=(kind, str(who)))
    said = nodes[0].line("made no step for (.*) but nothing proves a hang: (.*)$", BOUND_S)
    (rig.dir / "told").touch()
    assert re.search(rf"rank {who} on node {who // 2} \(.*\) {PAUSES[kind]} at", said[2]), said[2]
    assert re.search(r"rank \d on node \d \(.*\) waits at .*, as 2 more", said[2]), said[2]
    assert [node.wait(BOUND_S) for node in nodes] == [0, 0] and not rig.result["restarts"]
