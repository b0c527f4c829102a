"""The directory below --log-dir that belongs to this run, and the one that a user of the toolbox means."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.config.layers import SETTINGS, Config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm.env import SlurmContext

RUN_ENV = "NVRX_RUN"  # name of the run's directory, set for the tasks of a step by the nvrx-run that starts it
MAX_RESULT_BYTES = 64 << 20  # of result.json, which lists at most 3,000 entries
RUN = re.compile(r"r(\d{1,9})(?:_(?:step)?(\d{1,9}))?", re.ASCII)


def find_run(ctx: click.Context | None, param: click.Parameter | None, place: str) -> Path:
    """The directory of the run that `place` means: of a job its newest run, of a log directory its latest.

    A callback for the arguments of the toolbox. `place`: a path; or what stands in the log directory: a job's id,
    "latest". A file is left as it is. Raises click.BadParameter.
    """
    setting = SETTINGS["log_dir"]
    log_dir = next((os.environ[name] for name in setting.env if os.environ.get(name)), setting.default)
    path = Path(place) if Path(place).exists() else Path(log_dir, place)
    if (path / "latest").exists():
        path /= "latest"
    if path.is_symlink():
        path = path.parent / path.readlink()
    if not path.exists():
        raise click.BadParameter(
            f"there is neither {place} nor {Path(log_dir, place)}; give a job id, or the directory of a run"
        )
    runs = {(int(m[1]), int(m[2] or 0)): run for run in path.glob("r*") if (m := RUN.fullmatch(run.name))}
    if not runs and (path / "submit.sbatch").exists():
        raise click.BadParameter(
            f"job {path.name} has no run: it waits, or ended before nvrx-run began; see its output file"
        )
    return runs[max(runs)] if runs else path


def result_of(run: Path) -> dict[str, Any]:
    """The content of a run's result.json; {} if there is none."""
    try:
        with (run / "result.json").open("rb") as file:
            found = json.loads(file.read(MAX_RESULT_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def title(run: Path) -> str:
    """The job and the path of a run."""
    return f"job {run.absolute().parent.name} ({run})" if RUN.fullmatch(run.name) else str(run)


def working_directory() -> Path:
    """Raises UsageError where it was removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}); cd to one that exists") from None


def run_dir(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> RunDir:
    """The log tree of this run: by job id and number of requeues in Slurm, else by --rdzv-id."""
    log_dir = Path(config.launch.log_dir)
    log_dir = log_dir if log_dir.is_absolute() else working_directory() / log_dir
    if slurm is not None:
        return RunDir(log_dir, slurm.job_name_id, _file_name(env.get(RUN_ENV, "") or _run_name(slurm)))
    run_id = config.launch.rdzv_id
    if run_id == "none" and config.launch.node_range(None).max == 1:
        run_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return RunDir(log_dir, _file_name(run_id), "r0")


def own_run_dir(wanted: RunDir) -> RunDir:
    """Make the first of r0, r0_2, r0_3, ... that no other nvrx-run of this allocation has made."""
    wanted.create_parent()
    for number in itertools.count(1):
        mine = wanted if number == 1 else replace(wanted, run=f"{wanted.run}_{number}")
        with suppress(FileExistsError):
            mine.path.mkdir()
            break
    mine.create()
    return mine


def _run_name(slurm: SlurmContext) -> str:
    """r<Slurm restart>; steps that the user starts after the first one get a directory of their own."""
    return f"r{slurm.restart_count}" + (f"_step{slurm.step_id}" if slurm.step_id > 0 else "")


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).lstrip(".") or "run"
