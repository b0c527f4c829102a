"""`nvrx logs`: the lines of all ranks of a job, running or ended, without any service."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core.logs.names import index_file
from nvrx_slurm.core.logs.printable import printable
from nvrx_slurm.logs.reader import MergedReader, Piece, cycles
from nvrx_slurm.views import complete
from nvrx_slurm.views.coordinator_logs import SAID, CoordinatorLog, coordinators_of
from nvrx_slurm.views.log_tree import began_s, result_of, title
from nvrx_slurm.views.screen import clock, period_s

_SAID_BEFORE = 10  # lines of the launcher, when following begins
_POLL_S = 0.3  # between two reads of files that grow
_FORMS = "a time is 90s, 10m, 2h or 1d ago, 13:45[:30] of today, or 2026-01-31T13:45[:30]"


def _ranks(ctx: object, param: object, text: str | None) -> frozenset[int] | None:
    """0,3-5 as {0, 3, 4, 5}."""
    found: set[int] = set()
    for part in text.split(",") if text is not None else ():
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise click.BadParameter(f"{part!r} is neither a rank nor a range; write 0,3-5")
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found) if text is not None else None


def _time(ctx: object, param: object, text: str | None) -> int | None:
    """Unix milliseconds."""
    try:
        if text is None:
            return None
        if (ago_s := period_s(text)) is not None:
            return int((time.time() - ago_s) * 1000)
        today = f"{datetime.now():%Y-%m-%d}T" if "-" not in text else ""
        return int(datetime.fromisoformat(today + text).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is no time; {_FORMS}") from None


@click.command()
@complete.place
@click.option(
    "--rank", "ranks", metavar="RANKS", callback=_ranks, help="Only these ranks, for example 0,3-5."
)
@click.option(
    "--cycle",
    "cycle",
    default="last",
    metavar="N|all|last",
    help="Only this cycle. Default: the last one.",
)
@click.option(
    "--stream", type=click.Choice(["out", "err"]), help="Only standard output or standard error."
)
@click.option(
    "--since", metavar="TIME", callback=_time, help=f"Only lines from this time on; {_FORMS}."
)
@click.option("--until", metavar="TIME", callback=_time, help="Only lines up to this time.")
@click.option(
    "--follow", "-f", is_flag=True, help="Go on with new lines and cycles until the job has ended."
)
@click.option(
    "--raw",
    is_flag=True,
    help="Leave control characters as they are: ranks may then act on the terminal.",
)
def logs(place: Path, cycle: str, follow: bool, raw: bool, **only: Any) -> None:
    """Show what the ranks of a job wrote, each line behind its rank.

    PLACE is a job id, the directory of a job or run (default: the latest run), or one merged file. Lines come in the
    order of the merged file; where there is none, rank after rank, and no times are known. With --follow, what the
    launcher says, and how the job ends, goes to standard error.
    """
    if cycle not in ("all", "last") and not cycle.isdecimal():
        raise click.UsageError(f"--cycle {cycle!r} must be a number, all or last")
    click.echo(title(place), err=True)
    if place.is_dir():
        found = _of_run(place, cycle, follow)
    elif Path(index_file(str(place))).exists():
        found = MergedReader(place).read(True)
    else:
        raise click.UsageError(
            f"{place} is neither the directory of a run nor a merged file with its .idx"
        )
    try:
        for piece in found:
            if _wanted(piece, **only):
                text = piece.text
                if not raw:
                    text = printable(text.decode("utf-8", "replace")).encode()
                sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter complains at its end
    except OSError as error:
        raise click.ClickException(f"{error.filename or place}: {error.strerror}") from None


def _wanted(
    piece: Piece,
    ranks: frozenset[int] | None,
    stream: str | None,
    since: int | None,
    until: int | None,
) -> bool:
    in_time = not piece.at or (since or 0) <= piece.at <= (until or piece.at)
    return in_time and (ranks is None or piece.rank in ranks) and stream in (None, piece.stream)


def _launcher(run: Path, read: dict[str, int], began: list[float]) -> list[str]:
    """What the coordinators have said since the last call, of the first time only the end.

    `read`: bytes, by log; `began`: Unix seconds of the first line ever, once that is known.
    """
    said = list[tuple[float, str]]()
    most = None if read else _SAID_BEFORE
    for name in coordinators_of(run):
        log = CoordinatorLog(run, name)
        said += [
            (found.wall_s, str(found.value))
            for found in log.find(SAID, read.get(name, 0), log.size)
        ]
        read[name] = log.size
    began += [began_s(run, min(said)[0])] if said and not began else []
    told, now = sorted(said)[-most:] if most else sorted(said), time.time()
    return [printable(f"{clock(at, began[0], now)} nvrx-run: {text}") for at, text in told]


def _of_run(run: Path, cycle: str, follow: bool) -> Iterator[Piece]:
    readers = cycles(run)
    if not readers and not follow:
        raise click.UsageError(
            f"{run} has no cycle; give the directory of a run, for example nvrx_logs/latest"
        )
    if cycle.isdecimal() and int(cycle) not in readers and not follow:
        raise click.UsageError(
            f"{run} has no cycle {cycle}; there are {', '.join(map(str, readers))}"
        )
    first = max(readers, default=0) if cycle == "last" else 0
    read = dict[str, int]()
    began = list[float]()
    while True:
        for line in _launcher(run, read, began) if follow else ():
            click.echo(line, err=True)
        ended = not follow or (run / "result.json").exists()
        for number, found in cycles(run).items():
            readers.setdefault(number, found)
        for number, mine in sorted(readers.items()):
            if number >= first and cycle in ("all", "last", str(number)):
                final = ended or number < max(readers)
                yield from mine.read(final)
        if ended:
            if follow:
                result = result_of(run)
                click.echo(
                    printable(f"ended with code {result.get('code')}: {result.get('reason')}"),
                    err=True,
                )
            return
        sys.stdout.flush()
        time.sleep(_POLL_S)
