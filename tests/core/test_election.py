"""Elections of one node: random walks, and the scenarios of `scenarios/election/*.txt` (see `election_stories`)."""

import random

import pytest

from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.types import Elsewhere, Peer

from .election_stories import PEERS, ElectionStory, an_election
from .stories import SCENARIOS, scenarios

pytestmark = pytest.mark.fast


POSSIBLE = {
    el.Place.SEEKING: (el.Led,),
    el.Place.FOLLOWING: (el.Led,),
    el.Place.STANDING: (el.Elected, el.Resigned),
    el.Place.LEADING: (el.Led, el.Resigned),
}
ALWAYS = (el.StreamEnded, Elsewhere, el.Answered, Tick, el.Visited, el.Located)


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


def test_a_node_learns_its_address_once():
    core = Election(Peer("0", "h0", "", 7000), PEERS, el.ElectionSettings(), 0.0)
    for addr in ("10.0.0.5", "10.0.0.6"):
        core.step(el.Located(addr), 0.0)
    assert core.me == Peer("0", "h0", "10.0.0.5", 7000)


STORIES = scenarios(SCENARIOS / "election")


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in STORIES])
def test_scenario(lines):
    ElectionStory().play(lines)
