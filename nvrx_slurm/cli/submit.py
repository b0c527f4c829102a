"""`nvrx submit`: renders an sbatch script for nvrx-run, submits it, and may follow the job to its end."""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.options import SettingsCommand
from nvrx_slurm.config.layers import SETTINGS, Config, Resolved
from nvrx_slurm.config.settings import Declaration, settings_of
from nvrx_slurm.config.submit import SubmitConfig, resolve_submit
from nvrx_slurm.core.chain import FINAL
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode, UsageError
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import JobFacts, NoAnswer, NotKnown, SlurmError
from nvrx_slurm.slurm.script import Surroundings, render
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.system.foreign import followed
from nvrx_slurm.system.owned import append_to, make
from nvrx_slurm.views.log_tree import result_of

SUBMIT_SETTINGS: dict[str, Declaration] = {item.name: item for item in settings_of(SubmitConfig)}
_OVER = frozenset(
    {
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
        "PREEMPTED",
    }
)
# between two questions to Slurm, which forgets a job MinJobAge (300 s) after its end
_FIRST_S, _LONGEST_S = 0.5, 15.0
_READ_S = 0.5
_END_S = 3.0  # from the result to Slurm's end of the job, which waits for a lost node
_CHUNK_BYTES = 1 << 20
_CANCELLED = 143
_HERE_ONLY = ("dry_run", "print_config")  # flags of nvrx-run that mean this command, not the job


def _submit(resolved: Resolved, given: dict[str, Any], script: str, args: tuple[str, ...]) -> int:
    config = resolved.config
    wanted = resolve_submit(given, os.environ)
    wanted.check(config.launch, config.stop_before_end_s)
    log_dir = Path(config.launch.log_dir)
    words = (script, *args) if script else ()
    if config.launch.dry_run:
        wanted = _without_suspects(wanted, log_dir, None)
        click.echo(_text(config, wanted, given, words, None, ""), nl=False)
        return ExitCode.OK
    if not script:
        raise UsageError(
            "no training script was given; write it after the flags, as in nvrx submit --nodes 4 train.py"
        )
    elsewhere = wanted.container_image or config.launch.module or config.launch.no_python
    if not elsewhere and not os.path.exists(script):
        raise UsageError(f"there is no script {script} here; the job would start in {os.getcwd()}")
    _venv(wanted)
    _make(log_dir, wanted)
    slurm, _ = connect(config.launch.slurm_api)
    wanted = _without_suspects(wanted, log_dir, slurm)
    name = f"chain_{time.strftime('%Y%m%d-%H%M%S')}_{secrets.token_hex(2)}"
    links = log_dir.absolute() / name if wanted.chain else None
    text = _text(config, wanted, given, words, slurm, str(links or ""))
    jobs = _submit_all(slurm, text, wanted, log_dir, links)
    _tell(jobs, wanted, config, log_dir)
    if not wanted.wait:
        return ExitCode.OK
    outputs = [Path(_output(wanted, log_dir, job)) for job in jobs]
    return _follow(slurm, jobs, outputs, log_dir, config.launch.until_done)


def _without_suspects(wanted: SubmitConfig, log_dir: Path, slurm: Slurm | None) -> SubmitConfig:
    """Say which nodes have many strikes; with --avoid-strikes Slurm does not give them to the job.

    Slurm would refuse a job that excludes a node that it does not know, as one that was taken out of the cluster.
    """
    from nvrx_slurm.node.output import strikes  # not for --help

    found = strikes.suspects(log_dir)
    if found and slurm and wanted.avoid_strikes:
        with suppress(SlurmError):
            if known := slurm.nodes():
                found = {host: count for host, count in found.items() if host in known}
    if not found:
        return wanted
    told = f"nodes with {strikes.MANY} or more strikes in 28 days: {strikes.in_words(found)}"
    if not wanted.avoid_strikes:
        click.echo(f"{told}; leave them out: --avoid-strikes", err=True)
        return wanted
    click.echo(f"{told}: left out", err=True)
    own = [word for word in wanted.sbatch_args if word.startswith(("--exclude=", "-x"))]
    hosts = [word.removeprefix("--exclude=").removeprefix("-x").lstrip("=") for word in own]
    others = [word for word in wanted.sbatch_args if word not in own]
    return replace(wanted, sbatch_args=(*others, f"--exclude={','.join([*hosts, *found])}"))


def _text(
    config: Config,
    wanted: SubmitConfig,
    given: dict[str, Any],
    words: Sequence[str],
    slurm: Slurm | None,
    links: str,
) -> str:
    signum = config.ft.warning_signal
    place = Surroundings(
        venv=_venv(wanted),
        directory=os.getcwd(),
        log_dir=os.path.abspath(config.launch.log_dir),
        links=links,
        warning_signal="" if signum is None else signum.name.removeprefix("SIG"),
        requeue="--requeue=expedite"
        if config.launch.until_done and slurm and _expedites(slurm)
        else "--requeue",
    )
    flags = [
        word
        for key, value in given.items()
        if key in SETTINGS
        for word in _words(SETTINGS[key], value)
    ]
    return render(wanted, config.launch, flags, words, place)


def _words(item: Declaration, value: Any) -> Iterator[str]:
    """A flag of nvrx-run as it was given here."""
    if item.name in _HERE_ONLY:
        return
    if item.form == "switch":
        yield item.flags[0]
    elif item.form == "repeat":
        yield from (f"{item.flags[0]}={one}" for one in value)
    else:
        yield f"{item.flags[0]}={value}"


def _venv(wanted: SubmitConfig) -> str:
    """The environment to activate; "" in a container, and where this Python is in none."""
    if wanted.venv is not None:
        path = os.path.abspath(wanted.venv)
        if not os.path.exists(f"{path}/bin/activate"):
            raise UsageError(
                f"--venv {wanted.venv} has no bin/activate; give the directory of a Python environment"
            )
        return path
    return (
        sys.prefix
        if sys.prefix != sys.base_prefix and os.path.exists(f"{sys.prefix}/bin/activate")
        else ""
    )


def _expedites(slurm: Slurm) -> bool:
    """Whether the cluster requeues at once and keeps the job's nodes for it (sbatch --requeue=expedite, 25.11)."""
    config = slurm.config()
    version = re.match(r"(\d+)\.(\d+)", config.get("SLURM_VERSION", ""))
    new = version is not None and (int(version[1]), int(version[2])) >= (25, 11)
    return new and "enable_expedited_requeue" in config.get("SlurmctldParameters", "").lower()


def _make(log_dir: Path, wanted: SubmitConfig) -> None:
    """Slurm fails a job whose output file is in no directory, and says nothing."""
    if re.search(r"%[jJaA].*/", wanted.output or ""):
        raise UsageError(
            f"--output {wanted.output}: Slurm makes no directories; put the job's id in the file's name"
        )
    for directory in (log_dir, Path(_output(wanted, log_dir, 0)).parent):
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"the directory {directory} cannot be made: {error.strerror}"
            raise UsageError(f"{why}; give another --log-dir or --output") from None


def _submit_all(
    slurm: Slurm, text: str, wanted: SubmitConfig, log_dir: Path, links: Path | None
) -> list[int]:
    """Submit the job, or all jobs of the chain; the script is kept beside the logs of each."""
    rendered = log_dir / f".submit-{secrets.token_hex(4)}.sbatch"
    try:
        rendered.write_text(text)
        jobs: list[int] = []
        for _ in range(wanted.chain or 1):
            jobs.append(
                slurm.submit(rendered, [f"--dependency=afterany:{jobs[-1]}"] if jobs else [])
            )
            if links is not None:
                with open(append_to(links, 1), "a") as file:
                    file.write(f"{jobs[-1]}\n")
            kept = log_dir / str(jobs[-1]) / "submit.sbatch"
            make(kept.parent, 1)
            write_atomic(kept, text.encode())
    except SlurmError as error:
        raise SlurmError(
            f"{error}; submitted so far: {' '.join(map(str, jobs)) or 'none'}"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{error.filename or log_dir}: {error.strerror}; give another --log-dir"
        ) from None
    finally:
        rendered.unlink(missing_ok=True)
    return jobs


def _tell(jobs: Sequence[int], wanted: SubmitConfig, config: Config, log_dir: Path) -> None:
    nodes = wanted.all_nodes(config.launch)
    spares = nodes - config.launch.node_range(nodes).min
    shape = f"{nodes} node{'s' if nodes > 1 else ''}" + (
        f", {spares} of them spare" if spares else ""
    )
    link = (
        f", the first of {len(jobs)} (to {jobs[-1]}) that run one after the other"
        if len(jobs) > 1
        else ""
    )
    click.echo(f"submitted job {jobs[0]}{link}: {shape}")
    click.echo(f"script: {log_dir}/{jobs[0]}/submit.sbatch")
    click.echo(f"output: {_output(wanted, log_dir, jobs[0])}   logs: {log_dir}/{jobs[0]}/")
    click.echo(
        f"what happened: nvrx why {log_dir}/{jobs[0]}   end it: scancel {' '.join(map(str, jobs))}"
    )


def _output(wanted: SubmitConfig, log_dir: Path, job: int) -> str:
    return (
        (wanted.output or f"{log_dir}/%x_%j.out")
        .replace("%x", wanted.job_name)
        .replace("%j", str(job))
    )


# --- --wait -----------------------------------------------------------------------------------------------------------


def _follow(
    slurm: Slurm, jobs: Sequence[int], outputs: Sequence[Path], log_dir: Path, requeues: bool
) -> int:
    """Copy each job's output file to stdout; the exit code of the last job that ran. Ctrl-C leaves the jobs alone.

    `requeues`: --until-done: only 0, 2 and 93 end the job.
    """
    code = int(ExitCode.FAILED)
    try:
        for job_id, output in zip(jobs, outputs, strict=True):
            found = _wait(slurm, job_id, output, log_dir, requeues)
            if found is None:
                print(f"nvrx: Slurm does not know job {job_id} any more", file=sys.stderr)
                return code
            if not found.nodes and found.state == "CANCELLED" and job_id != jobs[0]:
                return code  # the link before has ended the chain
            code = found.exit_code or (0 if found.state == "COMPLETED" else _CANCELLED)
    except KeyboardInterrupt:
        print(
            f"nvrx: not waiting any more; end the job with: scancel {' '.join(map(str, jobs))}",
            file=sys.stderr,
        )
        return 130
    return code


def _wait(
    slurm: Slurm, job_id: int, output: Path, log_dir: Path, requeues: bool
) -> JobFacts | None:
    """The job as it was in the end; None if Slurm has forgotten it."""
    shown = 0
    pause_s = _FIRST_S
    ask_at = 0.0
    last = ""
    job = None
    ended_s = math.inf
    while True:
        shown = _show(output, shown)
        if job is not None and math.isinf(ended_s):
            end = result_of(log_dir / str(job_id) / f"r{job.restarts}")
            if end.get("code", 128) < 128 and (not requeues or end["code"] in FINAL):
                # after a signal Slurm may requeue the job
                ended_s, ask_at = time.monotonic(), 0.0
        # as long as a dead node is not back
        elif job is not None and time.monotonic() > ended_s + _END_S:
            _show(output, shown)
            return replace(job, state="COMPLETED", exit_code=end["code"])
        if time.monotonic() >= ask_at:
            try:
                job = slurm.job(job_id)
            except NotKnown:
                return None
            except NoAnswer:
                pass
            else:
                if job.state in _OVER:
                    _show(output, shown)
                    return job
                word = (
                    f"{job.state} ({job.reason})"
                    if job.reason and job.state == "PENDING"
                    else job.state
                )
                if word != last:
                    print(f"nvrx: job {job_id} is {word}", file=sys.stderr, flush=True)
                last = word
            pause_s = min(_LONGEST_S, 1.5 * pause_s)
            ask_at = time.monotonic() + pause_s
        time.sleep(_READ_S)


def _show(path: Path, start: int) -> int:
    """Copy what has been added to the file since byte `start`; the byte up to which it is shown now."""
    try:
        with followed(path) as file:
            file.seek(start)
            while data := file.read(_CHUNK_BYTES):
                sys.stdout.buffer.write(data)
                start += len(data)
    except OSError:
        return start  # Slurm has not made it yet, or the file system does not answer
    sys.stdout.buffer.flush()
    return start


submit = SettingsCommand(
    "submit",
    _submit,
    SUBMIT_SETTINGS
    | SETTINGS
    | {"dry_run": replace(SETTINGS["dry_run"], help="Print the sbatch script and exit.")},
    help="""Render an sbatch script that runs SCRIPT under nvrx-run, submit it, and say where its logs will be.

    All other flags of nvrx-run are taken, too, and handed on. --dry-run prints the sbatch script. Without SCRIPT, what
    it prints takes the training script and its arguments: sbatch FILE SCRIPT [ARGS].
    """,
)
