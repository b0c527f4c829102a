"""The directory below --log-dir that a user of the toolbox means, and what a run left there."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core import progress

LOG_DIR_ENV, LOG_DIR = "PET_LOG_DIR", "./nvrx_logs"  # as --log-dir has them; the settings take 0.2 s to import
MAX_RESULT_BYTES = 64 << 20  # of result.json, which lists at most 3,000 entries
DAMAGE = progress.DAMAGE  # what reading a file of another program raises
RUN = re.compile(r"r(\d{1,9})(?:_(?:step)?(\d{1,9}))?", re.ASCII)


def log_dir() -> Path:
    """Where the toolbox looks for runs."""
    return Path(os.environ.get(LOG_DIR_ENV) or LOG_DIR)


def find_run(ctx: click.Context | None, param: click.Parameter | None, place: str) -> Path:
    """The directory of the run that `place` means: of a job its newest run, of a log directory its latest.

    A callback for the arguments of the toolbox. `place`: a path; or what stands in the log directory: a job's id,
    "latest". A file is left as it is. Raises click.BadParameter.
    """
    try:
        return _found(place)
    except OSError as error:  # its owner lets nobody in
        raise click.BadParameter(f"{place} cannot be read: {error.strerror}; ask its owner") from None


def _found(place: str) -> Path:
    path = Path(place) if Path(place).exists() else log_dir() / place
    if (path / "latest").exists():
        path /= "latest"
    if path.is_symlink():
        path = path.parent / path.readlink()
    if not path.exists():
        tried = " and no ".join(dict.fromkeys((place, str(log_dir() / place))))  # one place, if it is absolute
        raise click.BadParameter(f"there is no {tried}; give a job id, or the directory of a run")
    runs = runs_of(path)
    if not runs and (path / "submit.sbatch").exists():
        raise click.BadParameter(
            f"job {path.name} has no run: it waits, or ended before nvrx-run began; see its output file"
        )
    return runs[-1] if runs else path


def runs_of(job: Path) -> list[Path]:
    """The runs of a job, the oldest first."""
    runs = {(int(m[1]), int(m[2] or 0)): run for run in job.glob("r*") if (m := RUN.fullmatch(run.name))}
    return [runs[key] for key in sorted(runs)]


def result_of(run: Path) -> dict[str, Any]:
    """The content of a run's result.json; {} if there is none."""
    try:
        with (run / "result.json").open("rb") as file:
            found = json.loads(file.read(MAX_RESULT_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def title(run: Path) -> str:
    """The job and the path of a run."""
    return f"job {run.absolute().parent.name} ({run})" if RUN.fullmatch(run.name) else str(run)
