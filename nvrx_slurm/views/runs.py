"""`nvrx list`: the runs of a log tree as a table, as squeue has one of jobs."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core.progress import DAMAGE
from nvrx_slurm.core.words import in_words, unix_s
from nvrx_slurm.system.foreign import names_in
from nvrx_slurm.views.log_tree import log_dir, runs_of
from nvrx_slurm.views.screen import columns, show
from nvrx_slurm.views.status import CANNOT_TELL, COLOURS, NEEDS_A_PERSON, Seen, content, observe

_RUNS_SHOWN, _JOB_CHARS, _NAME_CHARS = 20, 12, 10
_HEADS = ("JOB", "NAME", "STATE", "START", "NODES", "STEP", "RESTARTS", "LOST")
_NUMBERS = ("NODES", "STEP", "RESTARTS", "LOST")
_COSTS = "detect_s", "down_s", "again_s", "recomputed_s"  # of a restart in result.json
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
    this cycle. LOST is what restarts have cost, of a job that runs without repeated work. "-" is not known. A line
    below says why a person should look, or what cannot be told.
    """
    place = where or log_dir()
    runs = [run for job in names_in(place) for run in runs_of(place / job)]
    runs.sort(key=_changed_at, reverse=True)
    if not runs and not as_json:
        click.echo(f"{place} holds no run")
        return
    now = time.time()
    found = [(run, observe(run, now)) for run in (runs if every else runs[:_RUNS_SHOWN])]
    if as_json:
        for run, seen in found:
            told = {"run": str(run), "code": seen.code, "verdict": seen.verdict, **seen.found}
            click.echo(json.dumps(told))
        return
    head, *rows = columns([_HEADS, *(_row(run, seen) for run, seen in found)], _NUMBERS)
    show(head, bold=True)
    for row, (_, seen) in zip(rows, found, strict=True):
        show(row, COLOURS[seen.code])
        if seen.code in (CANNOT_TELL, NEEDS_A_PERSON):
            show(f"  {seen.verdict}", COLOURS[seen.code], hang=4)


def _row(run: Path, seen: Seen) -> list[str]:
    """The cells of one run; what its files do not tell, or not so that it can be read, is unknown."""
    job = run.parent.name if run.name == "r0" else f"{run.parent.name}/{run.name}"
    result = seen.found.get("result")
    status: dict[str, Any] = seen.found.get("status") or {}
    with suppress(*DAMAGE):
        status = status or content(run)
    cells = [_short(job, _JOB_CHARS)]
    for cell in (_name, _state, _start, _nodes, _step, _restarts, _lost):
        try:
            cells.append(cell(status, result))
        except DAMAGE:
            cells.append(_UNKNOWN)
    return cells


def _short(text: str, most: int) -> str:
    """The end of a long text, in which jobs differ."""
    return text if len(text) <= most else f"~{text[1 - most :]}"


def _name(status: Any, result: Any) -> str:
    return str(status["job"]["name"])[:_NAME_CHARS] or _UNKNOWN


def _state(status: Any, result: Any) -> str:
    return str(status["state"]) if result is None else f"ended {int(result['code'])}"


def _start(status: Any, result: Any) -> str:
    at = float(status["began"]) if result is None else unix_s(result["started"])
    return time.strftime("%d %b %H:%M", time.localtime(at))


def _nodes(status: Any, result: Any) -> str:
    nodes = status["nodes"]
    active = int(nodes["active"]) or int(nodes["needed"])
    spare = int(nodes["spare"])
    return f"{active}+{spare}" if spare > 0 else str(active)


def _step(status: Any, result: Any) -> str:
    saved = status.get("checkpoint") or {}
    ranks = status.get("progress") or {}
    return str(int(saved["iteration"] if saved else ranks["steps"]))


def _restarts(status: Any, result: Any) -> str:
    if result is not None:
        return str(int(result["restarts_used"]))
    return f"{int(status['restarts']['used'])}/{int(status['restarts']['allowed'])}"


def _lost(status: Any, result: Any) -> str:
    if result is None:
        return in_words(float(status["restarts"]["down_s"]))
    return in_words(
        sum(float(one.get(name) or 0.0) for one in result["restarts"] for name in _COSTS)
    )


def _changed_at(run: Path) -> float:
    with suppress(OSError):
        return run.lstat().st_mtime
    return 0.0
