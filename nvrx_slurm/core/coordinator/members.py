"""The connected agents: which are here, ready or missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, KeysView, Sequence
from dataclasses import dataclass
from enum import Enum

from nvrx_slurm import types as t
from nvrx_slurm.core.election.quorum import peer_key

_NAMES_SHOWN = 16


def infra_order(node: t.Node) -> tuple[tuple[int, ...], int, str, str]:
    """Sort key of members: network topology, then the order Slurm gave us, then the node's own descriptor."""
    return (node.order, node.infra_rank, node.addr, node.node_id)


def complete_segments(nodes: Iterable[t.Node], segment: int) -> int:
    """How many segments of `segment` (>= 1) nodes there are, each within one domain. O(nodes)."""
    return sum(count // segment for count in Counter(node.domain for node in nodes).values())


def is_possible(ready: Collection[t.Node], min_nodes: int, segment: int | None) -> bool:
    """Whether `place` has enough nodes."""
    if len(ready) < min_nodes:
        return False
    return not segment or complete_segments(ready, segment) * segment >= min_nodes


class Use(Enum):
    """What can be done with a member."""

    READY = "it can be planned with"
    JOINING = "it cannot yet be planned with"
    PREPARING = "it has run nothing and is being checked"
    BUSY = "it may still run workers of a cycle"


@dataclass(slots=True)
class Member:
    """One connected agent."""

    node: t.Node
    port: int  # it offers this one as MASTER_PORT
    use: Use = Use.READY
    cycle: int = -1  # BUSY: the highest one of which it may still run workers
    held: t.InMemory | None = None  # checkpoints in its memory, as it told last


class MemberTable(dict[str, Member]):
    """Connected agents by node_id; every query the coordinator makes per message is O(1)."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[str, str] = {}  # `peer_key` -> node_id of the latest life
        self.ready = 0  # how many have no workers
        self.warmth: dict[str, t.Warmth] = {}  # what each node told last, by node_id

    def same_place(self, node: t.Node) -> Member | None:
        """The connected member that `node` replaces: the same agent life, or the same infra rank."""
        if node.node_id in self:
            return self[node.node_id]
        return self.get(self._holders.get(peer_key(node), ""))

    def put(self, node: t.Node, port: int, use: Use, held: t.InMemory | None = None) -> None:
        """Add a member, or note what has become of it."""
        node_id = node.node_id
        self.remove(node_id)
        self[node_id] = Member(node, port, use, held=held)
        self.ready += use is Use.READY
        self._holders[peer_key(node)] = node_id

    def remove(self, node_id: str) -> Member | None:
        """Forget a member; None if it is not here."""
        member = self.pop(node_id, None)
        if member is None:
            return None
        self.ready -= member.use is Use.READY
        key = peer_key(member.node)
        if self._holders.get(key) == node_id:
            del self._holders[key]
        return member

    @property
    def keys_of_nodes(self) -> KeysView[str]:
        """The members by `quorum.peer_key`, as a live view."""
        return self._holders.keys()

    def set_use(self, node_id: str, use: Use, cycle: int = -1) -> None:
        """Note what can be done with a member; BUSY: it may run workers of `cycle`."""
        member = self[node_id]
        self.ready -= member.use is Use.READY
        self.ready += use is Use.READY
        member.use = use
        member.cycle = cycle

    def note_warmth(self, node_id: str, told: t.Warmth) -> None:
        """Whether a node can fork its ranks."""
        self.warmth[node_id] = told

    def not_ready(self, node_ids: Iterable[str]) -> set[str]:
        """Those of them that are connected and may have workers."""
        found = set()
        for node_id in node_ids:
            member = self.get(node_id)
            if member is not None and member.use is not Use.READY:
                found.add(node_id)
        return found

    def note_ready(self, node_id: str, message: t.Ready) -> bool:
        """Whether this message makes a busy member ready; a repeated or stale one does not."""
        member = self.get(node_id)
        if member is None or member.use is Use.READY:
            return False
        first = message.term == 0  # it has never run anything
        is_stale = first or message.cycle < member.cycle
        if is_stale and member.use is not Use.PREPARING:
            return False
        self.set_use(node_id, Use.READY)
        member.port = message.port
        member.held = message.held
        return True

    def ready_nodes(self) -> list[t.Node]:
        """The nodes that can be part of a plan now."""
        return [m.node for m in self.values() if m.use is Use.READY]

    def in_order(self) -> list[t.Node]:
        """All connected nodes in infra order."""
        return sorted((m.node for m in self.values()), key=infra_order)

    def missing_segments(self, min_nodes: int, segment: int) -> str:
        """One sentence: how many complete segments the ready nodes are, and which domains have nodes to spare."""
        ready = self.ready_nodes()
        complete = complete_segments(ready, segment)
        needed = min_nodes // segment
        left = Counter(node.domain for node in sorted(ready, key=infra_order))
        some = []
        for name, count in left.items():
            if count % segment:
                some.append(f"domain {name} has {count} nodes")
        have = f"only {complete} of {needed} complete segments of {segment}"
        which = f": {_listed(some)}" if some else ""
        return f"{len(ready)} nodes are ready, but {have}{which}"


def missing(here: Collection[str], expected: Sequence[str], at_least: int) -> str:
    """One sentence: how many are here (by `peer_key`) and, as far as names are known, which are missing."""
    head = f"{len(here)} of at least {at_least} nodes are here"
    names = []
    for rank, host in enumerate(expected):
        if str(rank) not in here:
            names.append(host)
    return f"{head}; missing: {_listed(names)}" if names else head


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    left = len(names) - _NAMES_SHOWN
    return f"{shown} and {left} more" if left > 0 else shown


def lost(node: t.Node, why: str) -> t.RankFault:
    """A node that is gone, as a fault."""
    return t.RankFault(t.FaultKind.NODE_LOST, node.host, node.infra_rank, message=why)
