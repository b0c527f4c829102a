"""What follows from the cause of a cycle besides the restart. Pure.

What loses work (the end of the job, a node less, an older checkpoint) needs a ground: a rule that is certain, a failure
that comes again, the ranks' own exit codes, or the user's wish. Words that are only likely are none. `_FOLLOWS` has a
ground for each consequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.core.attribution.recurrence import NEAR, nodes_of, place
from nvrx_slurm.core.attribution.said import headline
from nvrx_slurm.core.attribution.verdict import JudgedCause
from nvrx_slurm.declared import Record
from nvrx_slurm.types import (
    RERUN,
    Blame,
    Confidence,
    FaultKind,
    LineRole,
    Node,
    RankFault,
    Remedy,
    RestartRecord,
)

if TYPE_CHECKING:
    from nvrx_slurm.core.coordinator.restarts import RestartLimits

REPEATS = 3  # equal failures of the user's code that end the job, where the user asks for that
_START_S = 120.0  # what is missing later may be on a file system that is away
# SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: a program brings them upon itself
_OWN_SIGNALS = (-4, -6, -7, -8, -11)
# An outage may pass by itself.
_OUTSIDE = (Blame.NODE, Blame.SLURM, Blame.NETWORK, Blame.SERVICE, Blame.STORAGE)
_TORN = ("checkpoint-torn", "data-torn")  # rules about a file that stays damaged
_TORN_CHECKPOINT = "checkpoint-torn"
# Rules about the three verdicts of Megatron-LM before all ranks exit with REJECTED.
_TRANSIENT = "rejected-transient"
_PERSISTENT = "rejected-persistent"
_APPLICATION = "rejected-application"


class FailedCycle(Record):
    """What is known of a cycle of which nothing is left. Iterations are -1 where they are not known."""

    nodes: int  # active ones
    ranks: int  # 0 = not known
    has_spare: bool
    first: bool  # of the job
    lasted_s: float  # the longest cycle of those in a row that have failed like this
    reached: int = -1  # iteration that the ranks' output tells
    checkpoint: int = -1  # iteration of the last checkpoint
    resume_before: int = -1  # what ranks were told
    # that had the rank of the first cause in the cycle before; None = not known
    held_before: Node | None = None


class Course(Record):
    """What the coordinator does besides the restart. The default: nothing."""

    why: str = ""  # one sentence; "" = there is nothing to say
    end: int = 0  # code with which the job ends; 0 = it goes on
    elsewhere: bool = False  # the next cycle runs on other nodes
    suspect: int = -1  # rank whose node a spare should replace then; -1 = not known
    resume_before: int = -1  # ranks are told to take a checkpoint older than this; -1 = as before
    # the node there leaves the job, if enough nodes are left
    exclude: Node | RankFault | None = None
    strike: str = ""  # host that is under suspicion


class _Case(NamedTuple):
    """All that a consequence may depend on. `past`: the restarts before, oldest first."""

    v: JudgedCause
    cycle: FailedCycle
    past: Sequence[RestartRecord]
    limits: RestartLimits
    excludes_hung: bool  # the user wants the node of a rank that hung to leave the job

    @property
    def headline(self) -> str:
        return headline(self.v.cause)

    @property
    def same(self) -> RestartRecord | None:
        """The restart before, if its cause was the same and may come from code, data or a checkpoint."""
        v = self.v
        cause = v.cause
        last = self.past[-1] if self.past else None
        f = cause.finding
        if last is None or f is None or not v.fingerprint or last.fingerprint != v.fingerprint:
            return None
        is_own = cause.kind in (FaultKind.EXIT, FaultKind.LOSS) or cause.exit_code in _OWN_SIGNALS
        if not is_own or f.role is LineRole.ECHO:
            return None
        # a full disk, a mount, a port, a permission
        may_pass = v.blame in _OUTSIDE or v.one_node
        return None if may_pass and v.rule not in _TORN else last


def course(
    v: JudgedCause,
    cycle: FailedCycle,
    past: Sequence[RestartRecord],
    limits: RestartLimits,
    excludes_hung: bool,
) -> Course:
    """What follows from a cause: the first consequence in the table that has its ground and applies."""
    case = _Case(v, cycle, past, limits, excludes_hung)
    for has_ground, consequence in _FOLLOWS:
        found = consequence(case) if has_ground(case) else None
        if found is not None:
            return found
    return Course()


def reruns(past: Sequence[RestartRecord]) -> int:
    """How many cycles in a row have ended because Megatron-LM asked for other GPUs."""
    return next((n for n, one in enumerate(reversed(past)) if one.exit_code != RERUN), len(past))


# --- grounds ------------------------------------------------------------------------------------


def _is_certain(case: _Case) -> bool:
    return case.v.confidence is Confidence.CERTAIN


def _is_on_all_ranks(case: _Case) -> bool:
    return 0 < case.cycle.ranks <= case.v.ranks


def _is_rejected(case: _Case) -> bool:
    """All ranks have ended with the exit code that stands for it."""
    return case.v.cause.rejects


def _comes_again(case: _Case) -> bool:
    """The cycle before has failed in the same way."""
    return case.same is not None


def _is_counted(case: _Case) -> bool:
    """So have several cycles before."""
    return case.v.times >= REPEATS


def _is_wanted(case: _Case) -> bool:
    """The user excludes nodes whose rank hung."""
    return case.excludes_hung and case.v.cause.kind is FaultKind.HANG


# --- consequences -------------------------------------------------------------------------------


def _hopeless(case: _Case) -> Course | None:
    """An error of the user that is certain.

    What a single node may lack is certain at the start, and on each node.
    """
    v, cycle = case.v, case.cycle
    if v.remedy is not Remedy.STOP:
        return None
    is_at_start = cycle.first and cycle.lasted_s < _START_S
    if v.one_node and not (is_at_start and v.nodes == cycle.nodes):
        return None
    why = f"{case.headline}; no restart: it would fail like this again ({v.rule})"
    return Course(why, case.limits.hopeless_code)


def _failed_starts(case: _Case) -> Course | None:
    """All ranks have ended with the same exception before the first step, again.

    A job of one node tries a spare first, which may have what that one lacks.
    """
    v, cycle = case.v, case.cycle
    most = case.limits.max_failed_starts
    tries_spare = cycle.nodes == 1 and cycle.has_spare
    if not most or v.times < most + tries_spare:
        return None
    started = cycle.reached >= 0 or cycle.lasted_s >= _START_S
    raised = v.cause.kind is FaultKind.EXIT and v.cause.traceback
    if started or not raised:
        return None
    how = f"all {v.ranks} ranks have ended with the same exception before the first step"
    why = f"{case.headline}; {how}, {v.times} times: no restart (--ft-max-failed-starts)"
    return Course(why, case.limits.hopeless_code)


def _rejected(case: _Case) -> Course | None:
    """Megatron-LM has rejected a result: it asks for other GPUs (16), or has come to a verdict (17)."""
    v = case.v
    cause = v.cause
    first = case.cycle.held_before
    if cause.exit_code == RERUN:
        return Course(elsewhere=case.cycle.nodes > 1, suspect=cause.rank if v.rule else -1)
    if v.rule == _APPLICATION:
        why = f"{case.headline}; other GPUs get the same result: no restart"
        return Course(why, case.limits.no_restart_code)
    if v.rule == _TRANSIENT:
        return Course("a second run on the same GPU gave another result", strike=cause.host)
    if v.rule != _PERSISTENT or first is None or not reruns(case.past):
        return None
    if first.infra_rank == cause.infra_rank:
        return None
    # The node that says so is the second one. The first one, which had that rank before, is to blame.
    why = f"its rank {cause.rank} got another result on node {cause.host}"
    return Course(why, strike=first.host, exclude=first)


def _poisoned(case: _Case) -> Course | None:
    """The same failure twice soon after the same checkpoint, which may be damaged."""
    v, cycle, last = case.v, case.cycle, case.same
    most = case.limits.poison_iterations
    checkpoint = cycle.checkpoint
    if last is None or not most or checkpoint < 0 or last.checkpoint != checkpoint:
        return None
    torn = v.rule == _TORN_CHECKPOINT and v.confidence is Confidence.CERTAIN
    if not torn and not 0 <= cycle.reached - checkpoint <= most:
        return None
    if cycle.resume_before >= 0:
        tried = f"an older checkpoint than {cycle.resume_before} did not help"
        return Course(f"{case.headline}; {tried}: no restart", case.limits.no_restart_code)
    at = f"the same failure twice at the checkpoint of iteration {checkpoint}"
    why = f"{at}: ranks should take an older one (NVRX_RESUME_BEFORE={checkpoint})"
    # it may be the node's as well
    moves = cycle.nodes > 1 and v.nodes == 1 and not torn
    suspect = v.cause.rank if moves else -1
    return Course(why, 0, moves, suspect, resume_before=checkpoint)


def _at_one_iteration(case: _Case) -> Course | None:
    """The same failure at the same iteration: is it the node's, or the code's or the data's?"""
    v, cycle, last = case.v, case.cycle, case.same
    cause = v.cause
    if last is None or cycle.reached < 0 or cycle.nodes < 2:
        return None
    if abs(cycle.reached - last.iteration) > NEAR:
        return None
    at = f"the same failure at iteration {cycle.reached}"
    end = case.limits.no_restart_code
    if v.nodes > 1:  # other nodes show it as well
        how = f"{at} {v.times} times on {v.nodes} nodes"
        why = f"{case.headline}; {how}: code or data, no restart"
        return Course(why, end) if v.times >= REPEATS else None
    if not last.elsewhere:
        why = f"{at} again: the next cycle runs on other nodes"
        return Course(why, elsewhere=True, suspect=cause.rank)
    if last.infra_rank == cause.infra_rank:
        return Course(f"{at} with other ranks", strike=last.host)
    both = {place(last), (cause.infra_rank, cause.host)}
    if any(both <= nodes_of(one).keys() for one in case.past):
        return None  # they have failed together: both may be bad
    how = f"{at} on node {last.host} and on node {cause.host}"
    return Course(f"{case.headline}; {how}: code or data, no restart", end)


def _repeated(case: _Case) -> Course:
    """The same failure of the script, several times."""
    again = f"the same failure {case.v.times} times"
    if case.limits.stops_on_repeats:
        why = f"{case.headline}; {again}: a restart does not help"
        return Course(why, case.limits.no_restart_code)
    goes_on = "the job goes on (--ft-attribution-stop-action log)"
    return Course(f"{again}: a restart may not help; {goes_on}")


def _bad_node(case: _Case) -> Course | None:
    """The node leaves the job."""
    v = case.v
    return Course(v.sentence, exclude=v.cause) if v.remedy is Remedy.ELSEWHERE else None


_Ground = Callable[[_Case], bool]
_Consequence = Callable[[_Case], Course | None]
_FOLLOWS: tuple[tuple[_Ground, _Consequence], ...] = (
    (_is_certain, _hopeless),
    (_is_on_all_ranks, _failed_starts),
    (_is_rejected, _rejected),
    (_comes_again, _poisoned),
    (_comes_again, _at_one_iteration),
    (_is_counted, _repeated),
    (_is_certain, _bad_node),
    (_is_wanted, _bad_node),
)
