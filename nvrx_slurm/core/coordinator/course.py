"""What follows from the cause of a failed cycle, besides the restart: the end, other nodes, an older checkpoint, a
strike against a node. Pure.

What earlier cycles showed is in their restart records, which every plan carries to the next coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.verdict import REPEATS, JudgedCause, headline
from nvrx_slurm.core.coordinator.restarts import RERUN, RestartLimits
from nvrx_slurm.frozen import frozen

_NEAR = 1  # iterations: a training loop may report one before or after the step that fails
_NATIVE = (-4, -6, -7, -8, -11)  # SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV: signals that a program brings upon itself
_ELSEWHERE = (t.Blame.NODE, t.Blame.SLURM, t.Blame.NETWORK, t.Blame.SERVICE)  # to blame for what no checkpoint changes
# Rules about the three verdicts of Megatron-LM (core/rerun_state_machine.py), before all ranks exit with RESULT.
_RESULT = 17
_TRANSIENT, _PERSISTENT, _APPLICATION = "rejected-transient", "rejected-persistent", "rejected-application"


@frozen
class FailedCycle:
    """A cycle of which nothing is left. Iterations are -1 where they are not known."""

    verdict: JudgedCause
    nodes: int  # active ones
    at_start: bool  # the job has not come far yet
    reached: int = -1  # iteration that the ranks' output tells
    checkpoint: int = -1  # iteration of the last checkpoint
    resume_before: int = -1  # what ranks were told
    held_before: str = ""  # host that had the rank of the first cause in the cycle before; "" = not known


@frozen
class Course:
    """What the coordinator does, each at most once. The default: restart on the same nodes."""

    why: str = ""  # one sentence; "" = there is nothing to say
    end: int = 0  # code with which the job ends; 0 = it goes on
    elsewhere: bool = False  # the next cycle runs on other nodes
    resume_before: int = -1  # ranks are told to take a checkpoint older than this; -1 = as before
    strike: str = ""  # host that gets a strike
    exclude: str = ""  # host that leaves the job


def course(failed: FailedCycle, past: Sequence[t.RestartRecord], limits: RestartLimits) -> Course:
    """What follows. `past`: the restarts before this one, oldest first."""
    for rule in _RULES:
        found = rule(failed, past, limits)
        if found is not None:
            return found
    return Course()


def struck(past: Sequence[t.RestartRecord], failed: FailedCycle | None) -> tuple[str, str]:
    """The host whose failure is gone since other nodes run the ranks, and why it gets a strike; ("", "") = none. The
    cycle behind got further, or (None) succeeded."""
    last = past[-1] if past else None
    gone = last is not None and (failed is None or failed.reached > last.iteration + _NEAR)
    if last is None or not gone or not last.elsewhere or last.exit_code == RERUN:
        return "", ""
    return last.host, f"{last.cause}: gone since other nodes run its ranks"


def reruns(past: Sequence[t.RestartRecord]) -> int:
    """How many cycles in a row have ended because Megatron-LM asked for other GPUs."""
    return next((n for n, one in enumerate(reversed(past)) if one.exit_code != RERUN), len(past))


# --- the rules, in this order -----------------------------------------------------------------------------------------


def _hopeless(failed: FailedCycle, past: Sequence[t.RestartRecord], limits: RestartLimits) -> Course | None:
    """An error of the user that is certain. What a single node may lack is certain at the start, and on each node."""
    v = failed.verdict
    if v.remedy is not t.Remedy.STOP or v.confidence is not t.Confidence.CERTAIN:
        return None
    if v.one_node and not (failed.at_start and v.nodes == failed.nodes):
        return None
    return Course(f"{headline(v.cause)}; no restart: each node would fail like this ({v.rule})", limits.hopeless_code)


def _rejected(failed: FailedCycle, past: Sequence[t.RestartRecord], limits: RestartLimits) -> Course | None:
    """Megatron-LM has rejected a result: it asks for other GPUs (16), or has come to a verdict (17)."""
    v = failed.verdict
    cause, rule = v.cause, v.rule
    if cause.kind is not t.FaultKind.EXIT or cause.exit_code not in (RERUN, _RESULT):
        return None
    if cause.exit_code == RERUN:
        return Course(elsewhere=failed.nodes > 1)
    if rule == _APPLICATION:
        why = f"{headline(cause)}; other GPUs get the same result: no restart"
        return Course(why, limits.no_restart_code)
    if rule == _TRANSIENT:
        return Course("a second run on the same GPU gave another result", strike=cause.host)
    if rule != _PERSISTENT or failed.held_before in ("", cause.host) or not reruns(past):
        return None
    # The node that says so is the second one. The first one, which had that rank before, is to blame.
    why = f"its rank {cause.rank} got another result on node {cause.host}"
    return Course(why, strike=failed.held_before, exclude=failed.held_before)


def _poisoned(failed: FailedCycle, past: Sequence[t.RestartRecord], limits: RestartLimits) -> Course | None:
    """The same failure twice soon after the same checkpoint, which may be damaged."""
    last, v = _same(failed, past), failed.verdict
    most = limits.poison_iterations
    if last is None or not most or failed.checkpoint < 0 or last.checkpoint != failed.checkpoint:
        return None
    soon = 0 <= failed.reached - failed.checkpoint <= most
    if not soon and v.blame is not t.Blame.STORAGE:
        return None
    if failed.resume_before >= 0:
        why = f"{headline(v.cause)}; an older checkpoint than {failed.resume_before} did not help: no restart"
        return Course(why, limits.no_restart_code)
    why = f"the same failure twice at the checkpoint of iteration {failed.checkpoint}: ranks should take an older one"
    return Course(f"{why} (NVRX_RESUME_BEFORE={failed.checkpoint})", resume_before=failed.checkpoint)


def _at_one_iteration(failed: FailedCycle, past: Sequence[t.RestartRecord], limits: RestartLimits) -> Course | None:
    """The same failure at the same iteration: is it the node's, or the code's or the data's?"""
    last, v = _same(failed, past), failed.verdict
    if last is None or failed.reached < 0 or abs(failed.reached - last.iteration) > _NEAR or failed.nodes < 2:
        return None
    at = f"the same failure at iteration {failed.reached}"
    if not last.elsewhere:
        return Course(f"{at} again: the next cycle runs on other nodes", elsewhere=True)
    if last.host == v.cause.host:
        return Course(f"{at} with other ranks", strike=last.host)
    why = f"{headline(v.cause)}; {at} on node {last.host} and on node {v.cause.host}: code or data, no restart"
    return Course(why, limits.no_restart_code)


def _repeated(failed: FailedCycle, past: Sequence[t.RestartRecord], limits: RestartLimits) -> Course | None:
    """The user's code fails in the same way again and again."""
    v, again = failed.verdict, f"the same failure {failed.verdict.times} times"
    if v.times < REPEATS:
        return None
    if limits.stops_on_repeats:
        return Course(f"{headline(v.cause)}; {again}: a restart does not help", limits.no_restart_code)
    return Course(f"{again}: a restart may not help; the job goes on (--ft-attribution-stop-action log)")


_RULES: tuple[Callable[[FailedCycle, Sequence[t.RestartRecord], RestartLimits], Course | None], ...]
_RULES = (_hopeless, _rejected, _poisoned, _at_one_iteration, _repeated)


def _same(failed: FailedCycle, past: Sequence[t.RestartRecord]) -> t.RestartRecord | None:
    """The restart before, if its cause was the same and may come from code, data or a checkpoint."""
    cause, last = failed.verdict.cause, past[-1] if past else None
    print_ = cause.finding.fingerprint if cause.finding is not None else ""
    own = cause.kind is t.FaultKind.EXIT or cause.exit_code in _NATIVE
    if last is None or not own or not print_ or last.fingerprint != print_ or failed.verdict.blame in _ELSEWHERE:
        return None
    return last
