"""The decision: when is a rank hung?"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.rank.watch import RankLimits, View, judge

pytestmark = pytest.mark.process


ALL = RankLimits(60, 30, 3)
NONE, EXIT = RankLimits(), RankLimits(rank_exit_timeout=30)
SECTIONS = RankLimits(None, None, None, 7, {"outer": 5, "inner": 3, "timed only": None})
WARMUP = RankLimits(None, None, None, None, {"step": 2, "warmup": 9})
IN = (100, 150, 151, False, 0.0)  # started, init, heartbeat, finished, resumed

TABLE = [
    # limits, view, now -> hung, deadline, sentence
    (NONE, View(100), 1e6, False, None, "no limit is running"),
    (NONE, View(100, 110, 120), 1e6, False, 1e6 + 60, "no limit is running"),  # it may shut down: its end is watched
    (ALL, View(100, 150, 151, True, exits=(200, "x")), 201, False, 260, "no limit is running"),
    (EXIT, View(100, 150, 151, True, exits=(200, "x")), 201, False, 230, "no end after x for 1.00 s (limit 30 s)"),
    (EXIT, View(100, exits=(200, "x")), 230, True, 230, "no end after x for 30.00 s (limit 30 s)"),
    (EXIT, View(100, 150), 150, False, 180, "no limit is running"),
    (NONE, View(100, exits=(200, "x")), 260, False, None, "no limit is running"),
    (ALL, View(100), 101, False, 160, "no init_workload_monitoring() for 1.00 s (limit 60 s)"),
    (ALL, View(100), 160, True, 160, "no init_workload_monitoring() for 60.00 s (limit 60 s)"),
    (ALL, View(100, 150), 150, False, 153, "no first heartbeat for 0.00 s (limit 30 s)"),
    (ALL, View(100, 150), 179, False, 180, "no first heartbeat for 29.00 s (limit 30 s)"),
    (ALL, View(100, 150), 180, True, 180, "no first heartbeat for 30.00 s (limit 30 s)"),
    (ALL, View(100, 150, 151), 153.98, False, 154, "no heartbeat for 2.98 s (limit 3 s)"),
    (ALL, View(100, 150, 151), 154.02, True, 154, "no heartbeat for 3.02 s (limit 3 s)"),
    (ALL, View(100, 150, 151, finished=True), 1e6, False, None, "no limit is running"),
    (ALL, View(100, 150, 151, resumed_s=200), 202, False, 203, "no heartbeat for 51.00 s (limit 3 s)"),
    (ALL, View(100, 150, 151, resumed_s=200), 203, True, 203, "no heartbeat for 52.00 s (limit 3 s)"),
    # The first heartbeat can start the next limit without telling us: look again before that could have run out.
    (RankLimits(None, None, 3), View(100, 150), 150, False, 153, "no limit is running"),
    (RankLimits(None, 2, 3), View(100, 150), 150, False, 152, "no first heartbeat for 0.00 s (limit 2 s)"),
    (RankLimits(None, None, 3), View(100), 150, False, None, "no limit is running"),
    (RankLimits(None, 30, None), View(100, 150, 151), 1e6, False, 1e6 + 60, "no limit is running"),
    # All open sections count, whichever was opened last. (Look again: a closed one can be opened any time.)
    (SECTIONS, View(*IN, (160, None, None)), 161, False, 164, "in section 'outer' for 1.00 s (limit 5 s)"),
    (SECTIONS, View(*IN, (160, 164, None)), 164.5, False, 165, "in section 'outer' for 4.50 s (limit 5 s)"),
    (SECTIONS, View(*IN, (160, 164, None)), 165, True, 165, "in section 'outer' for 5.00 s (limit 5 s)"),
    (SECTIONS, View(*IN, (164, 160, None)), 163, True, 163, "in section 'inner' for 3.00 s (limit 3 s)"),
    (SECTIONS, View(*IN, (164, None, None), 100), 165, False, 168, "in section 'outer' for 1.00 s (limit 5 s)"),
    (SECTIONS, View(*IN, (None, None, 160), None), 1e6, False, 1e6 + 3, "no limit is running"),
    (SECTIONS, View(*IN, (None, None, None), 160), 166, False, 167, "in no section for 6.00 s (limit 7 s)"),
    (SECTIONS, View(*IN, (), 160), 167, True, 167, "in no section for 7.00 s (limit 7 s)"),
    (SECTIONS, View(100, 150, 151, True, 0.0, (160, 160, 160), 160), 1e6, False, None, "no limit is running"),
    (SECTIONS, View(*IN[:4], 166, (160, None, None)), 167, False, 170, "in section 'outer' for 7.00 s (limit 5 s)"),
    (SECTIONS, View(100), 1e6, False, None, "no limit is running"),
    (WARMUP, View(*IN, (None, None, 160)), 168, False, 169, "in section 'step' (warm-up) for 8.00 s (limit 9 s)"),
    (WARMUP, View(*IN, (160, None, None)), 162, True, 162, "in section 'step' for 2.00 s (limit 2 s)"),
    (WARMUP, View(*IN, (None, 160, 160)), 169, True, 169, "in section 'warmup' for 9.00 s (limit 9 s)"),
]


@pytest.mark.parametrize("limits, view, now_s, hung, deadline_s, sentence", TABLE)
def test_table(limits, view, now_s, hung, deadline_s, sentence):
    judgement = judge(limits, view, now_s)
    assert (judgement.hung, judgement.deadline_s, judgement.sentence) == (hung, deadline_s, sentence)
    assert bool(judgement.late) == (view.exits is not None and now_s >= view.exits[0] + 60)


limit = st.none() | st.floats(0.01, 1000)
section_limits = st.dictionaries(st.sampled_from(["a", "b", "step", "warmup"]), limit)
moment = st.floats(1, 10000)


@st.composite
def looks(draw):
    """RankLimits, a view with some sections opened (or none open) since its last event, and when it is looked at."""
    limits = RankLimits(draw(limit), draw(limit), draw(limit), draw(limit), draw(section_limits))
    last = started = draw(moment)
    initialized = heartbeat = None
    if draw(st.booleans()):
        last = initialized = last + draw(moment)
        if draw(st.booleans()):
            last = heartbeat = last + draw(moment)
    finished, resumed = draw(st.booleans()), draw(st.sampled_from([0.0, started + 5]))
    since = st.none() | st.floats(last, last + 100)
    slots = tuple(draw(since) for _ in limits.slots)
    view = View(started, initialized, heartbeat, finished, resumed, slots, draw(since))
    return limits, view, last + 100 + draw(moment)


@given(looks())
def test_the_deadline_is_exact(look):
    limits, view, now = look
    judgement = judge(limits, view, now)
    if judgement.hung:
        assert judgement.deadline_s <= now
        assert not judge(limits, view, judgement.deadline_s - 0.001).hung
    elif judgement.deadline_s is not None:
        assert judgement.deadline_s > now
        assert not judge(limits, view, (now + judgement.deadline_s) / 2).hung
    else:
        assert not judge(limits, view, now + 1e8).hung  # sleeping for ever is right


@given(looks(), st.data())
def test_sleeping_to_the_deadline_misses_no_section(look, data):
    """Whenever a section is opened (or the last one closed) before the next look, its limit has not run out by then."""
    limits, view, now = look
    judgement = judge(limits, view, now)
    if judgement.hung or view.finished or view.initialized_s is None or not limits.slots:
        return
    then = data.draw(st.floats(now, now + 1e9 if judgement.deadline_s is None else judgement.deadline_s))
    closed = [slot for slot, since in enumerate(view.sections) if since is None]
    opened = data.draw(st.sampled_from([None, *closed]))  # None: all are closed
    slots, outside = ([None] * len(view.sections), then) if opened is None else (list(view.sections), None)
    if opened is not None:
        slots[opened] = then
    beat = view.heartbeat_s or then
    later = View(view.started_s, view.initialized_s, beat, False, view.resumed_s, tuple(slots), outside)
    assert judgement.deadline_s is None or not judge(limits, later, judgement.deadline_s - 0.001).hung
    if judgement.deadline_s is None:
        assert not judge(limits, later, then + 1e8).hung


def test_sections_have_one_word_each_and_a_step_in_warm_up_has_its_own():
    assert [what for what, _ in SECTIONS.slots] == ["section 'outer'", "section 'inner'", "section 'timed only'"]
    assert WARMUP.slots[2] == ("section 'step' (warm-up)", 9)
    assert len(RankLimits(rank_section_timeouts={"warmup": 1}).slots) == 1


@pytest.mark.parametrize(
    "told, token",
    [
        ({"rank_init_timeout": 1}, "'rank_init_timeout'"),
        *(({"rank_heartbeat_timeout": bad}, "rank_heartbeat_timeout") for bad in (0, float("nan"), "3", True, [], 1e9)),
        ({"rank_section_timeouts": {"inner": 0}}, "section 'inner'"),
        ({"rank_section_timeouts": {"c": 1}}, "not in rank_section_timeouts"),
        ({"rank_section_timeouts": 1}, "rank_section_timeouts"),
    ],
)
def test_bad_limits_of_a_rank_are_one_sentence(told, token):
    with pytest.raises(ValueError, match=token) as error:
        SECTIONS.changed(told)
    assert "\n" not in str(error.value)


def values(limits):
    heartbeats = limits.initial_rank_heartbeat_timeout, limits.rank_heartbeat_timeout
    return [*heartbeats, limits.rank_out_of_section_timeout, *limits.rank_section_timeouts.values()]


def test_learned_limits_replace_the_configured_ones_and_are_never_absurdly_short():
    configured = RankLimits(60, 30, 0.25, None, {"a": 5, "b": None}, workload_check_interval=1.5)
    changed = configured.changed(
        {
            "initial_rank_heartbeat_timeout": 90,
            "rank_heartbeat_timeout": 0.001,  # not below the configured one, where that is short
            "rank_out_of_section_timeout": 0.001,  # nor below workload_check_interval
            "rank_section_timeouts": {"b": 2},
        }
    )
    assert values(changed) == [90, 0.25, 1.5, 5, 2] and changed.rank_init_timeout == 60
    assert values(configured) == values(configured.changed({})) == [30, 0.25, None, 5, None]
