"""Slurm's hooks: prolog, epilog and HealthCheckProgram, started by prolog/hook.sh as root (docs/administrators.md).

    prolog     checks; a failure drains the node with our reason, and Slurm starts the job elsewhere
    epilog     ends left-over GPU processes; checks if the job failed or suspected the node; a failure drains
    periodic   checks; a failure drains; takes back what we drained if the checks that asked for it pass now

A healthy node costs no call of slurmctld. What is told never decides (`hook_log`). All is over
within the time that hook.sh watches.
"""

from __future__ import annotations

import os
import re
import syslog
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.errors import NvrxError, UsageError
from nvrx_slurm.health import cache, policy, report, runner
from nvrx_slurm.health.check import Check, Finding, NodeView, Verdict
from nvrx_slurm.health.hooks import aside, leftovers, sick, suspicion
from nvrx_slurm.health.hooks import drain_policy as drain
from nvrx_slurm.health.hooks.log import HookLog
from nvrx_slurm.system import trust

if TYPE_CHECKING:
    from nvrx_slurm.slurm.drain import Note, Scontrol

OK, REFUSE = 0, 10  # exit codes for hook.sh
_RESERVE_S = 1.3  # of the budget, for slurmctld to be told
_SCONTROL_S = 10.0  # at most, for both calls together; in the prolog what is left is less
_MARGIN_S = 0.15  # to end before hook.sh ends us
_MIN_S = 0.2
_SPOOL_S = 2.0  # longest wait for the disk below the spool
_PROLOGS = "prologs"  # stands for a check where time was up before there was one
_NOW_S = 0.001  # so young is only what another process found while this one waited for it
_SKIP = re.compile(r"(?:^|[\s;])nvrx:skip(?:=([a-z0-9,-]+))?(?=[\s;]|$)")
_LOUD = {"drain": syslog.LOG_ERR, "fail": syslog.LOG_ERR, "warn": syslog.LOG_WARNING, "": syslog.LOG_INFO}


class Hook(NamedTuple):
    """One run of a hook: what hook.sh and Slurm say in the environment. `until_s`: time.monotonic(); `came_s`:
    cache.now_s() when hook.sh began."""

    when: str
    node: NodeView
    name: str
    job: str
    uid: int
    comment: str
    failed: bool
    config: str | None
    scontrol: str
    log: HookLog
    came_s: float
    until_s: float

    def left_s(self) -> float:
        """Seconds for checks: what is left, without what telling slurmctld may take."""
        return max(_MIN_S, self.until_s - _RESERVE_S - time.monotonic())

    def say(self, level: int, text: str) -> None:
        """To whoever listens; never waits, never raises. `level`: of syslog(3)."""
        self.log.say(level, f"{self.name}{f' job {self.job}' if self.job else ''}: {text}")


def main(when: str, env: Mapping[str, str] | None = None, ready: Callable[[], None] = lambda: None) -> int:
    """Run a hook; the exit code for hook.sh: OK, REFUSE, anything else if the hook itself does not work.

    `ready` is called when all is loaded, before the checks.
    """
    hook = _hook(when, os.environ if env is None else env)
    runner.stop_on_sigterm()
    try:
        rules = policy.read_rules(hook.config, hook.node.root, hook.name)
        ready()
        for note in rules.notes:
            hook.say(syslog.LOG_WARNING, note)
        return _HOOKS[when](hook, rules)
    except NvrxError as error:
        hook.say(syslog.LOG_ERR, f"this hook does not work: {error}")
        return int(error.exit_code)
    finally:
        hook.log.write(hook.node, max(_MARGIN_S, hook.until_s - _MARGIN_S - time.monotonic()))


def _hook(when: str, env: Mapping[str, str]) -> Hook:
    budget_s = _number(env.get("NVRX_BUDGET"), 6.0)
    now_s = cache.now_s()
    elapsed_s = now_s - _number(env.get("NVRX_SINCE"), now_s)
    if not 0 <= elapsed_s <= budget_s:  # /proc/uptime of a container may be another one
        elapsed_s = 0.5
    codes = [env.get(f"SLURM_JOB_{name}", "0") for name in ("EXIT_CODE", "EXIT_CODE2", "DERIVED_EC")]
    return Hook(
        when=when,
        node=NodeView(env.get("NVRX_SYSROOT") or "/"),
        name=policy.node_name(),
        job=env.get("SLURM_JOB_ID", ""),
        uid=int(_number(env.get("SLURM_JOB_UID"), -1)),
        comment=env.get("SLURM_JOB_COMMENT", ""),
        failed=any(code.strip("0:") for code in codes),
        config=env.get("NVRX_CONFIG") or None,
        scontrol=env.get("NVRX_SCONTROL", ""),
        log=HookLog(when, env.get("NVRX_LOG", "")),
        came_s=now_s - elapsed_s,
        until_s=time.monotonic() + budget_s - elapsed_s,
    )


def _number(text: str | None, otherwise: float) -> float:
    try:
        return float(text or "")
    except ValueError:
        return otherwise


# --- the three --------------------------------------------------------------------------------------------------------


def _prolog(hook: Hook, rules: policy.Rules) -> int:
    allowed = _spool(hook, suspicion.allow, rules.hooks.suspicions)
    skipped = _skipped(hook, rules)
    checks = [check for check in _of(rules, hook.when) if check.name not in skipped]
    mine = [check for check in checks if check.per_job and hook.node.env.get(check.per_job)]
    with _under_way(hook, rules, mine) as finish:
        grave = _examine(hook, rules, [check for check in checks if check not in mine]).grave
        grave += _tell(hook, mine, finish()).grave
    if own := [finding for finding in grave if finding.check != _PROLOGS]:
        _drain(hook, own)
    if grave:
        return REFUSE
    try:
        allowed()
    except cache.Unusable as error:
        hook.say(syslog.LOG_WARNING, f"the job cannot tell what it suspects: {error}")
    return OK


def _spool(hook: Hook, work: Callable[[str, str, str, int], bytes], directory: str) -> Callable[[], bytes]:
    """Begin `work` on the spool, whose disk may be dead, for the hook's job; it gets what waits for what comes of it,
    and raises cache.Unusable."""
    if not hook.job:
        return lambda: b""
    return aside.Aside(
        hook.node, "spool", lambda: work(directory, hook.name, hook.job, hook.uid), min(_SPOOL_S, hook.left_s())
    ).result


def _skipped(hook: Hook, rules: policy.Rules) -> set[str]:
    """The checks that the job's comment wants to be left out, where the site allows it."""
    asked = _SKIP.search(hook.comment)
    if asked is None:
        return set()
    names = set(asked[1].split(",")) if asked[1] else {"all"}
    allowed = set(rules.checks if "all" in rules.hooks.allow_skip else rules.hooks.allow_skip)
    skipped = (allowed if "all" in names else names & allowed) & set(rules.checks)
    if skipped:
        hook.say(syslog.LOG_WARNING, f"skipped as the job's comment asks: {', '.join(sorted(skipped))}")
    if refused := set() if skipped and "all" in names else names - skipped:
        hook.say(syslog.LOG_WARNING, f"the job's comment asks to skip what it may not: {', '.join(sorted(refused))}")
    return skipped


def _epilog(hook: Hook, rules: policy.Rules) -> int:
    grave: list[Finding] = []
    if rules.hooks.kill_gpu_processes and hook.job:
        ids = (hook.job, os.environ.get("SLURM_JOB_SLUID", hook.job))
        grave += _to_drain(_examine(hook, rules, [leftovers.check(leftovers.Job(ids, hook.uid))]))
    suspicions = _suspicions(hook, rules.hooks.suspicions)
    if hook.failed or suspicions:
        named = {one.check for one in suspicions}
        checks = [_anew(check, hook.came_s) for check in _of(rules, hook.when, named)]
        grave += _to_drain(_examine(hook, rules, checks))
    # Slurm drains, with a reason of its own, if we cannot.
    return OK if not grave or _drain(hook, grave) else REFUSE


def _suspicions(hook: Hook, directory: str) -> list[suspicion.Suspicion]:
    try:
        found = suspicion.parsed(_spool(hook, suspicion.take, directory)())
    except cache.Unusable as error:
        hook.say(syslog.LOG_WARNING, f"what the job suspects cannot be read: {error}")
        return []
    for one in found[:5]:
        hook.say(syslog.LOG_WARNING, f"the job suspects this node: {one.kind} {one.check} {one.text}")
    return found


def _periodic(hook: Hook, rules: policy.Rules) -> int:
    noted = drain.noted(hook.node, hook.name)
    why = None if noted == {} else _drained(hook)
    failed_s = {**dict.fromkeys(why.checks, hook.came_s), **(noted or {})} if why else {}
    checks = [_anew(check, failed_s.get(check.name, 0.0)) for check in _of(rules, hook.when, failed_s)]
    found = _examine(hook, rules, checks)
    if grave := _to_drain(found):
        if any(finding.check not in failed_s for finding in grave):
            _drain(hook, grave)
    elif why and rules.hooks.undrain:
        off = [name for name in failed_s if name in rules.checks and not _in_hooks(rules.checks[name])]
        if drain.recovered(failed_s.keys() - off, found.findings):
            said = [f"{name} {'is switched off' if name in off else 'passes again'}" for name in failed_s]
            _undrain(hook, why, noted, said)
    return OK


def _drained(hook: Hook) -> drain.Reason | None:
    """Our reason if the node is plainly drained by us; what is surely not ours needs no question any more."""
    asked_s = cache.now_s()
    try:
        note = _scontrol(hook).note()
    except NvrxError as error:
        hook.say(syslog.LOG_WARNING, f"whether this node is drained is not known: {error}")
        return None
    if not drain.may_be_ours(note):
        drain.note_down(hook.node, hook.name, since_s=asked_s - drain.SETTLE_S)
    return drain.ours(note)


_HOOKS: dict[str, Callable[[Hook, policy.Rules], int]] = {
    "prolog": _prolog,
    "epilog": _epilog,
    "periodic": _periodic,
}


# --- what they share --------------------------------------------------------------------------------------------------


def _of(rules: policy.Rules, when: str, named: Iterable[str] = ()) -> list[Check]:
    """The checks of this hook, and those called `named` that the site wants in some hook."""
    checks = rules.checks.values()
    return [check for check in checks if when in check.contexts or (check.name in named and _in_hooks(check))]


def _in_hooks(check: Check) -> bool:
    return not _HOOKS.keys().isdisjoint(check.contexts)


def _anew(check: Check, since_s: float) -> Check:
    """The check, for which no result from before `since_s` (`cache.now_s`) will do: something has happened then."""
    return check._replace(reuse_s=min(check.reuse_s, max(cache.now_s() - since_s, _NOW_S)))


@contextmanager
def _under_way(hook: Hook, rules: policy.Rules, checks: list[Check]) -> Iterator[Callable[[], report.Report]]:
    """Start the checks, which go on beside the block; it gets what waits for their report. No process outlives it."""
    started_s = time.monotonic()
    deadline_s = min(rules.deadlines_s[hook.when], hook.left_s())
    run = runner.Run(checks, hook.node, rules.expected, deadline_s)

    def finish() -> report.Report:
        while not run.done:
            run.go_on(runner.wait(run.fds(), run.look_s()))
        result = run.result()
        took_s = round(time.monotonic() - started_s, 3)
        return report.Report(hook.name, hook.when, result.findings, result.notes, took_s)

    try:
        run.begin()
        yield finish
    finally:
        run.close()


def _examine(hook: Hook, rules: policy.Rules, checks: list[Check]) -> report.Report:
    """Run the checks; say what is wrong."""
    with _under_way(hook, rules, checks) as finish:
        return _tell(hook, checks, finish())


def _tell(hook: Hook, checks: list[Check], found: report.Report, age_s: float = 0.0) -> report.Report:
    """Say what is wrong. `age_s`: since another prolog found it, 0 if we did."""
    for note in found.notes:
        hook.say(syslog.LOG_WARNING, note)
    for finding in found.findings:
        if finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN) or finding.check == leftovers.NAME:
            hook.say(_LOUD[finding.action], f"{finding.check}: {finding.verdict.value}: {finding.text}")
    if checks:
        when = f", as another prolog found {age_s:.1f} s ago" if age_s else ""
        hook.say(syslog.LOG_INFO, f"{found.verdict.value}: {len(checks)} checks in {found.seconds:.2f} s{when}")
    return found


def _nobody(hook: Hook) -> str:
    """What is known of the node where time was up before it was our turn to look."""
    found = Finding(_PROLOGS, Verdict.UNKNOWN, "time was up while other prologs on this node were being let in")
    if sick.found_since(hook.node, hook.name, hook.came_s):
        found = Finding(_PROLOGS, Verdict.FAIL, "another hook has found this node sick meanwhile", action="fail")
    return report.Report(hook.name, hook.when, [found], [], 0.0).as_json()


def _to_drain(found: report.Report) -> list[Finding]:
    """In the epilog and the periodic hook there is no job to refuse: "fail" is only said."""
    return [finding for finding in found.findings if finding.action == "drain"]


def _drain(hook: Hook, failed: list[Finding]) -> bool:
    """Drain the node unless it is drained (or down) already; whether it is out of use now."""
    sick.found(hook.node, hook.name)  # before all that may take longer than we have
    reason = drain.reason(failed)
    checks = [finding.check for finding in failed]
    drain.note_down(hook.node, hook.name, checks)  # first: the periodic hook may run at the same time
    asked_s = cache.now_s()
    try:
        scontrol = _scontrol(hook)
        note = scontrol.note()
        if not drain.may_drain(note):
            _add(hook, scontrol, note, reason, checks)
            return True
        scontrol.drain(reason)
    except NvrxError as error:
        hook.say(syslog.LOG_ERR, f"the node cannot be drained for {reason!r}: {error}")
        return False
    drain.note_down(hook.node, hook.name, checks, asked_s - drain.SETTLE_S)  # it was in use: what was before is over
    hook.say(syslog.LOG_ERR, f"drained: {reason}")
    return True


def _add(hook: Hook, scontrol: Scontrol, note: Note, reason: str, checks: list[str]) -> None:
    """Where the node is drained by us already, these checks have to pass, too."""
    states = "+".join(sorted(note.states))
    hook.say(syslog.LOG_NOTICE, f"not drained for {reason!r}: it is {states} already ({note.reason})")
    if not (both := drain.extended(note, checks)):
        return
    try:
        scontrol.explain(both)
        hook.say(syslog.LOG_ERR, f"drained for more: {both}")
    except NvrxError as error:  # the mark has them
        hook.say(syslog.LOG_WARNING, f"the node's reason cannot be made {both!r}: {error}")


def _undrain(hook: Hook, why: drain.Reason, noted: dict[str, float] | None, said: list[str]) -> None:
    """Take the node back if nothing has changed since the checks, which took a while. `noted`: as it was before them;
    `said`: what has become of each check that asked for the drain."""
    asked_s = cache.now_s()
    try:
        scontrol = _scontrol(hook)
        if drain.ours(scontrol.note()) != why or drain.noted(hook.node, hook.name) != noted:
            return
        scontrol.undrain()
    except NvrxError as error:
        hook.say(syslog.LOG_ERR, f"the node cannot be taken back: {error}")
        return
    hook.say(syslog.LOG_NOTICE, f"taken back: {', '.join(said)}")
    if late := drain.note_down(hook.node, hook.name, since_s=asked_s):  # another hook still saw it drained
        _drain(hook, [Finding(check, Verdict.FAIL, "failed while the node was taken back") for check in late])


def _scontrol(hook: Hook) -> Scontrol:
    from nvrx_slurm.slurm.drain import Scontrol, find

    path = find(hook.scontrol)
    trust.require(path, UsageError)
    return Scontrol(path, hook.name, min(hook.until_s - _MARGIN_S, time.monotonic() + _SCONTROL_S))
