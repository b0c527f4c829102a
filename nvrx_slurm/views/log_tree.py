"""The directory below --log-dir that a user of the toolbox means, and what a run left there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core.progress import DAMAGE
from nvrx_slurm.system.foreign import document, names_in

# as --log-dir has them; the settings take 0.2 s to import
LOG_DIR_ENV, LOG_DIR = "PET_LOG_DIR", "./nvrx_logs"
_MOST_RUNS = 10_000
_RESULT_BYTES = 8 << 20  # result.json lists at most 3,000 entries and 10,000 nodes
RUN = re.compile(r"r(\d{1,9})(?:_(?:step)?(\d{1,9}))?(?:_(\d{1,9}))?", re.ASCII)


def log_dir() -> Path:
    """Where the toolbox looks for runs."""
    return Path(os.environ.get(LOG_DIR_ENV) or LOG_DIR)


def find_run(place: str) -> Path:
    """The directory of the run that `place` means: of a job its newest run, of a log directory its latest.

    `place`: a path; or what stands in the log directory: a job's id, "latest". A file is left as it is. Raises
    click.BadParameter.
    """
    try:
        return _found(place)
    except OSError as error:  # its owner lets nobody in
        raise click.BadParameter(
            f"{place} cannot be read: {error.strerror}; ask its owner"
        ) from None


def _found(place: str) -> Path:
    path = Path(place) if Path(place).exists() else log_dir() / place
    if (path / "latest").exists():
        path /= "latest"
    if not path.exists():
        # one place, if it is absolute
        tried = " and no ".join(dict.fromkeys((place, str(log_dir() / place))))
        raise click.BadParameter(
            f"there is no {tried}; give a job id, or the directory of a run, or set {LOG_DIR_ENV}"
        )
    while path.is_symlink():
        path = path.parent / path.readlink()
    if not str(path).isprintable():  # it would act on the terminal
        raise click.BadParameter(f"{str(path)!r} is no name of a run")
    runs = runs_of(path)
    if not runs and (path / "submit.sbatch").exists():
        raise click.BadParameter(
            f"job {path.name} has no run: it waits, or ended before nvrx-run began; see its output file"
        )
    return runs[-1] if runs else path


def runs_of(job: Path) -> list[Path]:
    """The runs of a job, the oldest first; _MOST_RUNS at most, where no job of ours has as many."""
    runs = {
        tuple(int(number or 0) for number in m.groups()): name
        for name in names_in(job)[:_MOST_RUNS]
        if (m := RUN.fullmatch(name))
    }
    return [job / runs[key] for key in sorted(runs)]


def closed(place: Path) -> str:
    """What in a log directory this user may not read, as a sentence; "" = nothing."""
    if _is_closed(place):
        return f"{place} cannot be read; ask its owner"
    jobs = sum(_is_closed(place / name) for name in names_in(place))
    what = "1 job" if jobs == 1 else f"{jobs} jobs"
    return f"not shown: {what} of {place} that you may not read" if jobs else ""


def _is_closed(directory: Path) -> bool:
    try:
        os.scandir(directory).close()
    except PermissionError:
        return True
    except OSError:  # a file, or nothing
        return False
    return False


def result_of(run: Path, name: str = "result.json") -> dict[str, Any]:
    """The content of a run's result.json; {} if there is none that can be read."""
    try:
        return document(_RESULT_BYTES, run, name)
    except (OSError, ValueError):
        return {}


def status_of(run: Path) -> dict[str, Any]:
    """The content of a run's status.json; {} if there is none that can be read."""
    return result_of(run, "status.json")


def began_s(run: Path, otherwise: float) -> float:
    """When the job began, in Unix seconds, from the status that its coordinator writes."""
    with suppress(*DAMAGE):
        return float(status_of(run)["began"])
    return otherwise


@contextmanager
def written_by_others(place: Path) -> Iterator[None]:
    """Whatever is found in files of a log tree, what follows from it is one sentence. Raises click.UsageError."""
    try:
        yield
    except DAMAGE as error:
        raise click.UsageError(
            f"{place} holds what nvrx-run has not written like this: {error!r:.200}"
        ) from None


def title(run: Path) -> str:
    """The job and the path of a run."""
    return f"job {run.absolute().parent.name} ({run})" if RUN.fullmatch(run.name) else str(run)
