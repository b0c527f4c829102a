"""A hot spare falls sick, by a check that is not watched: it is out before it is needed."""

from __future__ import annotations

from pathlib import Path

from agent_harness import Launcher, Rig
from test_agent_nodes import QUICK, UNTIL_TOLD, finish, kill, up
from test_agent_preflight import events, said_of

from nvrx_slurm.errors import ExitCode

# All checks of an idle node are run every 12 intervals.
FLAGS = (
    "--max-restarts=2",
    "--ft-enable-dist-storage-healthcheck=true",
    "--ft-node-health-check-interval=0.05",
    *QUICK,
)
SICK = "NOT HEALTHY\n"
WHY = "is not healthy: lustre: /sys/fs/lustre/health_check says 'NOT HEALTHY' instead of healthy"


def lustre(rig: Rig, rank: int) -> Path:
    """What Lustre says of itself on a node."""
    return rig.dir / f"node{rank}" / "sys/fs/lustre/health_check"


def started(rig: Rig, nnodes: str, count: int, *flags: str) -> list[Launcher]:
    """Nodes with a Lustre each, which is well; the first two work, the others are spares."""
    script, nodes = rig.script(UNTIL_TOLD), []
    for rank in range(count):
        lustre(rig, rank).parent.mkdir(parents=True)
        lustre(rig, rank).write_text("healthy\n")
        nodes.append(rig.node(rank, nnodes, script, *FLAGS, f"--sysroot={rig.dir}/node{rank}", *flags))
    assert [up(nodes[rank], 0)[0] for rank in (0, 1)] == [0, 1]
    for spare in nodes[2:]:
        spare.line("this node is a hot spare")
    return nodes


def fall_sick(rig: Rig, nodes: list[Launcher], rank: int) -> None:
    """A spare is sick from now on: it leaves, nobody else is disturbed, and everybody is told why."""
    lustre(rig, rank).write_text(SICK)
    assert nodes[rank].wait() == ExitCode.NODE_REFUSED
    assert nodes[rank].said[-1].endswith(WHY) and nodes[rank].cycles == []
    nodes[0].line(rf"node {rank} \(\S+\) is not healthy: lustre: ")
    assert said_of(nodes[0], rank, WHY) and "restart 1" not in nodes[0].text
    assert "says 'NOT HEALTHY'" in events(rig)


def lose(nodes: list[Launcher], rank: int, cycle: int) -> None:
    kill(nodes[rank], [up(nodes[rank], cycle)[1]])


def test_another_spare_is_promoted_and_not_the_sick_one(rig: Rig) -> None:
    nodes = started(rig, "2:4", 4)
    fall_sick(rig, nodes, 2)
    lustre(rig, 2).write_text("healthy\n")  # too late: it is out
    lose(nodes, 1, 0)
    assert (up(nodes[0], 1)[0], up(nodes[3], 1)[0]) == (0, 1)
    finish(rig, 1)
    assert [nodes[rank].wait() for rank in (0, 3)] == [0, 0], nodes[0].text
    assert "restart 1 of 2" in nodes[0].text and rig.result["code"] == 0
