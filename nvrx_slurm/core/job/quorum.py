"""May this coordinator act? It may while most of the job's nodes that can be alive are its members.

Two coordinators never have a quorum at the same time: a node is a member of one coordinator, and only a node that is
proven dead is not counted. Silence proves nothing. Pure; decision 017.
"""

from __future__ import annotations

from collections.abc import Collection

from nvrx_slurm.types import Node, Peer


def peer_key(node: Node) -> str:
    """What a node is known by over all lives of its agent."""
    return str(node.infra_rank) if node.infra_rank >= 0 else node.node_id


def peer_of(node: Node) -> Peer:
    """Where the agent of this node listens."""
    return Peer(peer_key(node), node.host, node.addr, node.port)


class Quorum:
    """Counts the members against the job's nodes. `electors` 0: the job has one node, or needs no quorum."""

    def __init__(self, electors: int) -> None:
        self.electors = electors
        self.elected = electors <= 1
        self.dead: set[str] = set()  # keys of nodes whose agents are proven dead
        self.fence_until = 0.0  # ranks of older terms may run on nodes that did not register
        self.silent: set[str] = set()  # keys of members that are about to be removed for their silence
        self.fences: dict[str, float] = {}  # key of a lost node -> until when its ranks may run
        self.resign_at: float | None = None  # without a quorum

    @property
    def needed(self) -> bool:
        """Whether this job elects its coordinators."""
        return self.electors > 0

    def enough(self, members: Collection[str]) -> bool:
        """Whether these nodes (keys) are a quorum. The elected coordinator keeps its office with exactly half."""
        living = self.electors - len(self.dead.difference(members))
        have = 2 * len(members)
        return have > living or (self.elected and have == living)

    def missing(self, members: Collection[str]) -> int:
        """How many nodes are neither members nor proven dead."""
        return max(0, self.electors - len(self.dead.union(members)))

    def died(self, key: str, members: Collection[str]) -> None:
        """This node's agent is proven dead, and its ranks with it."""
        self.dead.add(key)
        self.fences.pop(key, None)
        self._unfence(members)

    def _unfence(self, members: Collection[str]) -> None:
        if not self.missing(members):
            self.fence_until = 0.0

    def back(self, key: str) -> None:
        """This node has registered."""
        self.dead.discard(key)
        self.fences.pop(key, None)

    def fenced_until(self) -> float:
        """Before this (monotonic seconds) no rank may be started that may still run elsewhere."""
        return max(self.fence_until, *self.fences.values()) if self.fences else self.fence_until
