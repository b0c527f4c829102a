"""The directory below --log-dir that belongs to this run."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.config.layers import Config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.env import SlurmContext

RUN_ENV = "NVRX_RUN"  # name of the run's directory, set for the tasks of a step by the nvrx-run that starts it


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
