"""The decision: when is a rank hung?"""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.watch import KILL, SIGNAL, SIGNAL_GRACE_S, STACKS, STACKS_GRACE_S, Limits, View, judge, stop_ladder

ALL = Limits(60, 30, 3)
NONE = Limits()

TABLE = [
    # limits, view, now -> hung, deadline, sentence
    (NONE, View(100), 1e6, False, None, "no limit is running"),
    (NONE, View(100, 110, 120), 1e6, False, None, "no limit is running"),
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
    (Limits(None, None, 3), View(100, 150), 150, False, 153, "no limit is running"),
    (Limits(None, 2, 3), View(100, 150), 150, False, 152, "no first heartbeat for 0.00 s (limit 2 s)"),
    (Limits(None, None, 3), View(100), 150, False, None, "no limit is running"),
    (Limits(None, 30, None), View(100, 150, 151), 1e6, False, None, "no limit is running"),
]


@pytest.mark.parametrize(("limits", "view", "now_s", "hung", "deadline_s", "sentence"), TABLE)
def test_table(limits, view, now_s, hung, deadline_s, sentence):
    verdict = judge(limits, view, now_s)
    assert (verdict.hung, verdict.deadline_s, verdict.sentence) == (hung, deadline_s, sentence)


limit = st.none() | st.floats(0.01, 1000)
moment = st.floats(1, 10000)


@st.composite
def views(draw):
    started, init_after, heartbeat_after = draw(moment), draw(moment), draw(moment)
    initialized = draw(st.sampled_from([None, started + init_after]))
    heartbeat = initialized and draw(st.sampled_from([None, initialized + heartbeat_after]))
    return View(started, initialized, heartbeat, draw(st.booleans()), draw(st.sampled_from([0.0, started + 5])))


@given(st.builds(Limits, limit, limit, limit), views(), moment)
def test_the_deadline_is_exact(limits, view, after):
    now = max(view.started_s, view.initialized_s or 0, view.heartbeat_s or 0) + after
    verdict = judge(limits, view, now)
    if verdict.hung:
        assert verdict.deadline_s <= now
        assert not judge(limits, view, verdict.deadline_s - 0.001).hung
    elif verdict.deadline_s is not None:
        assert verdict.deadline_s > now
        assert not judge(limits, view, (now + verdict.deadline_s) / 2).hung
    else:
        assert not judge(limits, view, now + 1e8).hung  # sleeping for ever is right


@given(st.builds(Limits, limit, limit, limit), views(), moment, st.floats(0, 1))
def test_sleeping_to_the_deadline_misses_no_heartbeat_limit(limits, view, after, when):
    """Whenever the first heartbeat comes before the next look, its limit has not run out before that look."""
    now = max(view.started_s, view.initialized_s or 0, view.heartbeat_s or 0) + after
    verdict = judge(limits, view, now)
    if verdict.hung or view.finished or view.initialized_s is None or view.heartbeat_s is not None:
        return
    if verdict.deadline_s is None:
        assert limits.rank_heartbeat_timeout is None
        return
    beat = now + when * (verdict.deadline_s - now)
    beaten = View(view.started_s, view.initialized_s, beat, False, view.resumed_s)
    assert not judge(limits, beaten, verdict.deadline_s - 0.001).hung


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "3", True, [], 1e9])
def test_bad_limits_are_one_sentence(value):
    with pytest.raises(ValueError, match="rank_heartbeat_timeout must be a number of seconds above 0") as error:
        Limits(rank_heartbeat_timeout=value)
    assert "\n" not in str(error.value)


def test_ladder():
    assert stop_ladder(signal.SIGKILL, True) == ((STACKS, STACKS_GRACE_S), (KILL, 0.0))
    assert stop_ladder(signal.SIGKILL, False) == ((KILL, 0.0),)
    for prints_stacks in (True, False):
        assert stop_ladder(signal.SIGTERM, prints_stacks) == ((SIGNAL, SIGNAL_GRACE_S), (KILL, 0.0))


def test_it_imports_nothing():
    code = (
        "import sys, nvrx_slurm.core; before = set(sys.modules); import nvrx_slurm.core.watch;"
        "print(sorted(set(sys.modules) - before - {'__future__'}))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], timeout=20).strip() == b"['nvrx_slurm.core.watch']"
