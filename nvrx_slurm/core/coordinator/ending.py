"""The end: that of the allocation, and that of the job, which all agents hear before they leave.

Times in monotonic seconds.
"""

from __future__ import annotations

from enum import Enum

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.recurrence import struck
from nvrx_slurm.core.attribution.verdict import first_cause, is_told_to_end
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.exclusion import Exclusion
from nvrx_slurm.core.coordinator.job import JobState
from nvrx_slurm.core.coordinator.members import Use
from nvrx_slurm.core.coordinator.part import Part
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.coordinator.states import (
    CYCLE,
    FAILED,
    SIGUSR1,
    Stage,
)
from nvrx_slurm.core.election.events import MEMBER_SHARE
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.core.machine import Entered, Tick, earliest, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode, signal_exit_code

_ANSWER_S = 15.0  # after this time without an answer, what was known before holds
_LONGEST_TRY_S = 3.0  # to connect to a node that does not answer, see `control.client`
_SIGTERM = 15
_MINE = (Stage.FINISHED, Stage.RETURNING)
_NAMES_SHOWN = 16
_TOO_LATE = (
    *(
        ev.Raised,
        ev.Left,
        t.Hung,
        t.Evidence,
        t.Succeeded,
        t.Ready,
        t.Warmth,
        t.Loaded,
        t.Asked,
        t.NodeUnfit,
        t.WarnJob,
    ),
    *(t.EndJob, *ev.ANSWERS),
)


class Due(Enum):
    """What is to be done."""

    NOTHING = 0
    ASK = 1  # how much time is left: an administrator may have changed it
    WARN = 2
    STOP = 3


class JobClock:
    """Asks for the time left at the start, and again shortly before a warning or a stop; then warns or stops."""

    def __init__(
        self,
        limited: bool,
        warn_before_s: float,
        stop_before_s: float,
        now: float,
    ) -> None:
        self._warn_before_s = warn_before_s
        self._stop_before_s = stop_before_s
        self.end_at: float | None = None  # of the allocation; None: not known
        self._ask_at: float | None = now if limited else None
        self._act_at: float | None = None  # also where no answer comes
        self._warned = warn_before_s <= 0.0

    def deadline(self) -> float | None:
        """When `check` is due (monotonic seconds), or None."""
        return earliest(self._ask_at, self._act_at)

    def check(self, now: float) -> Due:
        """The action that is due at `now`."""
        if self._ask_at is not None and now >= self._ask_at:
            self._ask_at = None
            self._act_at = now + _ANSWER_S
            return Due.ASK
        if self._act_at is not None and now >= self._act_at:
            return self.answer(None, now)
        return Due.NOTHING

    def answer(self, left_s: float | None, now: float) -> Due:
        """`left_s` seconds are left; None = no answer: the time that was known before holds."""
        self._ask_at = self._act_at = None
        self.end_at = self.end_at if left_s is None else now + left_s
        if self.end_at is None:
            return Due.NOTHING
        if self._stop_before_s > 0.0 and now >= self.end_at - self._stop_before_s:
            return Due.STOP
        warns = not self._warned and now >= self.end_at - self._warn_before_s
        self._warned = self._warned or warns
        before_s = self._stop_before_s
        if not self._warned:
            before_s = max(before_s, self._warn_before_s)
        due = self.end_at - before_s
        if before_s > 0.0 and (warns or due - now > 2 * _ANSWER_S):
            self._ask_at = max(now, due - _ANSWER_S)
        elif before_s > 0.0:
            self._act_at = due
        return Due.WARN if warns else Due.NOTHING


class Ending(Part):
    """Owns the states after the decision. `end` is that decision."""

    table = rows(
        (Stage.FINISHED, Entered, "on_entered", (Stage.RETURNING, Stage.CLOSED), "tell all agents"),
        (_MINE, ev.Joined, "on_joined", (Stage.FINISHED,), "it learns the end, too"),
        (Stage.FINISHED, ev.Lost, "on_lost", (Stage.RETURNING, Stage.CLOSED), "it has left"),
        (Stage.RETURNING, ev.Lost, "ignore", (), "nobody is here"),
        (_MINE, t.EndKnown, "on_ended", (), "it knows the end; when all do, they leave"),
        (_MINE, Tick, "on_tick", (Stage.CLOSED,), "the end waits for a bounded time"),
        (_MINE, ev.ProvenDead, "on_dead", (), "it is not waited for"),
        (_MINE, _TOO_LATE, "ignore", (), "the end is decided"),
        (Stage.FINISHED, ev.Known, "ignore", (), "it has learned the end with all others"),
    )

    def __init__(self, roster: Roster, exclusion: Exclusion, now: float) -> None:
        super().__init__(roster)
        self._exclusion = exclusion
        s = self._s
        self.clock = JobClock(s.time_limited, s.warn_before_end_s, s.stop_before_end_s, now)
        self.warning: t.Warn | None = None  # that the job is about to end
        self.end: t.Finish | None = None
        self._leave_by = 0.0
        self._return_by = 0.0
        self._out_of_time = False  # the job is stopped before the time limit
        self._stay_until = 0.0  # agents stay for a node that was missed a moment ago
        self._ended: set[str] = set()  # node_ids of agents that have no workers and know the end

    # --- before the end -------------------------------------------------------------------------------------

    def decide(self, end: t.Finish) -> Stage:
        """This is the end of the job."""
        self.end = end
        return Stage.FINISHED

    def warn(self, warning: t.Warn) -> None:
        """Tell all agents, and those that come later, that the job is about to end."""
        if self.warning is None:
            self.warning = warning
            self._say(f"warning all ranks: {warning.reason}")
            self._roster.send_all(warning)

    def mind_the_clock(self, due: Due) -> Stage | None:
        """Do what the end of the allocation asks for."""
        s = self._s
        if due is Due.ASK:
            self._out.append(ev.AskTimeLeft())
        elif due is Due.WARN:
            left = f"less than {s.warn_before_end_s:g} s of the allocation are left"
            self.warn(t.Warn(s.warning_signum or SIGUSR1, left))
        elif due is Due.STOP:
            left = f"less than {s.stop_before_end_s:g} s of the allocation are left"
            self._out_of_time = True
            return self.decide(t.Finish(signal_exit_code(_SIGTERM), left, _SIGTERM))
        return None

    # --- the end is decided ---------------------------------------------------------------------------------

    def on_entered(self, event: Entered, now: float) -> Stage | None:
        """Tell all agents, but not again where one was waited for and has come."""
        if event.was is Stage.RETURNING:
            return None
        assert self.end is not None
        if self._s.tells_of_cycles and event.was in CYCLE:
            self._out.append(cycle_over(self._job, self._ledger, event.was in FAILED, now))
        reached = None if self.end.code == ExitCode.OK else self._ledger.reached
        self._exclusion.strike(*struck(self._ledger.restarts, reached, now - self._job.started_at))
        self._leave_by = now + self._s.drain_timeout_s
        self._stay_until = now
        if self._quorum.needed:
            self._stay_until = self._quorum.missed_at + self._longest_search_s()
        self._roster.send_all(self.end)
        return self._close_if_alone(now)

    def _longest_search_s(self) -> float:
        """How long a node that can be reached may take to come here from a leader that cannot.

        It holds on to that leader for a part of the lease (`core.election`), and its last try has to fail.
        """
        return MEMBER_SHARE * self._s.lease_s + _LONGEST_TRY_S

    def on_joined(self, event: ev.Joined, now: float) -> Stage:
        """A late agent learns that the job is over."""
        assert self.end is not None
        node = event.message.node
        self._roster.is_back(node)
        self._members.put(node, event.message.port, Use.READY)
        if self._quorum.needed:
            self._send(node.node_id, t.Lead(self._job.term))
        self._send(node.node_id, self.end)
        return Stage.FINISHED

    def on_lost(self, event: ev.Lost, now: float) -> Stage | None:
        """An agent has left. One that may not know the end may come back for it, or is dead."""
        member = self._members.remove(event.node_id)
        if member is None:
            return None
        if event.node_id not in self._ended and self._quorum.needed:
            self._stay_until = now + self._s.return_grace_s
            if member.node.port:
                self._roster.probe(peer_of(member.node))
        self._leave_if_all_know(now)
        return self._close_if_alone(now)

    def on_dead(self, event: ev.ProvenDead, now: float) -> None:
        """A dead node: do not wait for it to return and ask how the job ended."""
        if self._quorum.is_proof(event.peer, now):
            self._quorum.died(event.peer.key, self._members.keys_of_nodes)
            self._leave_if_all_know(now)

    def on_ended(self, event: ev.FromAgent[t.EndKnown], now: float) -> None:
        """One more knows the end."""
        self._ended.add(event.node_id)
        self._leave_if_all_know(now)

    def _leave_if_all_know(self, now: float) -> None:
        members = self._members
        if now < self._stay_until and self._quorum.missing(members.keys_of_nodes):
            return
        if len(self._ended) < len(members):
            return
        if all(node_id in self._ended for node_id in members):
            self._stay_until = 0.0
            self._roster.send_all(t.Leave())

    def deadline(self, state: Enum) -> float | None:
        """How long agents may take to leave, or to return; the end of the allocation does not matter any more."""
        if state is Stage.FINISHED:
            return min(self._leave_by, self._stay_until or self._leave_by)
        return self._return_by if state is Stage.RETURNING else None

    def on_tick(self, event: Tick, now: float) -> Stage | None:
        """Agents that have not left, or not returned, are not waited for any longer."""
        if not len(self._members):
            return self._close(now)
        if now < self._leave_by:
            self._stay_until = 0.0
            self._leave_if_all_know(now)
            return None
        first = self._members.in_order()[:_NAMES_SHOWN]
        left = ", ".join(node.host for node in first)
        self._say(f"not waiting any longer for {left} to leave")
        return self._close(now)

    def _close_if_alone(self, now: float) -> Stage | None:
        """An agent that was cut off a moment ago may come back, and should hear the end."""
        if len(self._members):
            return None
        lost_at = self._roster.lost_at
        self._return_by = max(lost_at.values(), default=now) + self._s.return_grace_s
        if lost_at and now < self._return_by:
            return Stage.RETURNING
        return self._close(now)

    def _close(self, now: float) -> Stage:
        end = self.end
        ledger = self._ledger
        assert end is not None
        cause = None if end.code == ExitCode.OK else first_cause(ledger.faults)
        was_told = end.code == signal_exit_code(_SIGTERM)
        if was_told and cause is not None and is_told_to_end(cause):
            cause = None  # the end from outside, which this rank has heard first
        report = ledger.build(self._budget.history, self._job.cycle, now)
        report = replace(report, out_of_time=self._out_of_time)
        self._out.append(ev.JobOver(end.code, end.reason, cause, report))
        return Stage.CLOSED


def cycle_over(job: JobState, ledger: Ledger, failed: bool, now: float) -> ev.CycleOver:
    """For attribution: the last cycle is over."""
    cause = (first_cause(ledger.faults) or ledger.cause) if failed else None
    return ev.CycleOver(job.cycle, now - job.started_at, cause)
