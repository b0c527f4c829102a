"""`nvrx doctor`: can a job run on this node, and are Slurm's hooks set up right? One line per fact, with the remedy."""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import click

from nvrx_slurm.child.bounded_process import run
from nvrx_slurm.errors import ExitCode, NvrxError, UsageError
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.system import trust
from nvrx_slurm.system.foreign import first_bytes
from nvrx_slurm.views.log_tree import LOG_DIR, LOG_DIR_ENV
from nvrx_slurm.views.screen import show

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
_COLOURS = {OK: "green", INFO: None, WARN: "yellow", FAIL: "red"}
PROGRAMS = {"Prolog": "prolog", "Epilog": "epilog", "HealthCheckProgram": "healthcheck"}
# in the second line of prolog/prolog, prolog/epilog and prolog/healthcheck
_MARK = "nvrx_slurm hook: "
_HOOK_SH_S = 60.0  # for hook.sh to answer
_LONGEST_FILE = 65536
_SHARE = Path(__file__).parents[1] / "share"
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


# name, key of slurm.conf, whether a value is wrong, status then, what follows from it, remedy
Fact = tuple[str, str, Callable[[str], bool], str, str, str]
_JOB_FACTS: tuple[Fact, ...] = (
    ("may-requeue", "JobRequeue", lambda value: value == "0", INFO,
     "only jobs that were submitted with --requeue are requeued (--until-done)", "sbatch --requeue"),
    ("kill-on-bad-exit", "KillOnBadExit", lambda value: value == "1", WARN,
     "a step of your own srun ends with its first task that fails", "srun --no-kill --kill-on-bad-exit=0 nvrx-run"),
)  # fmt: skip
_HOOK_FACTS: tuple[Fact, ...] = (
    ("prolog-flags", "PrologFlags", lambda value: not {"alloc", "contain"} & set(value.lower().split(",")), FAIL,
     "without Alloc the prolog runs only where a step starts", "slurm.conf: PrologFlags=Alloc,DeferBatch"),
    ("requeue", "SchedulerParameters", lambda value: "nohold_on_prolog_fail" not in value.lower(), WARN,
     "a job whose prolog fails is held", "slurm.conf: SchedulerParameters=...,nohold_on_prolog_fail and JobRequeue=1"),
    ("health-check-interval", "HealthCheckInterval", lambda value: value.split()[:1] in ([], ["0"]), FAIL,
     "the periodic hook never runs, and no node is taken back", "slurm.conf: HealthCheckInterval=300"),
)  # fmt: skip


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON list instead of lines.")
@click.option(
    "--hooks", metavar="DIR", default="", help="Folder of the hooks (default: as slurm.conf says)."
)
@click.option(
    "--slurm-api", type=click.Choice(["auto", "cli", "pyslurm"]), default="auto", envvar="NVRX_SLURM_API",
    help="As for nvrx-run.",
)  # fmt: skip
@click.option(
    "--log-dir", default=LOG_DIR, envvar=LOG_DIR_ENV, help="Where strikes are looked for."
)
@click.option(
    "--warm",
    is_flag=True,
    help="Also import what workers are forked with, and say what is left out.",
)
def doctor(as_json: bool, hooks: str, slurm_api: str, log_dir: str, warm: bool) -> None:
    """Say whether a job can run on this node, and whether Slurm's hooks are set up right. Run it on a compute node; as
    root for the hooks.

    Exit code: 0 nothing failed (there may be warnings), 1 a check failed. Hooks that are not installed do not fail.
    """
    from nvrx_slurm.slurm.api import connect

    parts = examine(*connect(slurm_api), hooks)
    parts["job"] += _strikes(Path(log_dir))
    if warm:
        parts["job"].append(_warm())
    if as_json:
        click.echo(
            json.dumps(
                [
                    {"part": name, **line._asdict()}
                    for name, lines in parts.items()
                    for line in lines
                ]
            )
        )
    else:
        _show("job", parts["job"])
        click.echo()
        _show("hooks", parts["hooks"])
    failed = any(line.status == FAIL for lines in parts.values() for line in lines)
    sys.exit(ExitCode.FAILED if failed else ExitCode.OK)


def _show(part: str, lines: list[Line]) -> None:
    column = max(len(line.name) for line in lines)
    show(_TITLES[part], bold=True)
    for line in lines:
        show(
            f"{line.status:4}  {line.name:{column}}  {line.text}",
            _COLOURS[line.status],
            hang=column + 8,
        )
        if line.advice:
            show(f"      {'':{column}}  -> {line.advice}", hang=column + 11)


def examine(backend: Slurm, why: str, hooks: str = "") -> dict[str, list[Line]]:
    """The lines of both parts. `why`: why this backend; `hooks`: folder of the hooks, "" as slurm.conf says."""
    try:
        slurm = backend.config()
        job = [
            Line("slurm", OK, f"Slurm {slurm.get('SLURM_VERSION', 'of unknown version')}"),
            Line("slurm-api", OK, f"Slurm is asked by {_TOOLS[backend.name]}: {why}"),
            *_judged(_JOB_FACTS, slurm),
        ]
    except NvrxError as error:
        slurm, job = (
            {},
            [Line("slurm", FAIL, f"no answer: {error}", "run this on a node of the cluster")],
        )
    ours = _hooks_in(slurm)
    directory = os.path.realpath(hooks) if hooks else next(iter(ours.values()), "")
    advice = "nvrx health install /etc/nvrx; for another folder: --hooks DIR"
    found = [Line("hooks", INFO, "not installed; jobs do not need them", advice)]
    if directory:
        in_slurm_conf = (
            [*_programs(slurm, ours, directory), *_judged(_HOOK_FACTS, slurm)] if slurm else []
        )
        found = [*in_slurm_conf, *_files(directory)]
    return {"job": [*job, _munge(), *_pages()], "hooks": found}


def _strikes(log_dir: Path) -> Iterator[Line]:
    from nvrx_slurm.node.output import strikes

    if found := strikes.suspects(log_dir):
        text = f"nodes with {strikes.MANY} or more strikes in 28 days: {strikes.in_words(found)}"
        yield Line(
            "strikes", WARN, text, f"look at {log_dir}/strikes.jsonl; nvrx submit --avoid-strikes"
        )


def _warm() -> Line:
    """What a template of this Python forks workers with; takes as long as the imports."""
    from nvrx_slurm.core import preload
    from nvrx_slurm.node.workers.launcher import Launcher, LauncherHooks
    from nvrx_slurm.node.workers.worker_spec import WarmSpec, WorkerContract, WorkerSpec

    modules = [name for name in preload.CANDIDATES if importlib.util.find_spec(name) is not None]
    spec = WorkerSpec(
        [sys.executable, "-u", "-c", ""], WorkerContract("", "", ""), {}, 0, lambda local_rank: 0,
        warm=WarmSpec(None, modules),
    )  # fmt: skip
    said: list[str] = []

    async def prepare() -> None:
        with tempfile.TemporaryDirectory() as directory:
            launcher = Launcher(spec, 1, Path(directory), LauncherHooks(said.append))
            launcher.begin()
            await launcher.wait()
            await launcher.close()

    asyncio.run(prepare())
    text = (
        "; ".join(said)
        or f"workers are forked with {', '.join(modules) or 'nothing: no library is installed'}"
    )
    return Line("warm-starts", INFO if said else OK, text)


def _judged(facts: Sequence[Fact], slurm: dict[str, str]) -> Iterator[Line]:
    for name, key, is_wrong, status, text, advice in facts:
        said = f"{key}={slurm.get(key, '')}"
        wrong = is_wrong(slurm.get(key, ""))
        yield Line(name, status, f"{said}: {text}", advice) if wrong else Line(name, OK, said)


def _munge() -> Line:
    from nvrx_slurm.slurm import conf
    from nvrx_slurm.slurm.munge import Munge

    try:
        munge = Munge.find(conf.munge_socket(os.environ))
        if munge is None:
            return Line(
                "munge",
                WARN,
                "no libmunge",
                "install munge; `srun nvrx-run` without a batch script needs it",
            )
        munge.open(munge.seal(b"doctor"))
    except NvrxError as error:
        return Line("munge", FAIL, str(error), "start munged")
    return Line("munge", OK, "munged answers")


def _pages() -> Iterator[Line]:
    """Where what help texts name is; the bundle has none of it."""
    if (_SHARE / "docs").is_dir():
        yield Line("pages", OK, f"documentation, templates and alert rules are below {_SHARE}")


def _programs(slurm: dict[str, str], found: dict[str, str], directory: str) -> Iterator[Line]:
    for key, hook in PROGRAMS.items():
        said = f"{key}={slurm.get(key, '')}"
        advice = f"slurm.conf: {key}={directory}/{hook}, or a script that hands on its exit code"
        yield (
            Line(hook, OK, said)
            if key in found
            else Line(hook, FAIL, f"{said} is not ours", advice)
        )


def _files(directory: str) -> Iterator[Line]:
    problems = [
        why
        for name in (*PROGRAMS.values(), "hook.sh", "hooks.conf")
        if (why := _untrusted(directory, name))
    ]
    if problems:
        advice = f"chown -R root:root {directory}; chmod 755 its scripts"
        yield Line("hook-files", FAIL, "; ".join(problems), advice)
        return
    yield Line("hook-files", OK, "only root can change them")
    try:
        settings = dict(
            line.partition("=")[::2] for line in _hook_sh(directory, "settings").splitlines()
        )
        version = _hook_sh(directory, "version").strip()
    except (OSError, UsageError) as error:
        advice = f"correct PYTHON, PACKAGE (the folder with nvrx_slurm in it), or its owner; see {directory}/hooks.conf"
        yield Line("python", FAIL, str(error), advice)
        return
    yield Line("python", OK, f"{settings.get('PYTHON')} with nvrx_slurm {version}")
    yield _site_file(settings.get("CONFIG", ""))


def _hook_sh(directory: str, word: str) -> str:
    """What hook.sh prints for one of its words for us. Raises OSError, and UsageError if it fails."""
    ended = run(["/bin/sh", f"{directory}/hook.sh", word], {"LC_ALL": "C"}, _HOOK_SH_S)
    if ended.code != 0:
        said = " ".join(ended.stderr.decode(errors="replace").split())[-400:]
        raise UsageError(said or f"{directory}/hook.sh {word} does not end; look at what it starts")
    return ended.stdout.decode(errors="replace")


def _site_file(named: str) -> Line:
    from nvrx_slurm.health import policy

    path = named or policy.DEFAULT_CONFIG
    if not os.path.lexists(path):
        text = f"{path} is missing: the expected state of this node is unknown"
        return Line(
            "site-file",
            FAIL if named else WARN,
            text,
            f"nvrx health init --output {path}  # on a good node",
        )
    try:
        rules = policy.read_rules(path)
    except NvrxError as error:
        return Line("site-file", FAIL, str(error), "until then no hook checks anything")
    return Line("site-file", OK, f"{path}: {len(rules.checks)} checks on {rules.node}")


def _hooks_in(slurm: dict[str, str]) -> dict[str, str]:
    """The keys of slurm.conf that name a hook of ours, with its folder. Each names files, also by patterns."""
    found = {}
    for key, hook in PROGRAMS.items():
        for path in (path for word in slurm.get(key, "").split() for path in glob.glob(word)):
            with suppress(OSError):
                if f"{_MARK}{hook}.".encode() in first_bytes(path, _LONGEST_FILE):
                    found[key] = os.path.dirname(os.path.realpath(path))
    return found


def _untrusted(directory: str, name: str) -> str:
    """Why a file is not trusted or cannot be executed, "" otherwise."""
    path = f"{directory}/{name}"
    try:
        trust.require(path, UsageError)
    except UsageError as error:
        return str(error)
    return (
        ""
        if os.access(path, os.X_OK) or name in ("hook.sh", "hooks.conf")
        else f"{path} is not executable"
    )
