"""`nvrx doctor`: is this node's Slurm set up for us? One line per fact, with what to do (docs/administrators.md)."""

from __future__ import annotations

import filecmp
import glob
import json
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import click

from nvrx_slurm.errors import ExitCode, NvrxError, UsageError
from nvrx_slurm.system import trust

OK, WARN, FAIL = "ok", "warn", "fail"
MARK = "nvrx_slurm hook: "  # in the second line of prolog/prolog and its siblings
SCRIPTS = ("prolog", "epilog", "healthcheck", "hook.sh")
BUDGETS_S = {"PROLOG_BUDGET": 6.0, "EPILOG_BUDGET": 30.0, "HEALTHCHECK_BUDGET": 50.0}
TOOLS = tuple(f"/usr/bin/{name}" for name in ("env", "logger", "namei", "readlink", "timeout"))  # of hook.sh
SETTINGS = {*BUDGETS_S, "PYTHON", "PACKAGE", "CONFIG", "LOG", "SCONTROL", "SLURM_CONF", "SYSROOT", "ON_ERROR"}
HEALTHCHECK_KILL_S = 60.0  # slurm.conf(5), HealthCheckProgram
KILL_AFTER_S = 2.0  # timeout(1) in hook.sh: -k
NO_TIMEOUT = 65534  # what Slurm shows for an unset PrologEpilogTimeout
STOP_TIMEOUT_S = 15.0  # --workers-stop-timeout
_OWN_CHECKS_S = 20.0  # for all of them to be found, or imported
_SCONTROL_S = 10.0
_LONGEST_FILE = 65536


class Line(NamedTuple):
    """What was found about one thing. `status`: OK, WARN or FAIL; `advice`: what to do, "" if nothing."""

    name: str
    status: str
    text: str
    advice: str = ""


class Site(NamedTuple):
    """What the lines are about: `slurm`: `scontrol show config` ({} where it does not answer, `problem` says why);
    `directory`: of our hooks ("" = not found); `conf`: its hooks.conf."""

    slurm: dict[str, str]
    problem: str
    directory: str
    conf: dict[str, str]

    def seconds(self, key: str, otherwise: float) -> float:
        """The number in "30 sec"."""
        found = re.match(r"\d+", self.slurm.get(key, ""))
        return float(found[0]) if found else otherwise

    def budget_s(self, name: str) -> float:
        """Of a hook; 0 for what hook.sh does not take."""
        said = str(self.conf.get(name, BUDGETS_S[name]))
        return float(said) if re.fullmatch(r"(?=.*[0-9])[0-9]{0,4}(\.[0-9]*)?", said) else 0.0


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of lines.")
@click.option("--hooks", metavar="DIR", default="", help="Where the hooks are (default: as slurm.conf says).")
@click.option("--scontrol", metavar="FILE", default="", help="scontrol (default: in PATH).")
def doctor(as_json: bool, hooks: str, scontrol: str) -> None:
    """Say whether Slurm's hooks, and what jobs need on this node, are set up right. Run it as root on a compute node.

    Exit code: 0 nothing failed (there may be warnings), 1 something did.
    """
    lines = examine(hooks, scontrol)
    if as_json:
        click.echo(json.dumps([line._asdict() for line in lines]))
    else:
        width = max(len(line.name) for line in lines)
        for line in lines:
            click.echo(f"{line.status:4}  {line.name:{width}}  {line.text}")
            if line.advice:
                click.echo(f"      {'':{width}}  -> {line.advice}")
    sys.exit(ExitCode.FAILED if any(line.status == FAIL for line in lines) else ExitCode.OK)


def examine(hooks: str = "", scontrol: str = "") -> list[Line]:
    """All lines, in the order in which problems are best mended."""
    slurm, problem = _ask(scontrol)
    directory = os.path.realpath(hooks) if hooks else _directory(slurm)
    site = Site(slurm, problem, directory, _conf(directory))
    return [line for look in LOOKS for line in look(site)]


def _ask(scontrol: str) -> tuple[dict[str, str], str]:
    from nvrx_slurm.slurm import drain

    try:
        found = drain.find(scontrol or shutil.which("scontrol") or "")
        return parse_config(drain.Scontrol(found, "localhost", time.monotonic() + _SCONTROL_S).config()), ""
    except NvrxError as error:
        return {}, str(error)


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` by name; "(null)" is "". Of Prolog[0], Prolog[1], ... all values, with a blank between."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        name = re.sub(r"\[\d+\]$", "", key.strip())
        if equals and name:
            value = "" if value.strip() == "(null)" else value.strip()
            found[name] = f"{found[name]} {value}" if name in found and key.strip().endswith("]") else value
    return found


def _scripts(setting: str) -> list[str]:
    """The files that a Prolog, Epilog or HealthCheckProgram of slurm.conf names; it may be a pattern."""
    return [path for word in setting.split() for path in sorted(glob.glob(word)) or [word]]


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_FILE).decode(errors="replace")
    except OSError:
        return ""


def _directory(slurm: dict[str, str]) -> str:
    for key in ("Prolog", "Epilog", "HealthCheckProgram"):
        for path in _scripts(slurm.get(key, "")):
            if MARK in _text(path):
                return os.path.dirname(os.path.realpath(path))
    return ""


def _conf(directory: str) -> dict[str, str]:
    """hooks.conf as hook.sh itself reads it: all settings, and what is none as "?NAME"; {} if it cannot be asked."""
    import subprocess

    shell = f"{directory}/hook.sh"
    if not directory or _untrusted(shell) or _untrusted(f"{directory}/hooks.conf"):
        return {}
    try:
        done = subprocess.run(
            ["/bin/sh", shell, "settings"], env={"LC_ALL": "C"}, stdin=subprocess.DEVNULL, capture_output=True,
            timeout=_SCONTROL_S, check=False, text=True, errors="replace",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    return {name: value for name, _, value in pairs if name}


# --- Slurm ------------------------------------------------------------------------------------------------------------


def _slurm(site: Site) -> Iterator[Line]:
    if not site.slurm:
        yield Line("slurm", FAIL, f"scontrol does not answer: {site.problem}", "run this on a node of the cluster")
    else:
        yield Line("slurm", OK, f"Slurm {site.slurm.get('SLURM_VERSION', 'of unknown version')}")


def _programs(site: Site) -> Iterator[Line]:
    for key, hook in (("Prolog", "prolog"), ("Epilog", "epilog"), ("HealthCheckProgram", "healthcheck")):
        setting = site.slurm.get(key, "")
        where = site.directory or "/etc/nvrx"
        scripts = _scripts(setting)
        if not site.slurm:
            continue
        if any(f"{MARK}{hook}." in _text(path) for path in scripts):
            yield Line(hook, OK, f"{key}={setting}")
        elif any("nvrx" in _text(path) for path in scripts):
            yield Line(
                hook, WARN, f"{key}={setting} seems to call us", f"it must hand on the exit code of {where}/{hook}"
            )
        elif setting and not any(map(os.path.exists, scripts)):
            yield Line(hook, WARN, f"{key}={setting} is not on this machine", "run this on a compute node")
        else:
            problem = f"{key}={setting} is not ours" if setting else f"{key} is not set"
            yield Line(hook, FAIL, problem, f"slurm.conf: {key}={where}/{hook}, then scontrol reconfigure")


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
        states = site.slurm.get("HealthCheckNodeState", "ANY")
        yield Line("health-check-interval", OK, f"every {interval_s:g} s on nodes in state {states}")


def _time(site: Site) -> Iterator[Line]:
    for name in BUDGETS_S:
        if site.budget_s(name) <= 0:
            text = f"{name}={site.conf[name]} is no number of seconds (> 0, < 10000)"
            yield Line("budgets", FAIL, text, f"correct it in {_file(site)}")
            return
    if site.budget_s("HEALTHCHECK_BUDGET") >= HEALTHCHECK_KILL_S:
        yield Line("budgets", FAIL, "Slurm kills a HealthCheckProgram after 60 s", "HEALTHCHECK_BUDGET must be less")
    notice_s = max(2.0, site.seconds("MessageTimeout", 10) - 2)  # slurmd says "Prolog hung" then
    if site.budget_s("PROLOG_BUDGET") >= notice_s:
        text = f"PROLOG_BUDGET={site.budget_s('PROLOG_BUDGET'):g}: slurmd says that a prolog hangs after {notice_s:g} s"
        yield Line("budgets", WARN, text, f"make it less in {_file(site)}")
    if not site.slurm:
        return
    for key, budget in (("PrologTimeout", "PROLOG_BUDGET"), ("EpilogTimeout", "EPILOG_BUDGET")):
        common_s = site.seconds("PrologEpilogTimeout", NO_TIMEOUT)
        limit_s, wanted_s = site.seconds(key, common_s) or NO_TIMEOUT, site.budget_s(budget)
        hook = "prolog" if budget == "PROLOG_BUDGET" else "epilog"
        if limit_s >= NO_TIMEOUT:
            text = f"Slurm waits for ever for a{'n' if hook == 'epilog' else ''} {hook} that hangs"
            yield Line(f"{hook}-timeout", WARN, text, "slurm.conf: PrologEpilogTimeout=60")
        elif limit_s <= wanted_s + KILL_AFTER_S:
            text = f"Slurm gives it {limit_s:g} s and drains the node then, but {budget} is {wanted_s:g} s"
            yield Line(f"{hook}-timeout", FAIL, text, f"slurm.conf: PrologEpilogTimeout={wanted_s + 30:g}")
        else:
            yield Line(f"{hook}-timeout", OK, f"ours ends after {wanted_s:g} s, Slurm's patience after {limit_s:g} s")


# --- files ------------------------------------------------------------------------------------------------------------


def _file(site: Site) -> str:
    return f"{site.directory or '/etc/nvrx'}/hooks.conf"


def _files(site: Site) -> Iterator[Line]:
    if not site.directory:
        yield Line(
            "hook-files", FAIL, "our hooks are not found", "install them (docs/administrators.md), or give --hooks"
        )
        return
    problems = []
    for name in (*SCRIPTS, "start.py", "trust.py", "hooks.conf"):
        path = f"{site.directory}/{name}"
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
            continue
        if name in SCRIPTS and not mode & stat.S_IXUSR:
            problems.append(f"{path} is not executable")
        problems += [problem] if (problem := _untrusted(path)) else []
    if problems:
        yield Line(
            "hook-files", FAIL, "; ".join(problems), f"chown -R root:root {site.directory}; chmod 755 its scripts"
        )
    else:
        yield Line("hook-files", OK, f"{site.directory}: root's, and only root's to change")
    missing = [tool for tool in TOOLS if not os.access(tool, os.X_OK)]
    if missing:
        yield Line("hook-tools", FAIL, f"{', '.join(missing)} cannot be executed", "install coreutils and util-linux")
    else:
        yield Line("hook-tools", OK, "what hook.sh needs is there")
    if not set(site.conf) >= SETTINGS and not problems:
        text = f"{site.directory}/hook.sh does not tell how it reads it: it is not of this version"
        yield Line("hooks.conf", FAIL, text, "install all files of prolog/ again (docs/administrators.md)")
        return
    unknown = sorted(name.removeprefix("?") for name in set(site.conf) - SETTINGS)
    if unknown or site.conf.get("ON_ERROR", "pass") not in ("pass", "fail"):
        wrong = f"{', '.join(unknown)} is no setting" if unknown else f"ON_ERROR={site.conf['ON_ERROR']}"
        yield Line("hooks.conf", FAIL, wrong, f"known: {', '.join(sorted(SETTINGS))}; ON_ERROR is pass or fail")
    conf = site.slurm.get("SLURM_CONF", "")
    if os.environ.get("SLURM_CONF") and not site.conf.get("SLURM_CONF"):
        text = f"Slurm tells the HealthCheckProgram nothing of {conf}"
        yield Line(
            "hooks.conf", WARN, text, f"if that is not Slurm's default place: SLURM_CONF={conf} in {_file(site)}"
        )


def _log(site: Site) -> Iterator[Line]:
    path = site.conf.get("LOG", "")
    if not path:
        return
    advice = f"in {_file(site)}: LOG=/var/log/nvrx-hooks.log"
    if not path.startswith("/"):
        yield Line("log", FAIL, f"LOG={path} is no absolute path", advice)
    elif problem := _untrusted(os.path.dirname(path)) or _no_log(path):
        yield Line("log", FAIL, f"LOG: {problem}", advice)
    else:
        yield Line("log", OK, f"hooks write to {path}, too")


def _no_log(path: str) -> str:
    """Why nothing can be written there, "" if something can."""
    try:
        room = os.statvfs(os.path.dirname(path))
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            return f"{path} is no ordinary file"
    except OSError as error:
        return f"{path} cannot be used: {error.strerror}"
    if room.f_flag & os.ST_RDONLY or not room.f_bavail:
        return f"{path} is on a file system that is {'full' if not room.f_bavail else 'read-only'}"
    return ""


def _untrusted(path: str) -> str:
    """Why root does not trust it, "" if it does."""
    try:
        trust.require(path, UsageError)
    except UsageError as error:
        return str(error)
    return ""


def _python(site: Site) -> Iterator[Line]:
    if not site.directory:
        return
    python = site.conf.get("PYTHON", "")
    advice = f"in {_file(site)}: PYTHON={sys.executable}"
    if not python.startswith("/"):
        yield Line("python", FAIL, f"PYTHON={python} is no absolute path", advice)
    elif problem := _untrusted(python):
        yield Line("python", FAIL, f"PYTHON: {problem}", "root runs only what only root can change")
    else:
        yield _started(site, python)


def _started(site: Site, python: str) -> Line:
    """Whether that Python, as the hooks start it, finds and trusts our package."""
    import subprocess

    argv = [python, "-I", "-S", f"{site.directory}/start.py", "version"]
    env = {"NVRX_PACKAGE": site.conf.get("PACKAGE", "")}
    try:
        done = subprocess.run(argv, env=env, capture_output=True, timeout=_SCONTROL_S, check=False, text=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Line("python", FAIL, f"{python} cannot be run: {error}", f"correct PYTHON in {_file(site)}")
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        advice = f"correct the owner, or PACKAGE (the directory with nvrx_slurm in it) in {_file(site)}"
        return Line("python", FAIL, f"{python} cannot load the hooks: {said}", advice)
    return Line("python", OK, f"{python} with nvrx_slurm {done.stdout.strip()}")


def _site_file(site: Site) -> Iterator[Line]:
    from nvrx_slurm.health import policy

    path = site.conf.get("CONFIG") or policy.DEFAULT_CONFIG
    if not os.path.lexists(path):
        status = FAIL if site.conf.get("CONFIG") else WARN
        text = f"{path} is not there: nothing is known of what this node should have"
        yield Line("site-file", status, text, f"nvrx health init --output {path}  # on a good node")
        return
    try:
        rules = policy.read_rules(path)
        own = [name for name in rules.checks if rules.checks[name].on_fail == "drain"]
        yield Line("site-file", OK, f"{path}: {len(rules.checks)} checks on {rules.node}, {len(own)} of them drain")
        yield from _own_checks(path)
    except NvrxError as error:
        yield Line("site-file", FAIL, str(error), "until then no hook checks anything")
    yield from _site_file_of_jobs(path, policy.DEFAULT_CONFIG)


def _own_checks(path: str) -> Iterator[Line]:
    """Whether each of the site's own checks can be run by us."""
    from nvrx_slurm.health import policy, runner
    from nvrx_slurm.health.check import NodeView, Verdict

    trials = policy.trials(path)
    for finding in runner.run(trials, NodeView(), {}, _OWN_CHECKS_S).findings:
        if finding.verdict is not Verdict.PASS:
            text = f"{finding.check} cannot be run: {finding.text}"
            yield Line("own-checks", FAIL, text, f"correct it, or its entry of own in {path}: until then it is unknown")


def _site_file_of_jobs(path: str, default: str) -> Iterator[Line]:
    """`path` is the hooks'. Who is no hook knows nothing of hooks.conf: he reads `default`."""
    text = ""
    try:
        if not filecmp.cmp(path, default, shallow=False):
            text = f"agents and nvrx health read {default}, which is not the same as the hooks' {path}"
    except OSError as error:
        text = f"agents and nvrx health read {default}, not the hooks' {path}, but: {error.strerror}"
    if text:
        yield Line("site-file-of-jobs", WARN, text, f"unless that is meant: ln -s {path} {default}")
    else:
        yield Line("site-file-of-jobs", OK, f"agents and nvrx health read the same rules in {default}")


def _spool(site: Site) -> Iterator[Line]:
    from nvrx_slurm.health import policy

    try:
        directory = policy.read_rules(site.conf.get("CONFIG") or policy.DEFAULT_CONFIG).hooks.suspicions
    except NvrxError:
        directory = policy.HookSettings().suspicions
    there = directory
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if problem := _untrusted(there) or _writable_by_others(directory):
        advice = "in the site file: hooks: suspicions: a directory below one of root's, such as /var/spool/nvrx"
        yield Line("suspicions", FAIL, problem, advice)
    elif there != directory:
        yield Line("suspicions", OK, f"{directory} will be made by the first prolog")
    else:
        yield Line("suspicions", OK, f"{directory}: jobs may leave a suspicion in a file of their own")


def _writable_by_others(directory: str) -> str:
    """What `trust` accepts of a sticky directory is no place for suspicions: anybody could leave some."""
    try:
        mode = os.stat(directory).st_mode
    except OSError:
        return ""
    return f"{directory} can be written to by others than root" if mode & 0o022 else ""


# --- what jobs need ---------------------------------------------------------------------------------------------------


def _jobs(site: Site) -> Iterator[Line]:
    if site.slurm:
        yield from _slurm_for_jobs(site)
    from nvrx_slurm.slurm import conf
    from nvrx_slurm.slurm.munge import Munge

    try:
        munge = Munge.find(conf.munge_socket(os.environ))
        if munge is None:
            yield Line("munge", WARN, "no libmunge", "install munge; `srun nvrx-run` without a batch script needs it")
        else:
            munge.open(munge.seal(b"doctor"))
            yield Line("munge", OK, "munged answers")
    except NvrxError as error:
        yield Line("munge", FAIL, str(error), "start munged")
    numactl = shutil.which("numactl")
    missing = Line("numactl", WARN, "not found", "install numactl; binding workers to NUMA nodes needs it")
    yield Line("numactl", OK, numactl) if numactl else missing


def _slurm_for_jobs(site: Site) -> Iterator[Line]:
    kill_wait_s = site.seconds("KillWait", 30)
    text = f"{kill_wait_s:g} s from SIGTERM to SIGKILL at scancel and the time limit; a longer --term-timeout is cut"
    if kill_wait_s < STOP_TIMEOUT_S:
        advice = f"slurm.conf: KillWait=30 (--workers-stop-timeout is {STOP_TIMEOUT_S:g} s)"
        yield Line("kill-wait", WARN, text, advice)
    else:
        yield Line("kill-wait", OK, text)
    tracking = site.slurm.get("ProctrackType", "")
    if tracking == "proctrack/cgroup":
        yield Line("proctrack", OK, "jobs have cgroups: left-over GPU processes are surely theirs")
    else:
        text = f"{tracking}: left-over GPU processes are known by user and environment only"
        yield Line("proctrack", WARN, text, "slurm.conf: ProctrackType=proctrack/cgroup")
    if site.slurm.get("KillOnBadExit") == "1":
        text = "KillOnBadExit=1: a step ends with its first task that fails"
        advice = "nvrx-run in a batch script overrides it; with srun: srun --no-kill --kill-on-bad-exit=0 nvrx-run"
        yield Line("kill-on-bad-exit", WARN, text, advice)
    else:
        text = "steps outlive a task that fails; to outlive a node: sbatch --no-kill, and srun --no-kill"
        yield Line("kill-on-bad-exit", OK, text)


LOOKS: tuple[Callable[[Site], Iterator[Line]], ...] = (
    _slurm, _programs, _when, _time, _files, _log, _python, _site_file, _spool, _jobs,
)  # fmt: skip
