"""What a coordinator learns of earlier terms from the agents that register; it has no other memory of them."""

from __future__ import annotations

from nvrx_slurm.types import Register, Running

STOPPING = 0  # `Running.active_nodes` of an agent whose workers are being stopped: it has a place, but cannot carry on


class Inherited:
    """The last cycle that anybody has seen a plan of, and who has a place in it. O(1) per message."""

    def __init__(self) -> None:
        self.last_cycle = -1
        self.restarts_used = 0
        self.places: dict[int, str] = {}  # group rank -> node_id, of `last_cycle` only
        self.running: set[str] = set()  # those of them who still run it, or are done with it
        self.succeeded: set[int] = set()  # group ranks of those who are done with it
        self._group_rank: dict[str, int] = {}  # the inverse of `places`
        self._needed = 0  # active nodes of that cycle

    def learn(self, message: Register) -> list[str]:
        """Note what an agent has seen; returns the runners of a cycle that turns out not to be the last one."""
        self.restarts_used = max(self.restarts_used, message.restarts_used)
        if message.last_cycle <= self.last_cycle:
            return []
        self.last_cycle = message.last_cycle
        overtaken = sorted(self.running)
        self.take()
        return overtaken

    def claim(self, node_id: str, running: Running) -> bool:
        """Take down what an agent runs; whether that is a place in the last cycle that nobody else has."""
        holder = self.places.setdefault(running.group_rank, node_id) if running.cycle == self.last_cycle else ""
        if holder != node_id:
            return False
        self._group_rank[node_id] = running.group_rank
        if running.active_nodes == STOPPING:
            return True
        self._needed = running.active_nodes
        self.running.add(node_id)
        if running.succeeded:
            self.succeeded.add(running.group_rank)
        return True

    def finished(self, node_id: str) -> None:
        """This agent is done with the last cycle."""
        if node_id in self.running:
            self.succeeded.add(self._group_rank[node_id])

    def stopped(self, node_id: str) -> None:
        """This agent does not run the last cycle (any more), but keeps its place for the next one."""
        self.running.discard(node_id)
        self.succeeded.discard(self._group_rank.get(node_id, -1))

    def complete(self, min_nodes: int) -> bool:
        """Whether all of the last cycle is here and goes on, and it is of the size that we would plan."""
        return len(self.running) == self._needed == min_nodes

    def take(self) -> tuple[dict[int, str], set[int]]:
        """Places and successes, which from now on are the coordinator's own."""
        taken = self.places, self.succeeded
        self.places, self.running, self.succeeded, self._group_rank = {}, set(), set(), {}
        return taken
