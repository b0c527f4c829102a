"""The second part of `nvrx doctor`: Slurm's hooks, which an administrator may install (docs/administrators.md)."""

from __future__ import annotations

import filecmp
import os
import re
import stat
from collections.abc import Callable, Iterator

from nvrx_slurm.cli import doctor_site as facts
from nvrx_slurm.cli.doctor_site import FAIL, OK, WARN, Line, Site, judged
from nvrx_slurm.errors import NvrxError, UsageError

BUDGETS_S = {"PROLOG_BUDGET": 6.0, "EPILOG_BUDGET": 30.0, "HEALTHCHECK_BUDGET": 50.0}
SETTINGS = {*BUDGETS_S, "PYTHON", "PACKAGE", "CONFIG", "LOG", "SCONTROL", "SLURM_CONF", "SYSROOT", "ON_ERROR"}
_SCRIPTS = (*facts.PROGRAMS.values(), "hook.sh")
_KILL_S = 60.0  # after which Slurm kills a HealthCheckProgram (slurm.conf(5))
_KILL_AFTER_S = 2.0  # option -k of timeout(1) in hook.sh
_NO_TIMEOUT = 65534  # shown by Slurm for an unset PrologEpilogTimeout
_OWN_CHECKS_S = 20.0  # to look at the programs of all own checks of a site


def looks(site: Site) -> tuple[Callable[[Site], Iterator[Line]], ...]:
    """The functions that make the lines for this site."""
    return (_programs, _when, _time, _files, _python, _site_file) if site.directory else (_none,)


def _none(site: Site) -> Iterator[Line]:
    yield Line(
        "hooks", facts.INFO, "not installed; jobs do not need them", "docs/administrators.md; for a folder: --hooks DIR"
    )


# --- slurm.conf -------------------------------------------------------------------------------------------------------


def _programs(site: Site) -> Iterator[Line]:
    for key, hook in facts.PROGRAMS.items() if site.slurm else ():
        setting, ours = site.slurm.get(key, ""), f"{site.directory}/{hook}"
        files = facts.scripts(setting)
        is_ours = any(f"{facts.MARK}{hook}." in facts.text_of(path) for path in files)
        calls = not is_ours and any("nvrx" in facts.text_of(path) for path in files)
        elsewhere = not is_ours and bool(setting) and not any(map(os.path.exists, files))
        yield judged(
            hook, f"{key}={setting}",
            (calls, WARN, f"{key}={setting} seems to call us", f"it must hand on the exit code of {ours}"),
            (elsewhere, WARN, f"{key}={setting} is not on this machine", "run this on a compute node"),
            (not is_ours, FAIL, f"{key}={setting} is not ours", f"slurm.conf: {key}={ours}, then scontrol reconfigure"),
        )  # fmt: skip


def _when(site: Site) -> Iterator[Line]:
    if not site.slurm:
        return
    flags = set(site.slurm.get("PrologFlags", "").lower().split(","))
    held = "nohold_on_prolog_fail" not in site.slurm.get("SchedulerParameters", "").lower()
    requeue = "slurm.conf: SchedulerParameters=...,nohold_on_prolog_fail and JobRequeue=1"
    alloc = "slurm.conf: PrologFlags=Alloc,DeferBatch"
    yield judged(
        "prolog-flags", f"PrologFlags={site.slurm.get('PrologFlags')}",
        (not {"alloc", "contain"} & flags, FAIL, "without Alloc the prolog runs only where a step starts", alloc),
        ("deferbatch" not in flags, WARN, "the batch script may start before prologs on other nodes end", alloc),
    )  # fmt: skip
    yield judged(
        "requeue", "a job whose prolog fails is started elsewhere",
        (held, WARN, "without nohold_on_prolog_fail a job whose prolog fails is held", requeue),
        (site.slurm.get("JobRequeue") == "0", WARN, "JobRequeue=0: a job whose prolog fails ends", requeue),
    )  # fmt: skip
    interval_s = site.seconds("HealthCheckInterval", 0)
    text = "HealthCheckInterval=0: the periodic hook never runs, and no node is taken back"
    yield judged(
        "health-check-interval", f"every {interval_s:g} s",
        (interval_s == 0, FAIL, text, "slurm.conf: HealthCheckInterval=300"),
    )  # fmt: skip
    tracking = site.slurm.get("ProctrackType", "")
    text = f"{tracking}: left-over GPU processes are found by user and environment only"
    yield judged(
        "proctrack", "left-over GPU processes are found by their cgroup",
        (tracking != "proctrack/cgroup", WARN, text, "slurm.conf: ProctrackType=proctrack/cgroup"),
    )  # fmt: skip


def _time(site: Site) -> Iterator[Line]:
    budgets_s = {}
    for name, default_s in BUDGETS_S.items():
        said = site.conf.get(name, f"{default_s:g}")
        budgets_s[name] = float(said) if re.fullmatch(r"(?=.*[0-9])[0-9]{0,4}(\.[0-9]*)?", said) else 0.0
        if budgets_s[name] <= 0:
            text = f"{name}={said} is not a number of seconds (> 0, < 10000)"
            yield Line("budgets", FAIL, text, f"correct it in {site.file}")
            return
    notice_s = max(2.0, site.seconds("MessageTimeout", 10) - 2)  # slurmd logs "Prolog hung" then
    slow = f"slurmd reports a prolog that takes {notice_s:g} s as hung"
    yield judged(
        "budgets", "hooks end in time",
        (budgets_s["HEALTHCHECK_BUDGET"] >= _KILL_S, FAIL, "Slurm kills a HealthCheckProgram after 60 s",
         f"set a smaller HEALTHCHECK_BUDGET in {site.file}"),
        (budgets_s["PROLOG_BUDGET"] >= notice_s, WARN, slow, f"set a smaller PROLOG_BUDGET in {site.file}"),
    )  # fmt: skip
    for hook, budget_s in (("prolog", budgets_s["PROLOG_BUDGET"]), ("epilog", budgets_s["EPILOG_BUDGET"])):
        common_s = site.seconds("PrologEpilogTimeout", _NO_TIMEOUT)
        limit_s = site.seconds(f"{hook.title()}Timeout", common_s) or _NO_TIMEOUT
        text = f"Slurm drains the node after {limit_s:g} s, but the hook may take {budget_s:g} s"
        advice = f"slurm.conf: PrologEpilogTimeout={budget_s + 30:g}"
        yield judged(
            f"{hook}-timeout", f"the hook ends within {budget_s:g} s, Slurm waits for {limit_s:g} s",
            (limit_s >= _NO_TIMEOUT, WARN, "Slurm waits for ever for a hook that hangs", advice),
            (limit_s <= budget_s + _KILL_AFTER_S, FAIL, text, advice),
        )  # fmt: skip


# --- files ------------------------------------------------------------------------------------------------------------


def _files(site: Site) -> Iterator[Line]:
    problems = []
    for name in (*_SCRIPTS, "start.py", "hooks.conf"):
        path = f"{site.directory}/{name}"
        if problem := facts.untrusted(path):
            problems.append(problem)
        elif name in _SCRIPTS and not os.stat(path).st_mode & stat.S_IXUSR:
            problems.append(f"{path} is not executable")
    log = site.conf.get("LOG", "")
    if log and (problem := facts.untrusted(os.path.dirname(log)) if log.startswith("/") else "not an absolute path"):
        problems.append(f"LOG={log}: {problem}")
    advice = f"chown -R root:root {site.directory}; chmod 755 its scripts; see {site.file}"
    yield judged("hook-files", "only root can change them", (bool(problems), FAIL, "; ".join(problems), advice))
    if problems and not site.conf:
        return
    unknown = sorted(name.removeprefix("?") for name in set(site.conf) - SETTINGS)
    on_error = site.conf.get("ON_ERROR", "")
    known = f"known: {', '.join(sorted(SETTINGS))}"
    again = "install all files of prolog/ again"
    yield judged(
        "hooks.conf", "its settings are known",
        (not set(site.conf) >= SETTINGS, FAIL, f"{site.directory}/hook.sh is not of this version", again),
        (bool(unknown), FAIL, f"unknown setting {', '.join(unknown)}", known),
        (on_error not in ("pass", "fail"), FAIL, f"ON_ERROR={on_error}", "ON_ERROR is pass or fail"),
    )  # fmt: skip


def _python(site: Site) -> Iterator[Line]:
    """Whether hook.sh trusts and starts Python, which then loads all that hooks need."""
    advice = f"correct PYTHON, PACKAGE (the folder with nvrx_slurm in it), or the owner of the file; see {site.file}"
    try:
        done = facts.hook_sh(site.directory, "version")
        failed, said = bool(done.returncode or not done.stdout.strip()), " ".join(done.stderr.split())[-400:]
        good = f"{site.conf.get('PYTHON')} with nvrx_slurm {done.stdout.strip()}"
    except (OSError, UsageError) as error:
        failed, said, good = True, str(error), ""
    yield judged("python", good, (failed, FAIL, said, advice))


def _site_file(site: Site) -> Iterator[Line]:
    from nvrx_slurm.health import policy, runner
    from nvrx_slurm.health.check import NodeView, Verdict

    path = site.conf.get("CONFIG") or policy.DEFAULT_CONFIG
    if not os.path.lexists(path):
        status = FAIL if site.conf.get("CONFIG") else WARN
        text = f"{path} is missing: nothing is known of what this node should have"
        yield Line("site-file", status, text, f"nvrx health init --output {path}  # on a good node")
        return
    try:
        rules = policy.read_rules(path)
        drains = [name for name in rules.checks if rules.checks[name].on_fail == "drain"]
        yield Line("site-file", OK, f"{path}: {len(rules.checks)} checks on {rules.node}, {len(drains)} of them drain")
        for finding in runner.run(policy.trials(path), NodeView(), {}, _OWN_CHECKS_S).findings:
            if finding.verdict is not Verdict.PASS:
                text = f"{finding.check} cannot be run: {finding.text}"
                yield Line("own-checks", FAIL, text, f"correct it, or its entry of own in {path}")
    except NvrxError as error:
        yield Line("site-file", FAIL, str(error), "until then no hook checks anything")
    default = policy.DEFAULT_CONFIG  # read by everything but hooks
    try:
        same, why = filecmp.cmp(path, default, shallow=False), "which differs"
    except OSError as error:
        same, why = False, str(error.strerror)
    text = f"jobs and nvrx health read {default}, not {path} of the hooks: {why}"
    advice = f"unless that is intended: ln -s {path} {default}"
    yield judged("site-file-of-jobs", "jobs and nvrx health read the same", (not same, WARN, text, advice))
