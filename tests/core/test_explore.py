"""All orders of what may happen in jobs of two to four nodes: no rule breaks, and each deliberate defect breaks one.

`python -m tests.core.explore` goes further.
"""

import pytest

from nvrx_slurm.core.coordinator.electing import Electing
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.takeover import Takeover
from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.election.events import Place
from nvrx_slurm.core.election.quorum import Quorum
from nvrx_slurm.core.machine import Machine

from .explore import explore, running
from .explore_streams import Broken
from .explore_world import World, coarse_times

pytestmark = [pytest.mark.fast, pytest.mark.xdist_group("explore"), pytest.mark.timeout(600)]  # it is run once

# Rows that these worlds do not reach, and why.
NOT_THERE = {
    "the cores of these worlds see no hang, no check, no clock and no file":
        "Hung Evidence Examined Spent Warmth Loaded Asked NodeUnfit WarnJob EndJob Counted TimeLeftRead ProgressRead "
        "CheckpointsFound ReachedRead Advised",
    "nodes know their addresses": "Located",
}  # fmt: skip
UNLIKELY = {
    "answers come at once": "FOLLOWING/Answered",
    "streams end before another node is sought":
        "STANDING/StreamEnded LEADING/StreamEnded STANDING/Elsewhere LEADING/Elsewhere",
    "a leader does not send its members on": "FOLLOWING/Elsewhere",
    "a node that follows has no timer": "FOLLOWING/Tick",
    "it takes some 35,000 moves": "TAKEOVER/Available",
    "a candidate without a quorum is told the end, or goes on": "STANDING/Resigned",
}  # fmt: skip


def world(nodes, active, *moves, faults=0):
    """A job that runs, after some moves. So many faults may follow."""
    first = running(nodes, active, faults)
    for move in moves:
        first.play(move)
    return first


def late():
    """A job whose agents begin one after the other."""
    first = World(2, 1, late=True)
    first.left = 1
    return first


def resets():
    """Both streams to the coordinator have broken, which it does not know yet."""
    streams = [number for number, link in running(3, 1, 0).links.items() if link.agent != link.to]
    return world(3, 1, *[("reset", number) for number in streams], faults=1)


def votes():
    """Node 2 leads in term 3 with node 0. Node 1 was cut off all the time, and stands in term 2."""
    first = world(3, 1, ("cut", 0), ("cut", 1), faults=1)
    first.settle(9.0)
    first.play(("heal", 0))
    first.settle(11.0)
    return first


@pytest.fixture(scope="module")
def found():
    """The searches, and the rows that they took, as class and "STATE/Event"."""
    taken = set()
    transit = Machine._transit

    def recorded(self, event, now):
        kind = type(event.message if isinstance(event, self.envelope) else event)
        home = self.homes.get((self.state, kind))
        taken.add((home.__name__ if home else "", f"{self.state.name}/{kind.__name__}"))
        return transit(self, event, now)

    with coarse_times(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "_transit", recorded)
        searches = [
            explore(world(2, 1, faults=1)),
            explore(world(2, 2, faults=1)),
            explore(world(3, 1, ("cut", 2))),
            explore(world(3, 2, ("cut", 0), faults=1), most_moves=20_000),
            explore(late(), most_moves=15_000),
        ]
    return searches, taken


@pytest.mark.process
def test_no_order_breaks_a_rule(found):
    searches, _ = found
    assert [len(search.queue) > 0 for search in searches] == [False] * 3 + [True] * 2
    assert sum(len(search.before) for search in searches) > 70_000


@pytest.mark.process
@pytest.mark.parametrize("home", [Election, Electing, Takeover])
def test_each_row_is_taken(found, home):
    _, taken = found
    absent = {event for events in NOT_THERE.values() for event in events.split()}
    known = {row for listed in UNLIKELY.values() for row in listed.split()}
    rows = {f"{state.name}/{event.__name__}" for state, event in home.__dict__["table"] if event.__name__ not in absent}
    assert {row for row in rows if (home.__name__, row) not in taken} == rows & known


@pytest.mark.matrix
@pytest.mark.parametrize(
    "first",
    [
        lambda: world(3, 1, ("cut", 0)),
        lambda: world(3, 2, ("cut", 0)),
        lambda: world(4, 1, ("kill", 0)),
        lambda: world(4, 2, ("kill", 0)),
    ],
)
def test_no_order_of_a_larger_world_breaks_a_rule(first):
    with coarse_times():
        assert not explore(first()).queue


# Node 2 has voted for node 1 when it is cut off, as node 0 was before. Once both are back they elect node 2, and then
# the first vote arrives.
LATE_VOTE = (
    ("done",), ("arrive", 0), ("arrive", 0), ("arrive", 0), ("cut", 0), ("pass",), ("quiet", 3), ("arrive", 2),
    ("quiet", 4), ("seek", 2), ("cut", 2), ("pass",), ("tick", "e1"), ("tick", "c1"), ("pass",), ("lapse", 0),
    ("pass",), ("tick", "e1"), ("tick", "c1"), ("pass",), ("late", 0), ("pass",), ("tick", "e1"), ("tick", "c1"),
    ("quiet", 7), ("arrive", 2), ("heal", 0), ("heal", 2), ("seek", 0), ("arrive", 2), ("arrive", 2), ("arrive", 0),
)  # fmt: skip


@pytest.mark.process
def test_a_vote_that_was_under_way_for_long_elects_nobody():
    with coarse_times():
        after = world(3, 2, *LATE_VOTE)
        assert after.cores["e2"].state is Place.LEADING
        assert after.cores["e1"].state is not Place.LEADING
        assert not explore(after).queue


@pytest.mark.process
def test_an_agent_that_is_back_before_its_stream_has_ended_is_another_one():
    with coarse_times():
        assert not explore(world(3, 2, ("kill", 1), ("back", 1))).queue


# --- deliberate defects -----------------------------------------------------------------------------------------------


def takes_any_vote(self, event, now):
    takes = self.state in (Place.LEADING, Place.STANDING)
    self._wanted = max(self._wanted, event.term)
    self.emit(el.AnswerVisitor(event.visitor, None if takes else self.where()))


def holds_no_vote(self, how, now):
    self._led_at = now
    return self._try_next(now)


def doubts_its_answer(self, event, now):
    if not self._is_better(event.where, now):
        return None
    self.emit(el.Retire())
    return self.on_elsewhere(event.where, now)


def seeks_no_answer(self, event, now):
    """A leader that was silent is not asked."""


def elects_half(self, members, dead):
    return 2 * len({*members} - dead) >= self.electors - len(dead)


def counts_a_late_death(self, key, members, unheard, now):
    """Also while the quorum of this leader may have left it unnoticed."""
    return self.strayed(key, now)


def elected_beside():
    """The leader was cut off until the others have elected another one, and does not know it."""
    first = world(3, 2, ("cut", 0), faults=1)
    first.settle(6.0)
    return first


def cut_off(node):
    return world(3, 1, ("cut", node))


def two_nodes():
    return world(2, 1, faults=1)


DEFECTS = {
    "no fence": (Quorum, "fenced_until", lambda self: 0.0, lambda: cut_off(0)),
    "a vote for any term": (Election, "on_visited", takes_any_vote, votes),
    "no hold": (Election, "_left", holds_no_vote, resets),
    "nothing is inherited": (Roster, "inherit", lambda self, plan: ([], False), two_nodes),
    "a leader that answers is doubted": (Election, "on_answered_standing", doubts_its_answer, two_nodes),
    "a doubted leader is not believed while seeking": (
        Election, "on_answered_seeking", seeks_no_answer, lambda: cut_off(2),
    ),
    "a late death counts": (Quorum, "is_late", counts_a_late_death, elected_beside),
    "half of the nodes elect": (Quorum, "_most", elects_half, two_nodes),
}  # fmt: skip


@pytest.mark.process
@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_breaks_a_rule(name, monkeypatch):
    kind, method, defect, first = DEFECTS[name]
    with coarse_times(), pytest.raises(Broken):
        monkeypatch.setattr(kind, method, defect)
        explore(first())
