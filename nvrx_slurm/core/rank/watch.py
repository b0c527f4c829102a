"""Hang detection: the rank monitor's decision. Pure: no clock, no files.

All times are monotonic seconds of this host (float), all limits are seconds (None = no limit). Names and meanings are
NVRx's; `rank_init_timeout` is ours.

Each rank monitor loads this module and must stay within a few MB, hence no typing and no dataclasses.
"""

from __future__ import annotations

from collections import namedtuple

# for faulthandler to print all threads; it needs milliseconds unless stderr is stuck
STACKS_GRACE_S = 2.0
SIGNAL_GRACE_S = 10.0  # for a worker to act on a `rank_termination_signal` of the user's choice
LATE_END_S = 60.0  # an end that takes longer is said
LATE_S = 1.0  # a monitor that wakes up this late was stopped, and so probably was its rank

_SIGKILL = 9  # Linux, all architectures

# Steps of the ladder that ends a hung rank. Each has a grace period; the last one kills the process group.
STACKS = "stacks"
SIGNAL = "signal"
KILL = "kill"

MAX_SECTIONS = 128  # one word of the shared page each

# The first steps are slower (compilers, caches): they have the limit of section "warmup".
STEP_SECTION = "step"
WARMUP_SECTION = "warmup"


class RankLimits(
    namedtuple(
        "RankLimits",
        "rank_init_timeout initial_rank_heartbeat_timeout rank_heartbeat_timeout rank_out_of_section_timeout "
        "rank_section_timeouts workload_check_interval rank_exit_timeout",
        defaults=(None, None, None, None, {}, 5.0, None),
    )
):
    """Limits for the time without progress of a rank.

    `rank_init_timeout`: from the worker's start to `init_workload_monitoring()`.
    `initial_rank_heartbeat_timeout`: from there to the first heartbeat.
    `rank_heartbeat_timeout`: between heartbeats.
    `rank_out_of_section_timeout`: without any open section.
    `rank_section_timeouts`: by name, in each section; at most MAX_SECTIONS. The order is that of the shared page.
    `rank_exit_timeout`: from `View.exits` to the end of the process.
    Each > 0 or None. `workload_check_interval`: the least limit that a rank can learn, unless a shorter one was
    configured: a learned limit of milliseconds would kill healthy ranks. `config.ft` has checked all of them.
    """

    __slots__ = ()

    @property
    def slots(self) -> list[tuple[str, float | None]]:
        """(name for messages, limit) of each section word of the page; see `slots_of()`."""
        return [
            (
                f"section {name!r}" if own else f"section {STEP_SECTION!r} (warm-up)",
                self.rank_section_timeouts[name],
            )
            for name, own in slots_of(list(self.rank_section_timeouts))
        ]

    def changed(self, told: dict[str, object]) -> RankLimits:
        """These limits with those that a rank has learned, by the same names.

        Raises ValueError, one sentence, for a limit that cannot be learned, a bad value, or an unknown section.
        """
        sections = dict(self.rank_section_timeouts)
        found: dict[str, float | None] = {}
        for name, value in told.items():
            if name == "rank_section_timeouts":
                if not isinstance(value, dict) or not value.keys() <= sections.keys():
                    raise ValueError(
                        "a section that is not in rank_section_timeouts has no limit to change"
                    )
                for section, told_s in value.items():
                    what = f"the timeout of section {section!r}"
                    sections[section] = self._enforced(what, told_s, sections[section])
            elif name in _LEARNED:
                found[name] = self._enforced(name, value, getattr(self, name))
            else:
                raise ValueError(f"{str(name)[:40]!r} is not a limit that a rank can change")
        return self._replace(rank_section_timeouts=sections, **found)

    def _enforced(self, what: str, told: object, configured: float | None) -> float | None:
        if told is None:
            return None
        least_s: float = self.workload_check_interval
        return max(seconds(what, told), least_s if configured is None else min(least_s, configured))


_LEARNED = (
    "initial_rank_heartbeat_timeout",
    "rank_heartbeat_timeout",
    "rank_out_of_section_timeout",
)


def slots_of(sections: list[str]) -> list[tuple[str, bool]]:
    """Meaning of each section word of the page, in order: (section whose limit applies, whether it is its own word).

    One word per section, and one more for a "step" during warm-up, which has the limit of section "warmup". The word
    itself thus says which limit applies, and no second word has to agree with it.
    """
    slots = [(name, True) for name in sections]
    if STEP_SECTION in sections and WARMUP_SECTION in sections:
        slots.append((WARMUP_SECTION, False))
    return slots


def seconds(name: str, value: object) -> float:
    """A limit that was learned. Raises ValueError, one sentence, unless it is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e9:
        raise ValueError(f"{name} is not a number of seconds above 0 but {str(value)[:40]!r}")
    return float(value)


class View(
    namedtuple(
        "View",
        "started_s initialized_s heartbeat_s finished resumed_s sections outside_s exits",
        defaults=(None, None, False, 0.0, (), None, None),
    )
):
    """The facts about one rank at one moment.

    `started_s`: start of its worker. `initialized_s`, `heartbeat_s`: the last init and heartbeat, None = never.
    `finished`: it called `shutdown_workload_monitoring()` after its last init.
    `resumed_s`: until then monitor and rank were stopped, or other limits applied (0 = never); no limit starts before.
    `sections`: by slot, since when it is open, None = closed; () = none is open.
    `outside_s`: since when it has been in no section, None = it is in one, or the time does not count yet. It comes
    from another word of the page than `sections`: if they disagree, the open section counts.
    `exits`: since when it should end, and after what; None = it should not.
    """

    __slots__ = ()


class Judgement(namedtuple("Judgement", "hung deadline_s sentence late", defaults=("",))):
    """`hung`: since `deadline_s`; else not before `deadline_s` (None = never without a message). `sentence`: why.

    `late`: what to say of an end that takes long; "" = nothing.
    """

    __slots__ = ()


def judge(limits: RankLimits, view: View, now_s: float) -> Judgement:
    """Whether the rank is hung at `now_s`. The running limit with the earliest deadline decides."""
    deadlines = (
        (max(since_s, view.resumed_s) + limit_s, since_s, limit_s, missing)
        for since_s, limit_s, missing in _running(limits, view)
    )
    first = min(deadlines, key=lambda one: one[0], default=None)
    # The rank can start other limits through its page without a message: judge again before one can run out.
    again = [now_s + limit_s for limit_s in _startable(limits, view)]
    late = ""
    if view.exits is not None:
        late_s = max(view.exits[0], view.resumed_s) + LATE_END_S
        late = f"no end {LATE_END_S:g} s after {view.exits[1]}" if now_s >= late_s else ""
        again += [] if late else [late_s]
    again_s = min(again, default=None)
    if first is None:
        return Judgement(False, again_s, "no limit is running", late)
    deadline_s, since_s, limit_s, missing = first
    sentence = f"{missing} for {now_s - since_s:.2f} s (limit {limit_s:g} s)"
    if now_s >= deadline_s:
        return Judgement(True, deadline_s, sentence)
    return Judgement(False, min([deadline_s, *again]), sentence, late)


def _running(limits: RankLimits, view: View) -> list[tuple[float, float, str]]:
    """The limits that run now: (start, limit, description)."""
    running: list[tuple[float, float, str]] = []
    if view.exits is not None and limits.rank_exit_timeout is not None:
        running.append((view.exits[0], limits.rank_exit_timeout, f"no end after {view.exits[1]}"))
    if view.finished:
        return running
    if view.initialized_s is None:
        if limits.rank_init_timeout is not None:
            running.append(
                (view.started_s, limits.rank_init_timeout, "no init_workload_monitoring()")
            )
        return running
    if view.heartbeat_s is None:
        if limits.initial_rank_heartbeat_timeout is not None:
            running.append(
                (view.initialized_s, limits.initial_rank_heartbeat_timeout, "no first heartbeat")
            )
    elif limits.rank_heartbeat_timeout is not None:
        running.append((view.heartbeat_s, limits.rank_heartbeat_timeout, "no heartbeat"))
    # () = none is open
    for since_s, (what, limit_s) in zip(view.sections, limits.slots, strict=False):
        if since_s is not None and limit_s is not None:
            running.append((since_s, limit_s, f"in {what}"))
    if _is_outside(view) and limits.rank_out_of_section_timeout is not None:
        running.append((view.outside_s, limits.rank_out_of_section_timeout, "in no section"))
    return running


def _is_outside(view: View) -> bool:
    return view.outside_s is not None and all(since_s is None for since_s in view.sections)


def _startable(limits: RankLimits, view: View) -> list[float]:
    """The limits that do not run but that the rank can start through its page, in seconds."""
    if view.finished or view.initialized_s is None:
        return []
    # by its shutdown
    startable: list[float | None] = [min(limits.rank_exit_timeout or LATE_END_S, LATE_END_S)]
    startable += [] if view.heartbeat_s is not None else [limits.rank_heartbeat_timeout]
    for slot, (_, limit_s) in enumerate(limits.slots):
        if slot >= len(view.sections) or view.sections[slot] is None:
            startable.append(limit_s)
    if not _is_outside(view) and limits.slots:
        startable.append(limits.rank_out_of_section_timeout)
    return [limit_s for limit_s in startable if limit_s is not None]


def stop_ladder(signum: int, prints_stacks: bool) -> tuple[tuple[str, float], ...]:
    """How to end a hung rank: (step, seconds to wait for its death) in order, the last one being KILL.

    `signum`: the configured `rank_termination_signal`. `prints_stacks`: the rank has a handler that prints its Python
    stacks. Stacks are requested only before a SIGKILL: any other signal is the user's own way to end the rank.
    """
    if signum != _SIGKILL:
        return ((SIGNAL, SIGNAL_GRACE_S), (KILL, 0.0))
    if prints_stacks:
        return ((STACKS, STACKS_GRACE_S), (KILL, 0.0))
    return ((KILL, 0.0),)
