"""The second part of `nvrx doctor`: Slurm's hooks, which an administrator may install (docs/administrators.md)."""

from __future__ import annotations

import filecmp
import os
import re
import stat
from collections.abc import Callable, Iterator

from nvrx_slurm.cli.doctor_site import (
    FAIL,
    INFO,
    MARK,
    OK,
    PROGRAMS,
    WARN,
    Line,
    Site,
    hook_sh,
    scripts,
    text_of,
    untrusted,
)
from nvrx_slurm.errors import NvrxError, UsageError

BUDGETS_S = {"PROLOG_BUDGET": 6.0, "EPILOG_BUDGET": 30.0, "HEALTHCHECK_BUDGET": 50.0}
SETTINGS = {*BUDGETS_S, "PYTHON", "PACKAGE", "CONFIG", "LOG", "SCONTROL", "SLURM_CONF", "SYSROOT", "ON_ERROR"}
_SCRIPTS = (*PROGRAMS.values(), "hook.sh")
_HEALTHCHECK_KILL_S = 60.0  # slurm.conf(5), HealthCheckProgram
_KILL_AFTER_S = 2.0  # option -k of timeout(1) in hook.sh
_NO_TIMEOUT = 65534  # shown by Slurm for an unset PrologEpilogTimeout
_OWN_CHECKS_S = 20.0  # to find all programs, and import all modules, of a site's own checks
_INSTALL = "install all files of prolog/ again (docs/administrators.md)"


def looks(site: Site) -> tuple[Callable[[Site], Iterator[Line]], ...]:
    """The functions that make the lines for this site."""
    return (_programs, _when, _time, _files, _log, _python, _site_file) if site.directory else (_none,)


def _none(site: Site) -> Iterator[Line]:
    text = "not installed; jobs do not need them"
    yield Line("hooks", INFO, text, "to install them: docs/administrators.md; to look at a folder: --hooks DIR")


# --- slurm.conf -------------------------------------------------------------------------------------------------------


def _programs(site: Site) -> Iterator[Line]:
    for key, hook in PROGRAMS.items() if site.slurm else ():
        setting = site.slurm.get(key, "")
        files = scripts(setting)
        if any(f"{MARK}{hook}." in text_of(path) for path in files):
            yield Line(hook, OK, f"{key}={setting}")
        elif any("nvrx" in text_of(path) for path in files):
            advice = f"it must hand on the exit code of {site.directory}/{hook}"
            yield Line(hook, WARN, f"{key}={setting} seems to call us", advice)
        elif setting and not any(map(os.path.exists, files)):
            yield Line(hook, WARN, f"{key}={setting} is not on this machine", "run this on a compute node")
        else:
            problem = f"{key}={setting} is not ours" if setting else f"{key} is not set"
            yield Line(hook, FAIL, problem, f"slurm.conf: {key}={site.directory}/{hook}, then scontrol reconfigure")


def _when(site: Site) -> Iterator[Line]:
    if not site.slurm:
        return
    flags = site.slurm.get("PrologFlags", "").lower().split(",")
    if not {"alloc", "contain"} & set(flags):
        text = "without PrologFlags=Alloc the prolog runs only where a first step starts, and late"
        yield Line("prolog-flags", FAIL, text, "slurm.conf: PrologFlags=Alloc,DeferBatch")
    elif "deferbatch" not in flags:
        text = "the batch script may start before the prologs of its other nodes have ended"
        yield Line("prolog-flags", WARN, text, "slurm.conf: PrologFlags=Alloc,DeferBatch")
    else:
        yield Line("prolog-flags", OK, f"PrologFlags={site.slurm['PrologFlags']}")
    held = "nohold_on_prolog_fail" not in site.slurm.get("SchedulerParameters", "").lower()
    if site.slurm.get("JobRequeue") == "0" or held:
        missing = "SchedulerParameters has no nohold_on_prolog_fail" if held else "JobRequeue=0"
        text = f"{missing}: a job whose prolog fails is not started elsewhere"
        yield Line("requeue", WARN, text, "slurm.conf: SchedulerParameters=...,nohold_on_prolog_fail and JobRequeue=1")
    else:
        yield Line("requeue", OK, "a job whose prolog fails is started elsewhere")
    interval_s = site.seconds("HealthCheckInterval", 0)
    if interval_s == 0:
        text = "HealthCheckInterval=0: the periodic hook never runs, and no node is taken back"
        yield Line("health-check-interval", FAIL, text, "slurm.conf: HealthCheckInterval=300")
    else:
        yield Line("health-check-interval", OK, f"every {interval_s:g} s")
    if site.slurm.get("ProctrackType", "") != "proctrack/cgroup":
        text = "left-over GPU processes are found by user and environment only"
        yield Line("proctrack", WARN, text, "slurm.conf: ProctrackType=proctrack/cgroup")


def _time(site: Site) -> Iterator[Line]:
    budgets_s = {}
    for name, default_s in BUDGETS_S.items():
        said = site.conf.get(name, f"{default_s:g}")
        budgets_s[name] = float(said) if re.fullmatch(r"(?=.*[0-9])[0-9]{0,4}(\.[0-9]*)?", said) else 0.0
        if budgets_s[name] <= 0:
            text = f"{name}={said} is not a number of seconds (> 0, < 10000)"
            yield Line("budgets", FAIL, text, f"correct it in {site.file}")
            return
    if budgets_s["HEALTHCHECK_BUDGET"] >= _HEALTHCHECK_KILL_S:
        yield Line("budgets", FAIL, "Slurm kills a HealthCheckProgram after 60 s", "HEALTHCHECK_BUDGET must be less")
    notice_s = max(2.0, site.seconds("MessageTimeout", 10) - 2)  # slurmd logs "Prolog hung" then
    if budgets_s["PROLOG_BUDGET"] >= notice_s:
        text = f"PROLOG_BUDGET={budgets_s['PROLOG_BUDGET']:g}: slurmd says that a prolog hangs after {notice_s:g} s"
        yield Line("budgets", WARN, text, f"make it less in {site.file}")
    for hook, budget_s in (("prolog", budgets_s["PROLOG_BUDGET"]), ("epilog", budgets_s["EPILOG_BUDGET"])):
        common_s = site.seconds("PrologEpilogTimeout", _NO_TIMEOUT)
        limit_s = site.seconds(f"{hook.title()}Timeout", common_s) or _NO_TIMEOUT
        name = f"{hook}-timeout"
        if limit_s >= _NO_TIMEOUT:
            yield Line(name, WARN, "Slurm waits for ever for one that hangs", "slurm.conf: PrologEpilogTimeout=60")
        elif limit_s <= budget_s + _KILL_AFTER_S:
            text = f"Slurm drains the node after {limit_s:g} s, but the hook may take {budget_s:g} s"
            yield Line(name, FAIL, text, f"slurm.conf: PrologEpilogTimeout={budget_s + 30:g}")
        else:
            yield Line(name, OK, f"the hook ends within {budget_s:g} s, Slurm waits for {limit_s:g} s")


# --- files ------------------------------------------------------------------------------------------------------------


def _files(site: Site) -> Iterator[Line]:
    problems = []
    for name in (*_SCRIPTS, "start.py", "hooks.conf"):
        path = f"{site.directory}/{name}"
        if problem := untrusted(path):
            problems.append(problem)
        elif name in _SCRIPTS and not os.stat(path).st_mode & stat.S_IXUSR:
            problems.append(f"{path} is not executable")
    if problems:
        advice = f"chown -R root:root {site.directory}; chmod 755 its scripts"
        yield Line("hook-files", FAIL, "; ".join(problems), advice)
    else:
        yield Line("hook-files", OK, f"{site.directory}: only root can change it")
    if not set(site.conf) >= SETTINGS:
        if not problems:
            yield Line("hooks.conf", FAIL, f"{site.directory}/hook.sh is not of this version", _INSTALL)
        return
    unknown = sorted(name.removeprefix("?") for name in set(site.conf) - SETTINGS)
    if unknown or site.conf["ON_ERROR"] not in ("pass", "fail"):
        wrong = f"unknown setting {', '.join(unknown)}" if unknown else f"ON_ERROR={site.conf['ON_ERROR']}"
        yield Line("hooks.conf", FAIL, wrong, f"known: {', '.join(sorted(SETTINGS))}; ON_ERROR is pass or fail")
    if os.environ.get("SLURM_CONF") and not site.conf["SLURM_CONF"]:
        text = f"the HealthCheckProgram does not get SLURM_CONF={site.slurm.get('SLURM_CONF', '')}"
        yield Line("hooks.conf", WARN, text, f"unless that is Slurm's default: set SLURM_CONF in {site.file}")


def _log(site: Site) -> Iterator[Line]:
    if not (path := site.conf.get("LOG", "")):
        return
    problem = "is not an absolute path" if not path.startswith("/") else untrusted(os.path.dirname(path))
    if not problem and os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        problem = "is not an ordinary file"
    if problem:
        yield Line("log", FAIL, f"LOG={path}: {problem}", f"in {site.file}: LOG=/var/log/nvrx-hooks.log")
    else:
        yield Line("log", OK, f"hooks write to {path}, too")


def _python(site: Site) -> Iterator[Line]:
    """Whether hook.sh starts Python, and that finds our package: all that a hook loads is loaded."""
    advice = f"correct PYTHON, PACKAGE (the folder with nvrx_slurm in it), or the owner of the file; see {site.file}"
    try:
        done = hook_sh(site.directory, "version")
    except (OSError, UsageError) as error:
        yield Line("python", FAIL, str(error), advice)
        return
    if done.returncode or not done.stdout.strip():
        yield Line("python", FAIL, " ".join(done.stderr.split())[-400:], advice)
    else:
        yield Line("python", OK, f"{site.conf.get('PYTHON')} with nvrx_slurm {done.stdout.strip()}")


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
    if not same:
        text = f"jobs and nvrx health read {default}, not {path} of the hooks: {why}"
        yield Line("site-file-of-jobs", WARN, text, f"unless that is intended: ln -s {path} {default}")
