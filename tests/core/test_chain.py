"""Whether a chain of jobs goes on."""

import signal

import pytest

from nvrx_slurm.core.chain import ChainLimits, ChainLink, Next, Outside, decide, ended_from_outside

pytestmark = pytest.mark.fast


LIMITS = ChainLimits(failures=3, window_s=3600.0, warning_signum=signal.SIGUSR1)
NOW = 1_000_000.0


def after(*codes, apart_s=60.0, limits=LIMITS):
    """The decision after links with these codes, the last of which ends now."""
    links = [ChainLink(code, NOW - apart_s * age) for age, code in enumerate(reversed(codes))]
    return decide(reversed(links), limits, NOW).next


@pytest.mark.parametrize("code", [0, 2, 93])
def test_the_end_of_the_work_ends_the_chain(code):
    assert after(138, code) is Next.END


@pytest.mark.parametrize("code", [1, 94, 95, 96, 97, 138, 255])
def test_a_failure_or_a_warning_continues_it(code):
    assert after(code) is Next.CONTINUE


@pytest.mark.parametrize("code", [130, 137, 143])
def test_a_signal_from_outside_is_left_to_slurm(code):
    assert after(1, code) is Next.LEAVE
    assert decide([ChainLink(code, NOW, out_of_time=True)], LIMITS, NOW).next is Next.CONTINUE


@pytest.mark.parametrize("outside", Outside)
def test_only_a_preempted_link_is_followed_by_one_of_ours(outside):
    found = decide([ChainLink(143, NOW, outside=outside)], LIMITS, NOW)
    assert found.why == outside.value
    assert found.next is (Next.CONTINUE if outside is Outside.PREEMPTED else Next.LEAVE)


def test_a_storm_of_failures_ends_it():
    assert after(1, 96) is Next.CONTINUE
    assert after(1, 96, 1) is Next.END
    assert after(1, 138, 1, 138, 94) is Next.END


def test_warnings_and_old_failures_are_no_storm():
    assert after(*[138] * 20) is Next.CONTINUE
    assert after(138, 138, 138, 143, 1) is Next.CONTINUE
    assert after(1, 1, 1, apart_s=2000.0) is Next.CONTINUE


def test_what_ended_a_job_from_outside():
    assert ended_from_outside("COMPLETING", "None", False, False) is Outside.CANCELLED
    assert ended_from_outside("COMPLETING", "TimeLimit", False, False) is Outside.TIME_LIMIT
    assert ended_from_outside("PREEMPTED", "None", False, False) is Outside.PREEMPTED
    assert ended_from_outside("RUNNING", "None", False, True) is Outside.PREEMPTED
    assert ended_from_outside("COMPLETING", "None", True, True) is Outside.REQUEUED


def test_without_a_warning_signal_138_is_a_signal_from_outside():
    assert after(138, limits=ChainLimits(3, 3600.0, 0)) is Next.LEAVE


def test_the_first_link_starts():
    assert decide([], LIMITS, NOW).next is Next.CONTINUE
