"""Slurm's hooks: prolog, epilog and HealthCheckProgram, started by prolog/hook.sh as root.

    prolog     runs its checks; a failure drains the node with our reason, and Slurm starts the job elsewhere
    epilog     ends left-over GPU processes; runs its checks if the job failed; a failure drains
    periodic   runs its checks; a failure drains; takes back a node of ours once the checks that failed pass

A healthy node causes one call of slurmctld per hour. Logging never decides. hook.sh ends a hook at its budget.
"""

from __future__ import annotations

import os
import re
import syslog
import time
from collections.abc import Callable, Iterable, Mapping

from nvrx_slurm.child import bounded_process
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health import kept, outcome, policy, runner
from nvrx_slurm.health.check import Check, CheckFinding, NodeView, Verdict
from nvrx_slurm.health.hooks import drains, leftovers
from nvrx_slurm.health.hooks.log import HookLog

OK, REFUSE = 0, 10  # exit codes for hook.sh
_RESERVE_S = 1.8  # part of the budget that is kept for slurmctld
_END_S = 0.7  # part of the budget that is left to end after a drain that hangs
_MIN_S = 0.2
_ASSUMED_S = 0.5  # since hook.sh began, where /proc/uptime tells nonsense, as in some containers
_SKIP = re.compile(r"(?:^|[\s;])nvrx:skip(?:=([a-z0-9,-]+))?(?=[\s;]|$)")
_LEVELS = {
    "drain": syslog.LOG_ERR,
    "fail": syslog.LOG_ERR,
    "warn": syslog.LOG_WARNING,
    "": syslog.LOG_INFO,
}


class Hook:
    """One run of a hook, from the environment that hook.sh and Slurm make. `job_ids`: the job's id, and its SLUID from
    Slurm 26.05; empty outside of a job. `failed`: the job failed. `until_s`: end of the budget (time.monotonic()).
    `evidence`: what is known of the job before a drain, a few words. `scontrol`: its path, "" for the usual places."""

    def __init__(self, when: str, env: Mapping[str, str]) -> None:
        budget_s, now_s = _number(env.get("NVRX_BUDGET"), 6.0), kept.now_s()
        elapsed_s = now_s - _number(env.get("NVRX_SINCE"), now_s)
        self.until_s = (
            time.monotonic() + budget_s - (elapsed_s if 0 <= elapsed_s <= budget_s else _ASSUMED_S)
        )
        self.when = when
        self.node, self.name = NodeView(env.get("NVRX_SYSROOT") or "/"), policy.node_name()
        job = env.get("SLURM_JOB_ID", "")
        self.job_ids = (job, env.get("SLURM_JOB_SLUID", job)) if job else ()
        self.comment = env.get("SLURM_JOB_COMMENT", "")
        codes = [
            env.get(f"SLURM_JOB_{name}", "0") for name in ("EXIT_CODE", "EXIT_CODE2", "DERIVED_EC")
        ]
        self.failed = any(code.strip("0:") for code in codes)
        self.config = env.get("NVRX_CONFIG") or None
        self.log = HookLog(when, env.get("NVRX_LOG", ""))
        # Slurm's own words about the job; those of the user are not trusted here.
        self.evidence = (
            f"after job {job}, exit code {codes[1]}" if when == "epilog" and self.failed else ""
        )
        self.scontrol = env.get("NVRX_SCONTROL", "")

    def say(self, level: int, text: str) -> None:
        """Log a sentence with the names of node and job, as HookLog.say."""
        self.log.say(
            level, f"{self.name}{f' job {self.job_ids[0]}' if self.job_ids else ''}: {text}"
        )


def main(when: str, env: Mapping[str, str] | None = None) -> int:
    """Run a hook. Returns the exit code for hook.sh: OK, REFUSE, or any other code if the hook itself does not work."""
    hook = Hook(when, os.environ if env is None else env)
    runner.stop_on_sigterm()
    try:
        rules = policy.read_rules(hook.config, hook.node.root, hook.name)
        for note in rules.notes:
            hook.say(syslog.LOG_WARNING, note)
        return _HOOKS[when](hook, rules)
    except NvrxError as error:
        hook.say(syslog.LOG_ERR, f"this hook does not work: {error}")
        return int(error.exit_code)
    finally:
        hook.log.write(hook.until_s)


def _number(text: str | None, otherwise: float) -> float:
    try:
        return float(text or "")
    except ValueError:
        return otherwise


# --- the three hooks --------------------------------------------------------------------------------------------------


def _prolog(hook: Hook, rules: policy.Rules) -> int:
    skipped = _skipped(hook, rules)
    found = _examine(
        hook, rules, [check for check in _of(rules, hook.when) if check.name not in skipped]
    )
    if not found.grave:
        return OK
    _drained(hook, found.grave)
    return REFUSE


def _skipped(hook: Hook, rules: policy.Rules) -> set[str]:
    """The checks that the job's comment asks to leave out, where the site allows it."""
    asked = _SKIP.search(hook.comment)
    if asked is None:
        return set()
    allowed = set(
        rules.checks if "all" in rules.hooks.allow_skip else rules.hooks.allow_skip
    ) & set(rules.checks)
    names = set((asked[1] or "all").split(","))
    skipped = allowed if "all" in names else allowed & names
    said = ", ".join(sorted(skipped)) or "nothing that the site allows"
    hook.say(syslog.LOG_WARNING, f"{asked[0].strip('; ')}: the job's comment skips {said}")
    return skipped


def _epilog(hook: Hook, rules: policy.Rules) -> int:
    failed: list[CheckFinding] = []
    if rules.hooks.kill_gpu_processes and hook.job_ids:
        failed += _to_drain(_examine(hook, rules, [leftovers.check(hook.job_ids)]))
    if hook.failed:
        failed += _to_drain(_examine(hook, rules, _of(rules, hook.when)))
    # If we cannot drain the node, REFUSE makes Slurm drain it with its own reason.
    return OK if not failed or _drained(hook, failed) else REFUSE


def _drained(hook: Hook, failed: list[CheckFinding]) -> bool:
    """Whether the node is out of service now. In a child: the file systems of scontrol and of our own modules may hang,
    and the verdict must not wait for them."""

    def work(pipe: int) -> None:
        hook.log.taken()
        done = drains.drain(hook, failed)
        os.write(pipe, hook.log.taken())
        os._exit(not done)

    left_s = max(_MIN_S, hook.until_s - _END_S - time.monotonic())
    ended = bounded_process.fork(work, left_s).finish()
    hook.log.add(ended.stdout)
    if ended.code is None:
        hook.say(
            syslog.LOG_ERR,
            "the node cannot be drained: scontrol, or its file system, does not answer",
        )
    return ended.code == 0


def _periodic(hook: Hook, rules: policy.Rules) -> int:
    why = drains.drained(hook)
    drained_for = why.checks if why else ()
    found = _examine(hook, rules, _of(rules, hook.when, drained_for))
    if failed := _to_drain(found):
        if any(finding.check not in drained_for for finding in failed):
            drains.drain(hook, failed)
    elif why and rules.hooks.undrain:
        off = [
            name
            for name in drained_for
            if name in rules.checks and not _in_hooks(rules.checks[name])
        ]
        if drains.recovered(set(drained_for).difference(off), found.findings):
            said = [
                f"{name} {'is switched off' if name in off else 'passes again'}"
                for name in drained_for
            ]
            drains.undrain(hook, why, ", ".join(said))
    return OK


_HOOKS: dict[str, Callable[[Hook, policy.Rules], int]] = {
    "prolog": _prolog,
    "epilog": _epilog,
    "periodic": _periodic,
}


# --- checks -----------------------------------------------------------------------------------------------------------


def _of(rules: policy.Rules, when: str, named: Iterable[str] = ()) -> list[Check]:
    """The checks of this hook, and those of `named` that the site has in any hook."""
    checks = rules.checks.values()
    return [
        check
        for check in checks
        if when in check.contexts or (check.name in named and _in_hooks(check))
    ]


def _in_hooks(check: Check) -> bool:
    return not _HOOKS.keys().isdisjoint(check.contexts)


def _examine(hook: Hook, rules: policy.Rules, checks: list[Check]) -> outcome.Report:
    """Run the checks and log their failures."""
    left_s = max(_MIN_S, hook.until_s - _RESERVE_S - time.monotonic())
    result = runner.run(
        checks, hook.node, rules.expected, min(rules.deadlines_s[hook.when], left_s)
    )
    found = outcome.Report(hook.name, hook.when, result.findings, result.notes, result.seconds)
    for note in found.notes:
        hook.say(syslog.LOG_WARNING, note)
    for finding in found.findings:
        if finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN) or finding.check == policy.LEFTOVERS:
            hook.say(
                _LEVELS[finding.action], f"{finding.check}: {finding.verdict.value}: {finding.text}"
            )
    if checks:
        hook.say(
            syslog.LOG_INFO, f"{found.verdict.value}: {len(checks)} checks in {found.seconds:.2f} s"
        )
    return found


def _to_drain(found: outcome.Report) -> list[CheckFinding]:
    """The failures to drain for. Epilog and periodic hook have no job to refuse: they only log the action "fail"."""
    return [finding for finding in found.findings if finding.action == "drain"]
