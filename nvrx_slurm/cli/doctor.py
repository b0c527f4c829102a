"""`nvrx doctor`: can a job run on this node, and are Slurm's hooks set up right? One line per fact, with the remedy."""

from __future__ import annotations

import glob
import json
import os
import pwd
import sys
from collections.abc import Iterator
from typing import NamedTuple

import click

from nvrx_slurm.child.bounded_process import Ended, run
from nvrx_slurm.errors import ExitCode, NvrxError, UsageError
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.control import seconds
from nvrx_slurm.system import trust

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
PROGRAMS = {"Prolog": "prolog", "Epilog": "epilog", "HealthCheckProgram": "healthcheck"}
_MARK = "nvrx_slurm hook: "  # in the second line of prolog/prolog, prolog/epilog and prolog/healthcheck
_STOP_TIMEOUT_S = 15.0  # default of --workers-stop-timeout
_HOOK_SH_S = 60.0  # for hook.sh to answer
_LONGEST_FILE = 65536
_TOOLS = {"cli": "its command line tools", "pyslurm": "pyslurm"}
_TITLES = {
    "job": "Can a job run on this node?",
    "hooks": "Optional: hooks with which Slurm drains broken nodes",
}


class Line(NamedTuple):
    """What was found about one thing. `status`: OK, INFO, WARN or FAIL; `advice`: the remedy, "" if none is needed."""

    name: str
    status: str
    text: str
    advice: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of lines.")
@click.option("--hooks", metavar="DIR", default="", help="Folder of the hooks (default: as slurm.conf says).")
@click.option(
    "--slurm-api", type=click.Choice(["auto", "cli", "pyslurm"]), default="auto", envvar="NVRX_SLURM_API",
    help="As for nvrx-run.",
)  # fmt: skip
def doctor(as_json: bool, hooks: str, slurm_api: str) -> None:
    """Say whether a job can run on this node, and whether Slurm's hooks are set up right. Run it on a compute node; as
    root for the hooks.

    Exit code: 0 nothing failed (there may be warnings), 1 a check failed. Hooks that are not installed do not fail.
    """
    from nvrx_slurm.slurm.api import connect

    try:
        parts = examine(*connect(slurm_api), hooks)
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps([{"part": name, **line._asdict()} for name, lines in parts.items() for line in lines]))
    else:
        click.echo("\n\n".join(_text(name, lines) for name, lines in parts.items()))
    failed = any(line.status == FAIL for lines in parts.values() for line in lines)
    sys.exit(ExitCode.FAILED if failed else ExitCode.OK)


def _text(name: str, lines: list[Line]) -> str:
    width = max(len(line.name) for line in lines)
    rows = [_TITLES[name]]
    for line in lines:
        rows.append(f"{line.status:4}  {line.name:{width}}  {line.text}")
        if line.advice:
            rows.append(f"      {'':{width}}  -> {line.advice}")
    return "\n".join(rows)


def examine(backend: Slurm, why: str, hooks: str = "") -> dict[str, list[Line]]:
    """The lines of both parts. `why`: why this backend; `hooks`: folder of the hooks, "" as slurm.conf says."""
    slurm, problem = dict[str, str](), ""  # slurm.conf by name; {} if Slurm does not answer
    try:
        slurm = backend.config()
    except NvrxError as error:
        problem = str(error)
    directory = os.path.realpath(hooks) if hooks else _directory(slurm)
    advice = "docs/how-to/install-slurm-hooks.md; for a folder: --hooks DIR"
    missing = Line("hooks", INFO, "not installed; jobs do not need them", advice)
    return {
        "job": [*_slurm(slurm, problem, f"{_TOOLS[backend.name]}: {why}"), _munge()],
        "hooks": [*_slurm_conf(slurm, directory), *_files(directory)] if directory else [missing],
    }


def _judged(name: str, good: str, wrong: bool, status: str, text: str, advice: str) -> Line:
    return Line(name, status, text, advice) if wrong else Line(name, OK, good)


# --- a job ------------------------------------------------------------------------------------------------------------


def _slurm(slurm: dict[str, str], problem: str, asked_by: str) -> Iterator[Line]:
    if not slurm:
        yield Line("slurm", FAIL, f"scontrol does not answer: {problem}", "run this on a node of the cluster")
        return
    yield Line("slurm", OK, f"Slurm {slurm.get('SLURM_VERSION', 'of unknown version')}")
    yield Line("slurm-api", OK, f"Slurm is asked by {asked_by}")
    yield from _rights(slurm)
    kill_wait_s = seconds(slurm, "KillWait", 30)
    text = f"{kill_wait_s:g} s from SIGTERM to SIGKILL at scancel and the time limit"
    advice = f"slurm.conf: KillWait=30; until then --workers-stop-timeout below {kill_wait_s:g}"
    yield _judged("kill-wait", text, kill_wait_s < _STOP_TIMEOUT_S, WARN, text, advice)
    text = "KillOnBadExit=1: a step ends with its first task that fails"
    advice = "nvrx-run in a batch script overrides it; with srun: srun --no-kill --kill-on-bad-exit=0 nvrx-run"
    good = "a step outlives a task that fails; with sbatch --no-kill and srun --no-kill also a node"
    yield _judged("kill-on-bad-exit", good, slurm.get("KillOnBadExit") == "1", WARN, text, advice)


def _rights(slurm: dict[str, str]) -> Iterator[Line]:
    """What this user may do to jobs and nodes, by Slurm's rules: slurmctld logs a forbidden try as a violation."""
    text, advice = "you may requeue those of your jobs that were submitted with --requeue", "sbatch --requeue"
    good = "you may requeue your own jobs (--until-done), unless a plugin of the site forbids it"
    yield _judged("may-requeue", good, slurm.get("JobRequeue") == "0", INFO, text, advice)
    yield Line("may-update", OK, "you may exclude nodes from your waiting jobs and shorten their time limits")
    text = "only root, SlurmUser and Slurm's administrators drain nodes: for you a job excludes them instead"
    yield Line("may-drain", *((OK, "you may drain nodes") if _drains(slurm) else (INFO, text)))
    expedites = "enable_expedited_requeue" in slurm.get("SlurmctldParameters", "").lower()
    text = "nvrx submit --until-done starts again at once after a lost node, with its nodes"
    if expedites:
        yield Line("expedited-requeue", OK, text)


def _drains(slurm: dict[str, str]) -> bool:
    """Whether slurmctld lets this user change nodes: operators of Slurm's accounting may not, administrators may."""
    from nvrx_slurm.slurm.api.facts import SlurmError
    from nvrx_slurm.slurm.api.tools import Tools

    if os.geteuid() == 0 or slurm.get("SlurmUser", "").partition("(")[0] == _user():
        return True
    if slurm.get("AccountingStorageType") != "accounting_storage/slurmdbd":
        return False
    try:
        return Tools().run("sacctmgr", "-nP", "show", "user", _user(), "format=AdminLevel").strip() == "Administrator"
    except SlurmError:
        return False


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _munge() -> Line:
    from nvrx_slurm.slurm import conf
    from nvrx_slurm.slurm.munge import Munge

    try:
        munge = Munge.find(conf.munge_socket(os.environ))
        if munge is not None:
            munge.open(munge.seal(b"doctor"))
    except NvrxError as error:
        return Line("munge", FAIL, str(error), "start munged")
    advice = "install munge; `srun nvrx-run` without a batch script needs it"
    return _judged("munge", "munged answers", munge is None, WARN, "no libmunge", advice)


# --- the hooks --------------------------------------------------------------------------------------------------------


def _slurm_conf(slurm: dict[str, str], directory: str) -> Iterator[Line]:
    if not slurm:
        return
    for key, hook in PROGRAMS.items():
        setting = slurm.get(key, "")
        ours = any(f"{_MARK}{hook}." in _text_of(path) for path in _scripts(setting))
        advice = f"slurm.conf: {key}={directory}/{hook}, or a script that hands on its exit code"
        yield _judged(hook, f"{key}={setting}", not ours, FAIL, f"{key}={setting} is not ours", advice)
    flags = slurm.get("PrologFlags", "")
    bad = not {"alloc", "contain"} & set(flags.lower().split(","))
    text, advice = "without Alloc the prolog runs only where a step starts", "slurm.conf: PrologFlags=Alloc,DeferBatch"
    yield _judged("prolog-flags", f"PrologFlags={flags}", bad, FAIL, text, advice)
    held = "nohold_on_prolog_fail" not in slurm.get("SchedulerParameters", "").lower()
    bad = held or slurm.get("JobRequeue") == "0"
    text = "a job whose prolog fails is held or ends"
    advice = "slurm.conf: SchedulerParameters=...,nohold_on_prolog_fail and JobRequeue=1"
    yield _judged("requeue", "a job whose prolog fails is started elsewhere", bad, WARN, text, advice)
    interval_s = seconds(slurm, "HealthCheckInterval", 0)
    text = "HealthCheckInterval=0: the periodic hook never runs, and no node is taken back"
    advice = "slurm.conf: HealthCheckInterval=300"
    yield _judged("health-check-interval", f"every {interval_s:g} s", interval_s == 0, FAIL, text, advice)


def _files(directory: str) -> Iterator[Line]:
    problems = [problem for name in PROGRAMS.values() if (problem := _untrusted(f"{directory}/{name}"))]
    advice = f"chown -R root:root {directory}; chmod 755 its scripts; see {directory}/hooks.conf"
    yield _judged("hook-files", "only root can change them", bool(problems), FAIL, "; ".join(problems), advice)
    try:
        version = _hook_sh(directory, "version")
        settings = _hook_sh(directory, "settings").stdout.decode(errors="replace").splitlines()
    except (OSError, UsageError) as error:
        yield Line("python", FAIL, str(error), advice)
        return
    conf = {name: value for name, _, value in (line.partition("=") for line in settings)}
    said = " ".join(version.stderr.decode(errors="replace").split())[-400:]
    advice = f"correct PYTHON, PACKAGE (the folder with nvrx_slurm in it), or its owner; see {directory}/hooks.conf"
    good = f"{conf.get('PYTHON')} with nvrx_slurm {version.stdout.decode().strip()}"
    yield _judged("python", good, bool(version.code), FAIL, said, advice)
    yield _site_file(conf.get("CONFIG", ""))


def _site_file(named: str) -> Line:
    from nvrx_slurm.health import policy

    path = named or policy.DEFAULT_CONFIG
    if not os.path.lexists(path):
        text = f"{path} is missing: the expected state of this node is unknown"
        advice = f"nvrx health init --output {path}  # on a good node"
        return Line("site-file", FAIL if named else WARN, text, advice)
    try:
        rules = policy.read_rules(path)
    except NvrxError as error:
        return Line("site-file", FAIL, str(error), "until then no hook checks anything")
    return Line("site-file", OK, f"{path}: {len(rules.checks)} checks on {rules.node}")


def _scripts(setting: str) -> list[str]:
    """The files that a Prolog, Epilog or HealthCheckProgram of slurm.conf names; it may be a pattern."""
    return [path for word in setting.split() for path in glob.glob(word)]


def _text_of(path: str) -> str:
    """The begin of a file, "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(_LONGEST_FILE).decode(errors="replace")
    except OSError:
        return ""


def _untrusted(path: str) -> str:
    """Why a file is not trusted or cannot be executed, "" otherwise."""
    try:
        trust.require(path, UsageError)
    except UsageError as error:
        return str(error)
    return "" if os.access(path, os.X_OK) else f"{path} is not executable"


def _hook_sh(directory: str, word: str) -> Ended:
    """Run hook.sh with one of its words for us. Raises OSError, and UsageError if it is not trusted or hangs."""
    shell = f"{directory}/hook.sh"
    for path in (shell, f"{directory}/hooks.conf"):
        trust.require(path, UsageError)
    ended = run(["/bin/sh", shell, word], {"LC_ALL": "C"}, _HOOK_SH_S)
    if ended.code is None:
        raise UsageError(f"{shell} {word} does not end within {_HOOK_SH_S:g} s; look at what it starts")
    return ended


def _directory(slurm: dict[str, str]) -> str:
    """Folder of our hooks as slurm.conf says, "" if they are not installed."""
    paths = [path for key in PROGRAMS for path in _scripts(slurm.get(key, "")) if _MARK in _text_of(path)]
    return os.path.dirname(os.path.realpath(paths[0])) if paths else ""
