"""Which node of the job a line of a log means. Pure.

A line names a node by its short or long name, by an address, or by a rank. A line about a node that is not of the job
is a quotation, or another job's: it blames nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nvrx_slurm.declared import replace
from nvrx_slurm.types import Blame, Confidence, LineRole, RankFault, Remedy

UNNAMED = "?"  # a node of the job that the line does not name
_RANK = "rank "
_NODE_FAILURE = "node failure"


class JobNode(NamedTuple):
    """A node of the job, perhaps one that is gone."""

    host: str
    addr: str = ""  # "" = not known
    ranks: Sequence[int] = ()


def node_of(fields: Mapping[str, str]) -> str:
    """The node of which a line tells: its name or address, "rank N", or UNNAMED; "" = none."""
    node, rank = fields.get("node", ""), fields.get("rank", "")
    if not node and not rank and fields.get("reason", "").lower() == _NODE_FAILURE:
        return UNNAMED  # Slurm prints this on the nodes that are left
    return node or (f"{_RANK}{rank}" if rank else "")


def in_words(node: str) -> str:
    """Of a finding's node: what a person is told."""
    return "a node that Slurm does not name" if node == UNNAMED else f"node {node}"


def host_of(name: str, nodes: Sequence[JobNode]) -> str:
    """The host that a line means; "" where it is none of the job."""
    if name.startswith(_RANK):
        rank = int(name.removeprefix(_RANK))
        return next((node.host for node in nodes if rank in node.ranks), "")
    wanted = name.lower()
    for node in nodes:
        if wanted and wanted in (node.host.lower(), node.addr):
            return node.host
    alike = {node.host for node in nodes if _is_alike(wanted, node.host.lower())}
    return alike.pop() if len(alike) == 1 else ""


def _is_alike(one: str, other: str) -> bool:
    """Whether one is the short form of the other. Addresses have none."""
    short, long = sorted((one, other), key=len)
    return not short.isdecimal() and long.startswith(f"{short}.")


def placed(fault: RankFault, nodes: Sequence[JobNode]) -> RankFault:
    """The fault with the host that its line means. Without one, its rule does not count."""
    f = fault.finding
    if f is None or f.node in ("", UNNAMED) or "[" in f.node:  # a list of Slurm's
        return fault
    host = host_of(f.node, nodes)
    if host:
        return replace(fault, finding=replace(f, node=host))
    unknown = replace(
        f,
        rule="",
        role=LineRole.UNCLEAR,
        blame=Blame.UNKNOWN,
        confidence=Confidence.GUESS,
        remedy=Remedy.RESTART,
        rests_on="exit",
        node="",
    )
    return replace(fault, finding=unknown)
