"""When is a rank hung? The rank monitor's decision, pure: no clock, no files, no imports.

All times are monotonic seconds of this host (float), all limits are seconds (None = no limit). Source of the
names and meanings: shared/seeds (heartbeats) and reference 2.1; `rank_init_timeout` is ours.

This module is loaded by every rank monitor (a few MB in all), hence plain classes and not one import.
"""

from __future__ import annotations

STACKS_GRACE_S = 2.0  # for faulthandler to print all threads; it needs milliseconds unless stderr is stuck
SIGNAL_GRACE_S = 10.0  # for a worker to act on a `rank_termination_signal` of the user's choice
LATE_S = 1.0  # a monitor that wakes up this late was itself stopped, and so probably was its rank

_SIGKILL = 9  # Linux, all architectures

# Steps of the ladder that ends a hung rank; each is tried for its grace, the last one ends the process group.
STACKS = "stacks"
SIGNAL = "signal"
KILL = "kill"


class Limits:
    """How long a rank may give no sign of life.

    `rank_init_timeout`: from the worker's start to `init_workload_monitoring()`.
    `initial_rank_heartbeat_timeout`: from there to the first heartbeat.
    `rank_heartbeat_timeout`: between heartbeats.
    Each > 0 or None. Raises ValueError, one sentence, for anything else.
    """

    __slots__ = ("initial_rank_heartbeat_timeout", "rank_heartbeat_timeout", "rank_init_timeout")

    def __init__(
        self,
        rank_init_timeout: float | None = None,
        initial_rank_heartbeat_timeout: float | None = None,
        rank_heartbeat_timeout: float | None = None,
    ) -> None:
        self.rank_init_timeout = _limit("rank_init_timeout", rank_init_timeout)
        self.initial_rank_heartbeat_timeout = _limit("initial_rank_heartbeat_timeout", initial_rank_heartbeat_timeout)
        self.rank_heartbeat_timeout = _limit("rank_heartbeat_timeout", rank_heartbeat_timeout)


def _limit(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError(f"{name} must be a number of seconds above 0 (or none for no limit), not {value!r}")
    return float(value)


class View:
    """What is known of one rank at one moment.

    `started_s`: its worker's start. `initialized_s`, `heartbeat_s`: the last one, None = never.
    `finished`: it called `shutdown_workload_monitoring()` after its last init.
    `resumed_s`: until then the whole node part was stopped (0 = never); no limit runs before it.
    """

    __slots__ = ("finished", "heartbeat_s", "initialized_s", "resumed_s", "started_s")

    def __init__(
        self,
        started_s: float,
        initialized_s: float | None = None,
        heartbeat_s: float | None = None,
        finished: bool = False,
        resumed_s: float = 0.0,
    ) -> None:
        self.started_s = started_s
        self.initialized_s = initialized_s
        self.heartbeat_s = heartbeat_s
        self.finished = finished
        self.resumed_s = resumed_s


class Verdict:
    """`hung` since `deadline_s`, or not before it (None = never, unless the monitor is told something); and why."""

    __slots__ = ("deadline_s", "hung", "sentence")

    def __init__(self, hung: bool, deadline_s: float | None, sentence: str) -> None:
        self.hung = hung
        self.deadline_s = deadline_s
        self.sentence = sentence


def judge(limits: Limits, view: View, now_s: float) -> Verdict:
    """Whether the rank is hung at `now_s`; the earliest of all running limits decides, never the last one looked at."""
    first: tuple[float, float, float, str] | None = None
    for since_s, limit_s, missing in _running(limits, view):
        deadline_s = max(since_s, view.resumed_s) + limit_s
        if first is None or deadline_s < first[0]:
            first = (deadline_s, since_s, limit_s, missing)
    # A limit that the rank can start by itself, without a word to the monitor, may start the moment we look away.
    look_s = min((now_s + limit_s for limit_s in _startable(limits, view)), default=None)
    if first is None:
        return Verdict(False, look_s, "no limit is running")
    deadline_s, since_s, limit_s, missing = first
    sentence = f"{missing} for {now_s - since_s:.2f} s (limit {limit_s:g} s)"
    if now_s >= deadline_s:
        return Verdict(True, deadline_s, sentence)
    return Verdict(False, deadline_s if look_s is None else min(deadline_s, look_s), sentence)


def _running(limits: Limits, view: View) -> list[tuple[float, float, str]]:
    """The limits that run now: (since, limit, what is missing)."""
    running: list[tuple[float, float, str]] = []
    if view.finished:
        return running
    if view.initialized_s is None:
        if limits.rank_init_timeout is not None:
            running.append((view.started_s, limits.rank_init_timeout, "no init_workload_monitoring()"))
        return running
    if view.heartbeat_s is None:
        if limits.initial_rank_heartbeat_timeout is not None:
            running.append((view.initialized_s, limits.initial_rank_heartbeat_timeout, "no first heartbeat"))
    elif limits.rank_heartbeat_timeout is not None:
        running.append((view.heartbeat_s, limits.rank_heartbeat_timeout, "no heartbeat"))
    # Sections join here: one entry per open section, and one for the time outside all of them.
    return running


def _startable(limits: Limits, view: View) -> list[float]:
    """The limits that do not run but that the rank can start through its page, in seconds."""
    if view.finished or view.initialized_s is None or view.heartbeat_s is not None:
        return []
    # Sections join here: the limit of each closed section.
    return [] if limits.rank_heartbeat_timeout is None else [limits.rank_heartbeat_timeout]


def stop_ladder(signum: int, prints_stacks: bool) -> tuple[tuple[str, float], ...]:
    """How to end a hung rank: (step, seconds to wait for its death) in order, the last one being KILL.

    `signum` is the configured `rank_termination_signal`; `prints_stacks` tells that the rank answers SIGABRT with its
    Python stacks. They are asked for only where the user wants it killed anyway: another signal is the user's own way
    to end (or to dump) the rank, and a SIGABRT before it would take that away.
    """
    if signum != _SIGKILL:
        return ((SIGNAL, SIGNAL_GRACE_S), (KILL, 0.0))
    if prints_stacks:
        return ((STACKS, STACKS_GRACE_S), (KILL, 0.0))
    return ((KILL, 0.0),)
