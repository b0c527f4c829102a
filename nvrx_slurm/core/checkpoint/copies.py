"""Decisions about copies of checkpoints in memory: who gets whose, what all ranks can load, and from which node."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvrx_slurm.core.checkpoint.memory import GENERATIONS
from nvrx_slurm.types import InMemory, MemoryPlan, Node, Wanted

Save = tuple[int, int]  # cycle and iteration: an iteration that is done again is another save
_MOST_ORDERS = 8  # of a node
_SHOWN = 8
_NOWHERE = InMemory("", 0)

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
    line = list(nodes)
    step = 1
    for domain in _DOMAINS:
        sizes = Counter(map(domain, nodes))
        largest = max(sizes.values(), default=0)
        if 2 * largest <= len(nodes):
            line = sorted(nodes, key=domain)
            step = largest
            break
    others = line[step:] + line[:step]
    found = {}
    for one, other in zip(line, others, strict=True):
        if one is not other:
            found[one.node_id] = other.node_id
    return found


def _ranks_of(nodes: Sequence[Node]) -> dict[str, range]:
    found = {}
    first = 0
    for node in nodes:
        end = first + node.nproc
        found[node.node_id] = range(first, end)
        first = end
    return found


class Resumption:
    """What a cycle on these nodes, in the order of their group ranks, can load from memory.

    `before`: only what is older than this iteration; -1 = any.
    """

    def __init__(
        self, active: Sequence[Node], held: Mapping[str, InMemory], before: int = -1
    ) -> None:
        self._active = active
        self._held = held
        self._ranks = _ranks_of(active)
        world = sum(node.nproc for node in active)

        # the nodes that have a rank's part of a save, by save and rank
        self._found: dict[Save, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
        found = self._found
        for node_id, one in held.items():
            for kept in one.kept:
                is_of_job = kept.world == world and 0 <= kept.rank < world
                if is_of_job and (before < 0 or kept.iteration < before):
                    found[kept.cycle, kept.iteration][kept.rank].append(node_id)
        whole = [save for save, holders in found.items() if len(holders) == world]
        whole.sort(reverse=True)
        self.saves: list[Save] = whole[:GENERATIONS]  # newest first
        self._missing: list[int] = []  # ranks without the newest save of all
        if found:
            last = found[max(found)]
            self._missing = [rank for rank in range(world) if rank not in last]

    @property
    def iteration(self) -> int:
        """The newest one that all ranks can load; -1 = none."""
        return self.saves[0][1] if self.saves else -1

    def _wanted(self, node_id: str) -> tuple[Wanted, ...]:
        found = []
        for save in self.saves:
            for rank in self._ranks[node_id]:
                holders = self._found[save][rank]
                others = [one for one in holders if one != node_id]
                if others:
                    there = self._held[others[0]]
                    wanted = Wanted(rank, *save, there.address, there.port)
                    found.append(wanted)
        return tuple(found)

    def _able(self, nodes: Sequence[Node]) -> list[Node]:
        return [node for node in nodes if node.node_id in self._held]

    def plans(self, spares: Sequence[Node]) -> dict[str, MemoryPlan]:
        """By node_id, for nodes that have a keeper. A single one has its copies on a spare."""
        able = self._able(self._active)
        line = list(able)
        if len(able) == 1:
            line += self._able(spares)
        found = partners(line)
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
            some = listed(self._missing)
            return f"no iteration is in memory for all ranks, {some} missing: the disk has to do"
        return f"iteration {self.iteration} is in memory for all ranks"


def listed(ranks: Sequence[int]) -> str:
    """A few of them by number."""
    shown = ", ".join(map(str, ranks[:_SHOWN]))
    more = ", ..." if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"
