"""`nvrx why`: the story of a job, from its log tree alone: first cause, consequences, and what was done."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.cli.log_tree import MAX_RESULT_BYTES, find_run, title
from nvrx_slurm.core.coordinator.report import in_words
from nvrx_slurm.core.logs.printable import printable

_SAID = ("Say",)
_NOTES_SHOWN = 5


@click.command()
@click.argument("place", default="latest", callback=find_run)
def why(place: Path) -> None:
    """Tell why a job failed or restarted.

    PLACE is a job id, or the directory of a job or run (default: the latest run). An ended job is told from its
    result.json, a running one from the event logs of its coordinators.
    """
    result = place / "result.json"
    try:
        found = _read(result) if result.exists() else {}
        lines = [
            *(_of_result(found, place) if found else ()),
            *(_of_events(place, found) if "cycles" not in found else ()),
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise click.UsageError(f"{result} is not the result of a job: {error!r}") from None
    for line in lines:
        click.echo(printable(line.encode("utf-8", "replace")))


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(MAX_RESULT_BYTES))
        if isinstance(content, dict):
            return content
    except (OSError, ValueError, RecursionError) as error:
        raise click.UsageError(f"{path} cannot be read: {error}") from None
    raise click.UsageError(f"{path} is not the result of a job: it holds a {type(content).__name__}, not an object")


def _of_result(result: dict[str, Any], place: Path) -> Iterator[str]:
    duration = in_words(float(result.get("duration_s") or 0.0))
    yield f"{title(place)}: ended with code {result.get('code')} after {duration}: {result.get('reason')}"
    if result.get("ended_by"):
        yield f"ended by: {result['ended_by']}"
    if result.get("summary"):
        yield f"in short: {result['summary']}"
    for restart in result.get("restarts") or ():
        down = in_words(restart["down_s"])
        yield f"  {restart['time']}  cycle {restart['cycle']} failed, {down} down: {restart['cause']}"
    for note in (result.get("inprocess_restarts") or ())[-_NOTES_SHOWN:]:
        yield f"  cycle {note['cycle']} iteration {note['iteration']} was restarted in process: {note['why']}"
    cause = result.get("first_cause")
    if cause is not None:
        yield from _of_cause(cause)
        yield from _of_echoes(cause, result.get("last_faults") or ())
    for what in ("excluded_nodes", "lost_nodes", "spares_used"):
        if result.get(what):
            yield f"{what.replace('_', ' ')}: {', '.join(result[what])}"
    for report in sorted(place.glob("cycle_*/hang.json")):
        yield f"hang of {report.parent.name}: {report}"


def _of_cause(cause: dict[str, Any]) -> Iterator[str]:
    where = f"rank {cause['rank']} on node {cause['host']}" if cause["rank"] >= 0 else f"node {cause['host']}"
    yield f"first cause: {where}: {cause['kind']}: {cause['message']}"
    finding = cause.get("finding")
    if finding and finding["rule"]:
        yield f"  to blame: {finding['blame']} ({finding['confidence']}), rule {finding['rule']}: {finding['line']}"
    for name, key in (("at", "line"), ("log", "log")):
        if cause.get(key):
            yield f"  {name}: {cause[key]}"


def _of_echoes(cause: dict[str, Any], faults: Any) -> Iterator[str]:
    others = [fault for fault in faults if (fault["rank"], fault["host"]) != (cause["rank"], cause["host"])]
    for rule, count in Counter(fault.get("rule") or fault["kind"] for fault in others).most_common():
        yield f"  with it: {count} x {rule}"


def _of_events(place: Path, result: dict[str, Any]) -> Iterator[str]:
    """What the coordinators have said so far, oldest first."""
    logs = list((place / "events").glob("coordinator*.jsonl"))
    if not logs and not result:
        raise click.UsageError(f"{place} has neither result.json nor events; give the directory of a run")
    if not result:
        yield f"{title(place)}: no result.json: the job runs, or was killed; its coordinators said so far:"
    said: list[tuple[float, str]] = []
    for log in logs:
        with log.open(encoding="utf-8", errors="replace") as lines:
            said += [entry for line in lines for entry in _said(line)]
    began = min((wall for wall, _ in said), default=0.0)
    for wall, text in sorted(said):
        yield f"  +{wall - began:.1f}s  {text}"


def _said(line: str) -> Iterator[tuple[float, str]]:
    try:
        step = json.loads(line)
        commands = [command for command in step.get("commands", ()) if isinstance(command, dict)]
        for command in commands:
            if command.get("type") in _SAID:
                yield float(step["wall"]), str(command["text"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return  # a torn last line, as a killed program leaves it
