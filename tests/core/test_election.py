"""Elections of one node: random walks, and the steps that protect a vote."""

import random

import pytest

from nvrx_slurm.core.election import election as el
from nvrx_slurm.core.machine import Say, Tick
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Elsewhere, Peer

pytestmark = pytest.mark.fast


PEERS = tuple(Peer(str(i), f"h{i}", f"10.0.0.{i}", 7000) for i in range(3))
POSSIBLE = {
    el.Place.SEEKING: (el.Led,),
    el.Place.FOLLOWING: (el.Led,),
    el.Place.STANDING: (el.Elected, el.Resigned),
    el.Place.LEADING: (el.Led, el.Resigned),
}
ALWAYS = (el.StreamEnded, Elsewhere, el.Answered, Tick, el.Visited, el.Located)


def an_election(rank):
    return el.Election(PEERS[rank], PEERS, el.ElectionSettings(), 0.0)


def walk(seed, steps=40):
    """Any event that a state knows, in any order: a term never goes down, and nothing contradicts itself."""
    rng, now = random.Random(seed), 0.0
    core = an_election(seed % 3)
    core.step(el.Begin(), now)
    for _ in range(steps):
        kind, before = rng.choice((*POSSIBLE[core.state], *ALWAYS)), core.term
        term, other = max(0, core.term + rng.randrange(-1, 3)), rng.choice(PEERS)
        leader = core.me if core.state is el.Place.LEADING else other
        values = {
            el.StreamEnded: (rng.choice(list(el.StreamEnd)),),
            Elsewhere: (term, other, rng.random() < 0.5),
            el.Answered: (rng.choice(PEERS), Elsewhere(term, other, rng.random() < 0.5)),
            el.Led: (max(term, before), leader, PEERS),
            el.Visited: ("h9.0", term),
            el.Located: ("10.0.0.9",),
        }
        event = kind(*values.get(kind, ()))
        now = max(now + rng.choice((0.0, 0.3)), (core.deadline() or 0.0) if kind is Tick else 0.0)
        core.step(event, now)
        core.validate()
        assert core.term >= before, f"seed {seed}: {event} took the term down"


def test_any_events_in_any_order_take_no_term_down():
    for seed in range(1000, 1300):
        walk(seed)


def test_the_first_candidate_is_tried_again_in_the_same_term():
    core = an_election(1)
    assert core.step(el.Begin(), 0.0) == [el.Seek(PEERS[0], 1)]
    assert core.step(el.StreamEnded(el.StreamEnd.REFUSED), 0.1) == [] and core.where().term == 1
    assert core.step(Tick(), core.deadline() or 0.0) == [el.Seek(PEERS[0], 1)]


def test_a_vote_for_a_node_that_was_named_by_another_is_given_once():
    core = an_election(1)
    core.step(el.Begin(), 0.0)
    assert core.step(Elsewhere(4, PEERS[2], False), 0.1) == [el.Seek(PEERS[2], 4)]
    core.step(el.StreamEnded(el.StreamEnd.SILENT), 0.2)
    core.step(Tick(), core.deadline() or 0.0)
    assert core.term == 5  # node 2 may have counted this vote for term 4


def test_a_node_learns_its_address_once():
    core = el.Election(Peer("0", "h0", "", 7000), PEERS, el.ElectionSettings(), 0.0)
    for addr in ("10.0.0.5", "10.0.0.6"):
        core.step(el.Located(addr), 0.0)
    assert core.me == Peer("0", "h0", "10.0.0.5", 7000)


# What a node does next, step by step.
# P: the peers; node 1 is the one that is told. Each row: (event, the commands that follow, in order).

P, S = PEERS, el.StreamEnd
SILENT, CLOSED, REFUSED, UNREACHED = (el.StreamEnded(how) for how in (S.SILENT, S.CLOSED, S.REFUSED, S.UNREACHED))
HINT = el.Answered(P[2], Elsewhere(1, P[0], True))  # node 2 says that node 0 leads
LED = el.Led(1, P[0], (P[1], P[2]))  # node 0 leads, then node 1 may, then node 2
SOUGHT = [(el.Begin(), [el.Seek(P[0], 1)])]
FOLLOWS = [*SOUGHT, (LED, [])]
STANDS = [*FOLLOWS, (SILENT, [el.Stand(2)])]
LEADS = [*STANDS, (el.Elected(), [])]
ASKS = [el.AskWhoLeads(P[0]), el.AskWhoLeads(P[2])]
STORIES = {
    "the candidates take turns, each in a later term": [
        *FOLLOWS, (SILENT, [el.Stand(2)]), (el.Resigned(), [el.Retire(), el.Seek(P[2], 3)]),
        (el.Led(3, P[2], (P[0], P[1])), []), (SILENT, [el.Seek(P[0], 4)]), (REFUSED, [el.Stand(5)]),
    ],
    "a leader whose stream broke may count on this node: for a while no other gets its vote": [
        *FOLLOWS, (CLOSED, [el.Seek(P[0], 2)]), (UNREACHED, []), (0.1, [el.Seek(P[0], 2)]), (UNREACHED, []),
        (6.5, [el.Stand(2)]),
    ],
    "a leader that is dead counts on nobody": [*FOLLOWS, (CLOSED, [el.Seek(P[0], 2)]), (REFUSED, [el.Stand(2)])],
    "a candidate whose stream broke may have won, and the vote for it is used": [
        *SOUGHT, (CLOSED, [el.Seek(P[0], 2)]), (UNREACHED, []), (6.5, [el.Stand(2)]),
    ],
    "a node that was reached in vain has no vote of this one": [*SOUGHT, ("6", []), (UNREACHED, [el.Stand(2)])],
    "a leader that was silent is doubted until its lease is over, whatever others say": [
        *FOLLOWS, (SILENT, [el.Stand(2)]), (HINT, []), ("11", []), (HINT, [el.Retire(), el.Seek(P[0], 2)]),
    ],
    "a leader that says itself that it leads is not doubted": [
        *FOLLOWS, (SILENT, [el.Stand(2)]), (replace(HINT, peer=P[0]), [el.Retire(), el.Seek(P[0], 2)]),
    ],
    "a node that seeks asks a leader that it doubts, and believes it": [
        (el.Begin(), [el.Seek(P[0], 1)]), (el.Led(1, P[2], (P[0], P[1])), []), (SILENT, [el.Seek(P[0], 2)]),
        (Elsewhere(1, P[2], True), [el.AskWhoLeads(P[2])]),
        (el.Answered(P[2], Elsewhere(1, P[0], True)), []),
        (el.Answered(P[2], Elsewhere(1, P[2], True)), [el.Seek(P[2], 2)]),
        (el.Answered(P[2], Elsewhere(1, P[2], True)), []),
    ],
    "a leader whose stream broke is not doubted": [
        *FOLLOWS, (CLOSED, [el.Seek(P[0], 2)]), (REFUSED, [el.Stand(2)]),
        (HINT, [el.Retire(), el.Seek(P[0], 2)]),
    ],
    "a hint to a leader or to a later candidate is followed at once": [
        *SOUGHT, (Elsewhere(3, P[2], True), [el.Seek(P[2], 3)]), (Elsewhere(4, P[0], False), [el.Seek(P[0], 4)]),
    ],
    "others wait for this node to be the candidate": [*SOUGHT, (Elsewhere(9, P[1], False), [el.Stand(9)])],
    "a node that knows less is asked again, some times": [
        *SOUGHT, (Elsewhere(9, P[1], True), []), (1.0, [el.Seek(P[0], 1)]),
        *[step for tries in range(7) for step in (
            (Elsewhere(1, P[0], False), []), (float(tries + 2), [el.Seek(P[0], 1)]),
        )],
        (Elsewhere(1, P[0], False), []), (9.0, [el.Stand(2)]),
    ],
    "a hinted node that is dead has not counted the vote": [
        *SOUGHT, (Elsewhere(4, P[2], False), [el.Seek(P[2], 4)]), (REFUSED, []), (0.02, [el.Seek(P[0], 4)]),
    ],
    "of two candidates the one with the later term, or the later key, goes on": [
        *STANDS, (el.Answered(P[0], Elsewhere(2, P[0], False)), []),
        (el.Answered(P[0], Elsewhere(2, P[2], False)), [el.Retire(), el.Seek(P[2], 2)]),
    ],
    "a leader that knows the job goes on beside another": [*LEADS, (el.Answered(P[2], Elsewhere(9, P[2], True)), [])],
    "a leader that resigns retires, and its successors take turns": [
        *LEADS, (el.Resigned(), [el.Retire(), el.Stand(3)]),
    ],
    "a candidate takes votes for its term, and after a moment stands for a later one that was voted for": [
        *STANDS, (el.Visited("h0.0", 2), [el.AnswerVisitor("h0.0", None)]),
        (el.Visited("h0.0", 1), [el.AnswerVisitor("h0.0", Elsewhere(2, P[1], False))]),
        (el.Visited("h2.0", 4), [el.AnswerVisitor("h2.0", Elsewhere(2, P[1], False))]),
        (0.1, [el.Raise(4), *ASKS]), (el.Visited("h2.0", 4), [el.AnswerVisitor("h2.0", None)]),
    ],
    "a leader takes visitors, in its own term": [*LEADS, (el.Visited("h0.0", 7), [el.AnswerVisitor("h0.0", None)])],
    "a follower sends visitors on": [
        *FOLLOWS, (el.Visited("h2.0", 1), [el.AnswerVisitor("h2.0", Elsewhere(1, P[0], True))]),
    ],
    "a node that seeks sends visitors on, without a promise": [
        *SOUGHT, (el.Visited("h2.0", 1), [el.AnswerVisitor("h2.0", Elsewhere(1, P[0], False))]),
    ],
    "a leader that gives way leads in no term twice": [
        *SOUGHT, ("6", []), (UNREACHED, [el.Stand(2)]), (el.Elected(), []),
        (el.Answered(P[0], Elsewhere(1, P[2], True)), [el.Retire(), el.Seek(P[2], 3)]),
    ],
    "a candidate asks the others, the last leader among them; a leader that knows the job does not": [
        *STANDS, (0.1, ASKS), (1.1, ASKS), (el.Elected(), []), (None, []),
    ],
}  # fmt: skip


@pytest.mark.parametrize("steps", STORIES.values(), ids=STORIES)
def test_what_a_node_does_next(steps):
    """A number: a Tick at that time. A text: only the time passes. None: no Tick is wanted."""
    core, now = an_election(1), 0.0
    for event, expected in steps:
        if event is None or isinstance(event, str):
            assert event or core.deadline() is None
            now = float(event or now)
            continue
        if isinstance(event, float):
            now, event = event, Tick()
        commands = [command for command in core.step(event, now) if not isinstance(command, Say)]
        core.validate()
        assert commands == expected, event
