"""Scripts that import nothing of ours and make no step for long: a hang is ended, a pause is told and goes on."""

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300.0)]
BOUND_S = 150.0
OFTEN = "from nvrx_slurm.node.monitors import paces\npaces.EVERY_S = 0.5"
ZOO = Path(__file__).parents[1] / "data" / "step_zoo.py"
FLAGS = ("--max-restarts=1", "--ft-step-timeout-min=3", "--ft-preload=torch", "--ft-crash-loop-backoff=0")
PER_NODE = {1: 3, 2: 2}  # ranks, by how many nodes there are
ALWAYS = {"sleeps", "sleeps/ddp", "stops", "forks", "reads"}  # the others need minutes together


def kinds(table):
    """The names in a table of the zoo."""
    text = ZOO.read_text().partition(f"\n{table} = {{")[2].partition("\n}")[0]
    return re.findall(r'^    "(\w+)":', text, re.M)


COMPUTES, MOVES = kinds("COMPUTES"), kinds("MOVES")
HANGS = [
    *((kind, 1, 1) for kind in kinds("HANGS")),
    # For the gradients, ranks wait in C++ below backward(); for the buffers, those of rank 0, in forward().
    *(("sleeps/ddp", rank, 1) for rank in (0, 1)),
    *(("sleeps", 3, 2), ("stops", 3, 2), ("locks_twice", 0, 2)),
]
PAUSES = [
    *((kind, rank, 1) for kind in (*COMPUTES, *MOVES) for rank in (0, 1)),
    *(("evaluates", 0, 2), ("reads", 3, 2)),
]


def each(cases):
    """Kind, rank, nodes: some in each run, all in the matrix."""
    tiers = (pytest.mark.matrix, pytest.mark.process)
    return [pytest.param(*case, marks=tiers[case[0] in ALWAYS and case[2] == 1]) for case in cases]


def begin(rig, kind, rank, count):
    """A job on so many nodes; what that rank does."""
    rig.before = OFTEN
    flags = (f"--nproc-per-node={PER_NODE[count]}", *FLAGS)
    return rig.nodes(count, str(count), str(ZOO), *flags, args=(kind, str(rank)))


@pytest.mark.parametrize("kind, rank, count", each(HANGS))
def test_a_rank_that_does_nothing_while_others_wait_is_ended(rig, kind, rank, count):
    nodes = begin(rig, kind, rank, count)
    assert {node.wait(BOUND_S) for node in nodes} == {0}
    (restart,) = rig.result["restarts"]
    culprits = json.loads((rig.run_dir / "cycle_0" / "hang.json").read_text())["culprits"]
    if kind == "leaves_out_a_collective":  # only NCCL's flight recorder tells which rank is missing
        assert culprits == []
    else:
        assert (culprits, restart["rank"], restart["infra_rank"]) == ([rank], rank, rank // PER_NODE[count])
    assert not kind.startswith("sleeps") or f"{PER_NODE[count] * count - 1} ranks wait for it" in restart["cause"]


@pytest.mark.parametrize("kind, rank, count", each(PAUSES))
def test_a_rank_that_may_go_on_is_told_and_left_alone(rig, kind, rank, count):
    nodes = begin(rig, kind, rank, count)
    said = nodes[0].line("made no step for .* but nothing proves a hang: (.*)$", BOUND_S)[1]
    (rig.dir / "told").touch()
    node = r" on node {} \(.*\)" if count > 1 else ""
    others = rf"rank \d{node.format('.')} waits at .*step_zoo.py:\d+ in train, as {PER_NODE[count] * count - 2} more"
    does = "computes" if kind in COMPUTES else "(reads or writes|computes)"
    # A rank that is blocked in the kernel at that moment prints no stack.
    place = "(.*step_zoo.py|an unknown place)"
    its = f"rank {rank}{node.format(rank // PER_NODE[count])} {does} at {place}"
    assert re.search(others, said) and re.search(its, said), said
    assert {node.wait(BOUND_S) for node in nodes} == {0} and not rig.result["restarts"]
