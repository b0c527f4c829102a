"""All orders of messages, losses, deaths and time-outs in a job of a few nodes: the real cores, breadth first.

    python -m tests.core.explore --nodes 3 --active 2 --faults 2 --minutes 60

States that differ in nothing that a core can tell are merged. From each state there has to be a way to the end of the
job without another fault. `explore_world` says what may happen.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from .explore_streams import Broken, Move
from .explore_world import HORIZON_S, World, coarse_times


def running(nodes, active, faults):
    """A job whose first cycle runs."""
    world = World(nodes, active)
    while len(world.ranks) < active or world.enabled():
        world.play((*world.enabled(), ("pass",))[0])
    world.left = faults
    return world


@dataclass
class Search:
    """The states that were found, by number, and how each was reached first."""

    known: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # key -> faults that are left, and number
    before: list[tuple[int, Move]] = field(default_factory=list)  # the state before, and the move
    ways: list[list[int]] = field(default_factory=list)  # states from which it is reached without a fault
    ended: list[int] = field(default_factory=list)
    queue: deque[tuple[int, World]] = field(default_factory=deque)
    moves: int = 0

    def note(self, world, number, move, free):
        """The state after a move; `free`: the move is no fault."""
        found, alike = len(self.before), self.known.setdefault(world.key(), [])
        for left, other in alike:
            if left >= world.left:
                found = other
                break
        else:
            alike.append((world.left, found))
            self.before.append((number, move))
            self.ways.append([])
            self.queue.append((found, world))
        if free:
            self.ways[found].append(number)

    @property
    def depth(self):
        """How many moves led to the last state."""
        return self.story(len(self.before) - 1).count("\n") + 1

    def story(self, number):
        """The moves to this state."""
        steps = []
        while number:
            number, move = self.before[number]
            steps.append(str(move))
        return "\n".join(reversed(steps))

    def expand(self, number, world):
        """Play each move that is possible in this state."""
        free = world.moves()
        for move in [*free, *(world.faults() if world.left else ())]:
            after = world.copy()
            after.left -= move not in free
            self.moves += 1
            named = round(world.now - 1000, 1), move[0], *(world.flight[move[1]] if move[0] == "arrive" else move[1:])
            try:
                after.play(move)
            except Exception as error:
                raise Broken(f"{error!r}, after\n{self.story(number)}\n{named}") from error
            self.note(after, number, named, move in free)

    def check_ways(self):
        """From each state there is a way to an end, or to a state that is not expanded yet."""
        reached = self.ended + [number for number, _ in self.queue]
        good = set(reached)
        while reached:
            new = set(self.ways[reached.pop()]) - good
            good |= new
            reached += new
        if len(good) < len(self.before):
            stuck = min(set(range(len(self.before))) - good)
            raise Broken(f"no way to the end, after\n{self.story(stuck)}")


def explore(first, seconds=3600.0, most_moves=1 << 40):
    """All states that are found within this processor time and so many moves. Raises Broken."""
    search, until = Search(), time.process_time() + seconds
    search.note(first, 0, (), free=False)
    while search.queue and time.process_time() < until and search.moves < most_moves:
        number, world = search.queue.popleft()
        if world.over:
            search.ended.append(number)
        elif world.now < 1000.0 + HORIZON_S:
            search.expand(number, world)
    search.check_ways()
    return search


def main():
    """Returns 1 where a rule breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("nodes", 3), ("active", 2), ("faults", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--boot", action="store_true", help="from the start of the agents on")
    parser.add_argument("--late", action="store_true", help="the same; they begin one after the other, as in Slurm")
    args = parser.parse_args()
    with coarse_times():
        return report(args)


def report(args):
    """Search, and say what was found."""
    boots = args.boot or args.late
    world = World(args.nodes, args.active, args.late) if boots else running(args.nodes, args.active, args.faults)
    world.left = args.faults
    try:
        search = explore(world, 60.0 * args.minutes)
    except Broken as broken:
        print(broken)
        return 1
    states = f"{len(search.before)} states, {search.moves} moves"
    print(f"{states}, {search.depth} steps deep, {len(search.queue)} states left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
