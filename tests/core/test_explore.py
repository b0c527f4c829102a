"""All orders of what may happen in a job of two or three nodes, as far as they fit in a minute: no rule breaks.

`python -m tests.core.explore` goes further.
"""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm.core.coordinator.takeover import Electing, Takeover
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.machine import Machine

from .explore import Search, explore, running
from .explore_streams import Move
from .explore_world import World, coarse_times

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("explore")]  # the search is run once

# Rows that these worlds do not reach, and why.
NOT_THERE = {
    "the cores of these worlds see no hang, no check, no clock and no file":
        "Hung Evidence Examined Spent Warmth Asked NodeUnfit WarnJob EndJob Counted TimeLeftRead ProgressRead "
        "CheckpointsFound ReachedRead Advised",
    "nodes know their addresses": "Located",
}  # fmt: skip
UNLIKELY = {
    "answers come at once": "SEEKING/Answered FOLLOWING/Answered",
    "streams end before another node is sought":
        "STANDING/StreamEnded LEADING/StreamEnded STANDING/Elsewhere LEADING/Elsewhere",
    "a leader does not send its members on": "FOLLOWING/Elsewhere",
    "a node that follows has no timer": "FOLLOWING/Tick",
    "it takes some 35,000 moves": "TAKEOVER/Available",
    "a candidate without a quorum is told the end, or goes on": "STANDING/Resigned",
}  # fmt: skip


def world(nodes: int, active: int, *moves: Move, late: bool = False) -> World:
    """A job that runs, or (`late`) begins, after some moves. One fault may follow."""
    first = World(nodes, active, late) if late else running(nodes, active, 0)
    for move in moves:
        first.play(move)
    first.left = 1
    return first


Found = tuple[list[Search], set[tuple[str, str]]]


@pytest.fixture(scope="module")
def found() -> Found:
    """The searches, and the rows that they took, as class and "STATE/Event"."""
    taken = set[tuple[str, str]]()
    transit = Machine._transit

    def recorded(self: Machine, event: Any, now: float) -> list[object]:
        kind = type(event.message if isinstance(event, self.envelope) else event)
        home = self.homes.get((self.state, kind))
        taken.add((home.__name__ if home else "", f"{self.state.name}/{kind.__name__}"))
        return transit(self, event, now)

    with coarse_times(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "_transit", recorded)
        searches = [
            explore(world(2, 1), most_moves=8_000),
            explore(world(2, 2), most_moves=4_000),
            explore(world(2, 1, late=True), most_moves=3_500),
            explore(world(3, 2, ("cut", 0)), most_moves=12_500),
        ]
    return searches, taken


def test_no_order_breaks_a_rule(found: Found) -> None:
    searches, _ = found
    assert [len(search.queue) > 0 for search in searches] == [True] * 4
    assert sum(len(search.before) for search in searches) > 10_000


@pytest.mark.parametrize("home", [Election, Electing, Takeover])
def test_each_row_is_taken(found: Found, home: type) -> None:
    _, taken = found
    absent = {event for events in NOT_THERE.values() for event in events.split()}
    known = {row for listed in UNLIKELY.values() for row in listed.split()}
    rows = {f"{state.name}/{event.__name__}" for state, event in home.__dict__["table"] if event.__name__ not in absent}
    assert {row for row in rows if (home.__name__, row) not in taken} == rows & known
