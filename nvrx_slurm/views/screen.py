"""How the toolbox writes lines for people: colours, the width of the terminal, one form of time."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Sequence

import click

from nvrx_slurm.core.logs.printable import printable

_DAY_S = 86400
_MOST_CELL = 32  # characters of a cell: damaged files hold any number
_UNITS_S = {
    "s": 1,
    "m": 60,
    "h": 3600,
    "d": _DAY_S,
    "w": 7 * _DAY_S,
}


def width() -> int:
    """Columns of the terminal; 0 where standard output is none: nothing is cut there."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def colours() -> bool | None:
    """A value for `click.echo(color=)`: NO_COLOR, then FORCE_COLOR; else (None) colours are for terminals."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return None


def show(line: str, colour: str | None = None, bold: bool = False, hang: int | None = None) -> None:
    """Print one line, in which nothing acts on the terminal.

    One that is too wide ends with "..."; with `hang` it goes on in further lines, so many columns to the right.
    """
    text = _fitted(line, width(), hang)
    text = click.style(text, colour, bold=bold or None)
    click.echo(text, color=colours())


def show_all(lines: Iterable[str], hang: int | None = None) -> None:
    """Print them at once: thousands of them one by one take ten times as long."""
    most = width()
    click.echo("".join(f"{_fitted(line, most, hang)}\n" for line in lines), nl=False)


def columns(rows: Sequence[Sequence[str]], numbers: Collection[str]) -> list[str]:
    """Rows below each other, the heads first. `numbers`: heads of columns that stand to the right."""
    placed = []
    for head, *cells in zip(*rows, strict=True):
        column = [_fitted(cell, _MOST_CELL) for cell in (head, *cells)]
        wide = max(map(len, column))
        if head in numbers:
            placed.append([cell.rjust(wide) for cell in column])
        else:
            placed.append([cell.ljust(wide) for cell in column])
    lines = []
    for row in zip(*placed, strict=True):
        lines.append("  ".join(row).rstrip())
    return lines


def _fitted(line: str, most: int, hang: int | None = None) -> str:
    text = printable(line).replace("\n", " ")
    if not 0 < most < len(text):
        return text
    within = max(most, 2 * (hang or 0), 4)
    if hang is None:
        return text[: within - 3] + "..."
    return click.wrap_text(text, within, "", " " * hang)


def period_s(text: str) -> int | None:
    """The seconds in 90s, 10m, 2h, 7d or 4w; None for any other text."""
    match = re.fullmatch(r"(\d{1,6})([smhdw])", text)
    return int(match[1]) * _UNITS_S[match[2]] if match else None


def clock(at: float, began: float, now: float) -> str:
    """Local time and the seconds since `began`, as on the console; with the date where it is of another day. All three
    are Unix seconds."""
    form = "%H:%M:%S"
    if abs(now - at) >= _DAY_S:
        form = "%d %b %H:%M:%S"
    local = time.strftime(form, time.localtime(at))
    return f"{local} +{at - began:.1f}s"
