"""Timeouts learned from what was seen."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.rank.learn import (
    HeartbeatTimeouts,
    NotReady,
    SectionTimeouts,
    from_state,
    learn_heartbeats,
    learn_sections,
    to_message,
    to_state,
    with_learned,
)
from nvrx_slurm.core.rank.watch import RankLimits

pytestmark = pytest.mark.fast


times = st.floats(1e-6, 1e5)
names = st.sampled_from(["a", "b", "c", "d"])


def test_heartbeats():
    configured = HeartbeatTimeouts(600.0, None, False)
    first = learn_heartbeats(10.0, 2.0, 5.0, configured)
    assert first == HeartbeatTimeouts(50.0, 10.0, True)  # a configured limit counts for nothing
    assert learn_heartbeats(20.0, 1.0, 5.0, first) == HeartbeatTimeouts(75.0, 7.5, True)  # a learned one for one half
    for initial, longest, missing in ((0, 1, "a first heartbeat"), (1, 0, "two heartbeats")):
        with pytest.raises(NotReady, match=f"cannot be calculated yet: no rank has sent {missing}"):
            learn_heartbeats(initial, longest, 5.0, configured)


CONFIGURED = SectionTimeouts({"a": 100.0, "b": None}, 30.0)


def test_sections():
    first = learn_sections({"a": 2.0, "b": 3.0}, 1.0, 5.0, CONFIGURED, ["a", "b"], True)
    assert first == SectionTimeouts({"a": 10.0, "b": 15.0}, 5.0, frozenset("ab"), True)
    again = learn_sections({"a": 4.0, "b": 5.0}, 2.0, 5.0, first, ["a"], False)
    assert again == SectionTimeouts({"a": 15.0, "b": 15.0}, 5.0, frozenset("ab"), True)  # not selected: as they were


def test_only_the_selected_ones_are_needed_and_changed():
    seen = {"a": 2.0, "b": 0.0}
    assert learn_sections(seen, 0.0, 5.0, CONFIGURED, ["a"], outside=False) == SectionTimeouts(
        {"a": 10.0, "b": None}, 30.0, frozenset("a")
    )
    assert learn_sections(seen, 1.0, 5.0, CONFIGURED, [], outside=True) == SectionTimeouts(
        {"a": 100.0, "b": None}, 5.0, frozenset(), True
    )
    with pytest.raises(NotReady, match="no rank has completed section 'b', time out of all sections$"):
        learn_sections(seen, 0.0, 5.0, CONFIGURED, ["b"], True)


heartbeats = st.just(HeartbeatTimeouts()) | st.builds(HeartbeatTimeouts, times, times, st.booleans())


@st.composite
def sections(draw):
    limits = draw(st.dictionaries(names, times))
    calculated = draw(st.sets(st.sampled_from(sorted(limits)))) if limits else set()
    return SectionTimeouts(limits, draw(times), frozenset(calculated), draw(st.booleans()))


@given(heartbeats, sections())
def test_a_state_is_json_and_has_what_was_calculated_and_nothing_else(heartbeats, sections):
    state = json.loads(json.dumps(to_state(heartbeats, sections)))
    loaded = from_state(state)
    assert loaded[0] == (heartbeats if heartbeats.were_calculated else HeartbeatTimeouts())
    assert loaded[1] == with_learned(SectionTimeouts(dict.fromkeys(sections.calculated_sections)), sections)
    assert to_state(*loaded) == state
    told = to_message(*loaded)
    assert told == to_message(heartbeats, sections)
    RankLimits(rank_section_timeouts=dict(sections.section)).changed(told)  # the monitor takes it


def test_a_state_of_the_predecessor_is_understood():
    """It also lists limits that were not calculated, and those must not override today's configuration."""
    state = {
        "current_timeouts": {
            "heartbeat": {"initial": 10.0, "subsequent": 2.0, "were_calculated": True},
            "section": {
                "section": {"step": 4.0, "setup": 600.0},
                "out_of_section": 9.0,
                "calculated_sections": ["step"],
                "is_out_of_section_calculated": False,
            },
        }
    }
    beats, saved = from_state(state)
    assert beats == HeartbeatTimeouts(10.0, 2.0, True)
    today = SectionTimeouts({"step": 1.0, "setup": 300.0}, 30.0)
    assert with_learned(today, saved) == SectionTimeouts({"step": 4.0, "setup": 300.0}, 30.0, frozenset({"step"}))
    assert with_learned(SectionTimeouts({"setup": 1.0}), saved) == SectionTimeouts({"setup": 1.0})  # step is gone


GOOD = {"section": {"a": 1.0}, "calculated_sections": ["a"], "out_of_section": 1, "is_out_of_section_calculated": True}
BAD_STATES = [
    (None, "it is no state"),
    ({"heartbeat": 3}, "it is no state"),
    ({"heartbeat": {"were_calculated": True, "initial": 1}}, "subsequent"),
    ({"heartbeat": {"were_calculated": True, "initial": float("nan"), "subsequent": 1}}, "initial is not a number"),
    ({"section": {**GOOD, "calculated_sections": ["b"]}}, "KeyError: 'b'"),
    ({"section": {**GOOD, "section": {"a": True}}}, "a is not a number"),
    ({"section": {**GOOD, "section": {"a": 1e10}}}, "a is not a number"),
    ({"section": {**GOOD, "out_of_section": None}}, "out_of_section is not a number"),
]


@pytest.mark.parametrize("state, sentence", BAD_STATES)
def test_a_bad_state_is_one_sentence(state, sentence):
    with pytest.raises(ValueError, match=sentence):
        from_state({"current_timeouts": state})


KEYS = ["heartbeat", "section", "initial", "were_calculated", "calculated_sections", "a"]
json_like = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
)


@given(json_like)
def test_no_state_at_all_does_anything_but_load_or_raise_one_error(state):
    with suppress(ValueError):
        from_state({"current_timeouts": state})
