"""The coordinator's view of the connected agents: which are here, ready or missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView, Sequence
from dataclasses import dataclass

from nvrx_slurm.core.job.placement import complete_segments, infra_order, is_possible
from nvrx_slurm.core.job.quorum import peer_key
from nvrx_slurm.types import Node, Stopped

# Values of `busy` instead of a cycle. READY: it can be planned with. JOINING: it cannot yet. PREPARING: it has run
# nothing and is being checked.
READY, JOINING, PREPARING = -1, -2, -3
_NAMES_SHOWN = 16


@dataclass(slots=True)
class Member:
    """One connected agent."""

    node: Node
    port: int  # it offers this one as MASTER_PORT
    busy: int = READY  # highest cycle of which it may still run workers


class Members(dict[str, Member]):
    """Connected agents by node_id; every query the coordinator makes per message is O(1)."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[str, str] = {}  # `peer_key` -> node_id of the latest life
        self.ready = 0  # how many have no workers

    def same_place(self, node: Node) -> Member | None:
        """The connected member that `node` replaces: the same agent life, or the same infra rank."""
        known = node.node_id if node.node_id in self else self._holders.get(peer_key(node), "")
        return self.get(known)

    def put(self, node: Node, port: int, busy: int) -> None:
        """Add a member, or note what has become of it."""
        self.remove(node.node_id)
        self[node.node_id] = Member(node, port, busy)
        self.ready += busy == READY
        self._holders[peer_key(node)] = node.node_id

    def remove(self, node_id: str) -> Member | None:
        """Forget a member; None if it is not here."""
        member = self.pop(node_id, None)
        if member is None:
            return None
        self.ready -= member.busy == READY
        if self._holders.get(peer_key(member.node)) == node_id:
            del self._holders[peer_key(member.node)]
        return member

    @property
    def keys_of_nodes(self) -> KeysView[str]:
        """The members by `quorum.peer_key`, as a live view."""
        return self._holders.keys()

    def set_busy(self, node_id: str, cycle: int) -> None:
        """Note that a member may run workers of `cycle`, or with READY that it runs none."""
        member = self[node_id]
        self.ready += (cycle == READY) - (member.busy == READY)
        member.busy = cycle

    def may_run(self, node_id: str) -> bool:
        """Whether it is connected and may have workers."""
        member = self.get(node_id)
        return member is not None and member.busy != READY

    def note_stopped(self, node_id: str, message: Stopped) -> bool:
        """Whether this message makes a busy member ready; a repeated or stale one does not."""
        member = self.get(node_id)
        if member is None or member.busy == READY:
            return False
        first = message.term == 0  # it has never run anything
        if member.busy != PREPARING and (first or message.cycle < member.busy):
            return False
        self.set_busy(node_id, READY)
        member.port = message.port
        return True

    def ready_nodes(self) -> list[Node]:
        """The nodes that can be part of a plan now."""
        return [m.node for m in self.values() if m.busy == READY]

    def enough(self, min_nodes: int, segment: int | None) -> bool:
        """Whether a plan can be made of the ready nodes. O(1), but O(nodes) with segments once there are so many."""
        return self.ready >= min_nodes and (not segment or is_possible(self.ready_nodes(), min_nodes, segment))

    def in_order(self) -> list[Node]:
        """All connected nodes in infra order."""
        return sorted((m.node for m in self.values()), key=infra_order)

    def missing(self, expected: Sequence[str], at_least: int) -> str:
        """One sentence: how many are here and, as far as names are known, which are missing."""
        head = f"{len(self)} of at least {at_least} nodes are here"
        names = [host for rank, host in enumerate(expected) if str(rank) not in self._holders]
        if not names:
            return head
        return f"{head}; missing: {_listed(names)}"

    def missing_segments(self, min_nodes: int, segment: int) -> str:
        """One sentence: how many complete segments the ready nodes are, and which domains have nodes to spare."""
        ready = self.ready_nodes()
        have = f"{complete_segments(ready, segment)} of {min_nodes // segment} complete segments of {segment}"
        left = Counter(node.domain for node in sorted(ready, key=infra_order))
        some = [f"domain {name} has {count} nodes" for name, count in left.items() if count % segment]
        return f"{len(ready)} nodes are ready, but only {have}" + (f": {_listed(some)}" if some else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
