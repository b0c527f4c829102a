"""`nvrx replay`: the same events through the same cores again, and the differences."""

from __future__ import annotations

import sys
from functools import partial
from io import BufferedReader, TextIOWrapper
from pathlib import Path

import click

from nvrx_slurm.core.event_log import MAX_LINE_CHARS
from nvrx_slurm.core.event_log import replay as run_again
from nvrx_slurm.core.logs.printable import printable
from nvrx_slurm.errors import ExitCode
from nvrx_slurm.system.foreign import names_in, opened
from nvrx_slurm.views import complete


@click.command()
@complete.place
def replay(place: Path) -> None:
    """Decide anew on the events of event logs, and compare with the decisions in the logs.

    PLACE is one log (<run>/events/*.jsonl), a job id, or the directory of a job or run: then each coordinator's log is
    replayed in the order of their terms, then each agent's. Exit code 0: the same decisions throughout (a torn last
    line, as a killed program leaves it, is reported only); 1: they differ, with the line and the difference.
    """
    logs = [
        place / "events" / name for name in names_in(place / "events") if name.endswith(".jsonl")
    ]
    files = sorted(logs, key=_in_order) if place.is_dir() else [place]
    if not files:
        raise click.UsageError(
            f"{place} has no events/*.jsonl; give the directory of a run, for example nvrx_logs/latest"
        )
    if not all([_replay(file) for file in files]):
        sys.exit(ExitCode.FAILED)


def _in_order(file: Path) -> tuple[bool, list[int], str]:
    """Coordinators by their terms, then agents by their infra ranks."""
    return (
        file.stem.startswith("agent"),
        [int(part) for part in file.stem.split("_") if part.isdecimal()],
        file.stem,
    )


def _replay(file: Path) -> bool:
    name = printable(str(file))
    try:
        with TextIOWrapper(
            BufferedReader(opened(file.parent, file.name)), "utf-8", "replace"
        ) as text:
            found = run_again(iter(partial(text.readline, MAX_LINE_CHARS + 2), ""))
    except OSError as error:
        click.echo(f"{name}: {error.strerror}", err=True)
        return False
    for difference in found:
        click.echo(f"{name}: {difference}", err=True)
    same = all(difference.torn for difference in found)
    if same:
        click.echo(f"{name}: the same decisions throughout")
    return same
