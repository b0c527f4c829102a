"""`nvrx list`: the runs of a log tree as a table, as squeue has one of jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core.account.figures import lost_s
from nvrx_slurm.core.progress import DAMAGE
from nvrx_slurm.core.words import in_words, unix_s
from nvrx_slurm.system.foreign import names_in
from nvrx_slurm.views.log_tree import closed, log_dir, runs_of, status_of
from nvrx_slurm.views.screen import columns, show
from nvrx_slurm.views.status import CANNOT_TELL, COLOURS, NEEDS_A_PERSON, PROGRESS, Seen, observe

_RUNS_SHOWN, _JOB_CHARS, _NAME_CHARS = 20, 12, 10
_NUMBERS = ("NODES", "STEP", "RESTARTS", "LOST")
_UNKNOWN = "-"


@click.command("list")
@click.option(
    "--log-dir",
    "where",
    type=click.Path(path_type=Path),
    help="The log tree (default: that of nvrx-run).",
)
@click.option("--all", "every", is_flag=True, help=f"All runs, not the newest {_RUNS_SHOWN}.")
@click.option("--json", "as_json", is_flag=True, help="One line of JSON for each run.")
def list_runs(where: Path | None, every: bool, as_json: bool) -> None:
    """List the runs of a log tree, the newest first.

    NODES are those that train, and spares behind "+". STEP is that of the newest checkpoint; where none is known, of
    the last cycle. LOST is what restarts have cost; starts of ranks count once the job has ended. "-" is not known.
    Lines below say how far and how fast a job is that runs, why a person should look, or what cannot be told.
    """
    place = where or log_dir()
    runs = [run for job in names_in(place) for run in runs_of(place / job)]
    runs.sort(key=_changed_at, reverse=True)
    hidden = closed(place)
    if hidden:
        click.echo(hidden, err=True)
    if not runs and not as_json:
        if not hidden:
            click.echo(f"{place} holds no run")
        return
    now = time.time()
    found = [(run, observe(run, now)) for run in (runs if every else runs[:_RUNS_SHOWN])]
    if as_json:
        for run, seen in found:
            told = {"run": str(run), "code": seen.code, "verdict": seen.verdict, **seen.found}
            click.echo(json.dumps(told))
        return
    head, *rows = columns([["JOB", *_CELLS], *(_row(run, seen) for run, seen in found)], _NUMBERS)
    show(head, bold=True)
    for row, (_, seen) in zip(rows, found, strict=True):
        show(row, COLOURS[seen.code])
        for line in seen.lines:
            if line.startswith(PROGRESS):
                show(f"  {line.removeprefix(PROGRESS)}", hang=4)
        if seen.code in (CANNOT_TELL, NEEDS_A_PERSON):
            show(f"  {seen.verdict}", COLOURS[seen.code], hang=4)


def _row(run: Path, seen: Seen) -> list[str]:
    """The cells of one run; what its files do not tell, or not so that it can be read, is unknown."""
    job = run.parent.name
    if run.name != "r0":
        job = f"{job}/{run.name}"
    cells = [job[-_JOB_CHARS:]]  # jobs differ in the end
    status = status_of(run)
    for cell in _CELLS.values():
        try:
            cells.append(cell(status, seen.found.get("result")))
        except DAMAGE:
            cells.append(_UNKNOWN)
    return cells


def _name(status: Any, result: Any) -> str:
    name = str(status["job"]["name"])
    return name[:_NAME_CHARS] or _UNKNOWN


def _state(status: Any, result: Any) -> str:
    if result:
        return f"ended {int(result['code'])}"
    return str(status["state"])


def _start(status: Any, result: Any) -> str:
    at = unix_s(result["started"]) if result else status["began"]
    return time.strftime("%d %b %H:%M", time.localtime(at))


def _nodes(nodes: Any) -> str:
    active = int(nodes["active"] or nodes["needed"])
    spare = int(nodes["spare"])
    return f"{active}+{spare}" if spare else str(active)


def _step(saved: Any, told: Any) -> str:
    step = saved["iteration"] if saved else told["steps"]
    return str(int(step))


def _used(status: Any, result: Any) -> str:
    if result:
        return str(int(result["restarts_used"]))
    return "{used:d}/{allowed:d}".format(**status["restarts"])


def _lost(status: Any, result: Any) -> str:
    """What restarts have cost. While a job runs the starts of ranks do not count: the first cycle has one, too."""
    if result:
        return in_words(sum(map(lost_s, result["restarts"])))
    account = status["account"] or {}
    spent = account.get("node_seconds", {})
    before_s = 0.0
    for bucket in ("detect", "recomputed"):
        before_s += spent.get(bucket, 0.0)
    nodes = status["nodes"]["needed"]
    return in_words(status["restarts"]["down_s"] + before_s / nodes)


def _changed_at(run: Path) -> float:
    with suppress(OSError):
        return run.lstat().st_mtime
    return 0.0


# What a cell tells, from the content of status.json and, of an ended job, of result.json.
_CELLS: dict[str, Callable[[Any, Any], str]] = {
    "NAME": _name,
    "STATE": _state,
    "START": _start,
    "NODES": lambda status, result: _nodes(status["nodes"]),
    "STEP": lambda status, result: _step(status.get("checkpoint"), status.get("progress")),
    "RESTARTS": _used,
    "LOST": _lost,
}
