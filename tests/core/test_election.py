"""Elections of one node: random walks, and the steps that protect a vote."""

from __future__ import annotations

import random

from nvrx_slurm.core.election import election as el
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.types import Elsewhere, Peer

PEERS = tuple(Peer(str(i), f"h{i}", f"10.0.0.{i}", 7000) for i in range(3))
POSSIBLE = {
    el.Place.SEEKING: (el.StreamEnded, Elsewhere, el.Led, Tick, el.Visited, el.Located),
    el.Place.FOLLOWING: (el.StreamEnded, Elsewhere, el.Led, Tick, el.Visited, el.Located),
    el.Place.STANDING: (el.StreamEnded, Elsewhere, el.Elected, el.Resigned, Tick, el.Visited, el.Located),
    el.Place.LEADING: (el.StreamEnded, Elsewhere, el.Led, el.Resigned, Tick, el.Visited, el.Located),
}


def an_election(rank: int) -> el.Election:
    return el.Election(PEERS[rank], PEERS, el.ElectionSettings(), 0.0)


def walk(seed: int, steps: int = 40) -> None:
    """Any event that a state knows, in any order: a term never goes down, and nothing contradicts itself."""
    rng, now = random.Random(seed), 0.0
    core = an_election(seed % 3)
    core.step(el.Begin(), now)
    for _ in range(steps):
        kind, before = rng.choice(POSSIBLE[core.state]), core.term
        term, other = max(0, core.term + rng.randrange(-1, 3)), rng.choice(PEERS)
        leader = core.me if core.state is el.Place.LEADING else other
        values = {
            el.StreamEnded: (rng.choice(list(el.StreamEnd)),),
            Elsewhere: (term, other, rng.random() < 0.5),
            el.Led: (max(term, before), leader, PEERS),
            el.Visited: ("h9.0", term),
            el.Located: ("10.0.0.9",),
        }
        event = kind(*values.get(kind, ()))
        now = max(now + rng.choice((0.0, 0.3)), (core.deadline() or 0.0) if kind is Tick else 0.0)
        core.step(event, now)
        core.validate()
        assert core.term >= before, f"seed {seed}: {event} took the term down"


def test_any_events_in_any_order_take_no_term_down() -> None:
    for seed in range(1000, 1300):
        walk(seed)


def test_the_first_candidate_is_tried_again_in_the_same_term() -> None:
    core = an_election(1)
    assert core.step(el.Begin(), 0.0) == [el.Seek(PEERS[0], 1)]
    assert core.step(el.StreamEnded(el.StreamEnd.REFUSED), 0.1) == [] and core.where().term == 1
    assert core.step(Tick(), core.deadline() or 0.0) == [el.Seek(PEERS[0], 1)]


def test_a_vote_for_a_node_that_was_named_by_another_is_given_once() -> None:
    core = an_election(1)
    core.step(el.Begin(), 0.0)
    assert core.step(Elsewhere(4, PEERS[2], False), 0.1) == [el.Seek(PEERS[2], 4)]
    core.step(el.StreamEnded(el.StreamEnd.SILENT), 0.2)
    core.step(Tick(), core.deadline() or 0.0)
    assert core.term == 5  # node 2 may have counted this vote for term 4


def test_a_node_learns_its_address_once() -> None:
    core = el.Election(Peer("0", "h0", "", 7000), PEERS, el.ElectionSettings(), 0.0)
    for addr in ("10.0.0.5", "10.0.0.6"):
        core.step(el.Located(addr), 0.0)
    assert core.me == Peer("0", "h0", "10.0.0.5", 7000)
