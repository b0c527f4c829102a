"""Decisions about copies of checkpoints in memory: who gets whose, what all ranks can load, and from which node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvrx_slurm.core.checkpoint.memory import GENERATIONS
from nvrx_slurm.types import Held, Kept, MemoryPlan, Node, Wanted

Save = tuple[int, int]  # cycle and iteration: an iteration that is done again is another save
Ranks = Mapping[str, Sequence[int]]  # of active nodes, by node_id
_MOST_ORDERS = 8  # of a node
_NOWHERE = Held("", 0)

_DOMAINS: tuple[
    Callable[[Node], Any], ...
] = (  # what may fail at once; the first one that is possible
    lambda node: node.domain,
    *(lambda node, most=most: node.order[:most] for most in range(1, _MOST_ORDERS + 1)),
    lambda node: node.host,
)


def partners(nodes: Sequence[Node]) -> dict[str, str]:
    """Which node gets the copies of each: every node gets those of one. Empty for a single node.

    Sorted by domain, each passes them on by the size of the largest one. So they leave their domain where none has more
    than half of the nodes. Else the next kind of domain counts; in the end, the next node is it.
    """
    line, step = list(nodes), 1
    for domain in _DOMAINS:
        largest = max(Counter(map(domain, nodes)).values(), default=0)
        if 2 * largest <= len(nodes):
            line, step = sorted(nodes, key=domain), largest
            break
    others = line[step:] + line[:step]
    pairs = zip(line, others, strict=True)
    return {one.node_id: other.node_id for one, other in pairs if one is not other}


def _holders(held: Mapping[str, Held], fits: Callable[[Kept], bool]) -> dict[Save, Any]:
    """The nodes that have a rank's part of a save, by save and rank."""
    found: dict[Save, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node_id, one in held.items():
        for kept in filter(fits, one.kept):
            found[kept.cycle, kept.iteration][kept.rank].append(node_id)
    return found


class Resumption:
    """What a job of these ranks can load from memory. `before`: only what is older than this iteration; -1 = any."""

    def __init__(self, ranks: Ranks, held: Mapping[str, Held], before: int = -1) -> None:
        self._held, self._ranks = held, ranks
        world = sum(map(len, ranks.values()))
        found = _holders(
            held,
            lambda kept: (
                kept.world == world
                and 0 <= kept.rank < world
                and (before < 0 or kept.iteration < before)
            ),
        )
        self._found = found
        whole = (save for save, holders in found.items() if len(holders) == world)
        self.saves: list[Save] = sorted(whole, reverse=True)[:GENERATIONS]  # newest first
        last = found[max(found)] if found else {}
        self.missing = [rank for rank in range(world) if rank not in last] if found else []

    def _wanted(self, node_id: str) -> tuple[Wanted, ...]:
        found = []
        for save in self.saves:
            for rank in self._ranks[node_id]:
                others = (one for one in self._found[save][rank] if one != node_id)
                if other := next(others, ""):
                    there = self._held[other]
                    found.append(Wanted(rank, *save, there.address, there.port))
        return tuple(found)

    def _moved(self) -> list[int]:
        """Ranks whose newest save is not on their node."""
        found = self._found[self.saves[0]] if self.saves else {}
        places = ((node_id, rank) for node_id, ranks in self._ranks.items() for rank in ranks)
        return [rank for node_id, rank in places if node_id not in found.get(rank, (node_id,))]

    def plans(self, active: Sequence[Node], spares: Sequence[Node]) -> dict[str, MemoryPlan]:
        """By node_id, for active nodes that have a keeper. A single one has its copies on a spare."""
        able = [node for node in active if node.node_id in self._held]
        others = [node for node in spares if node.node_id in self._held]
        found = partners(able if len(able) > 1 else [*able, *others])
        plans = {}
        for node in able:
            there = self._held.get(found.get(node.node_id, ""), _NOWHERE)
            wanted = self._wanted(node.node_id)
            plans[node.node_id] = MemoryPlan(there.address, there.port, wanted)
        return plans

    def sentence(self) -> str:
        """What is found; "" where nothing was saved."""
        if not self._found:
            return ""
        if not self.saves:
            some = _listed(self.missing)
            return f"no iteration is in memory for all ranks, {some} missing: the disk has to do"
        moved = self._moved()
        fetched = f"; {_listed(moved)} from another node" if moved else ""
        return f"iteration {self.saves[0][1]} is in memory for all ranks{fetched}"


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
