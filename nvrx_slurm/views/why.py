"""`nvrx why`: the story of a job, from its log tree alone: first cause, blame, evidence, what was done, what to do."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core.account.figures import lost_s, lost_steps
from nvrx_slurm.core.attribution import named_node
from nvrx_slurm.core.attribution.fields import fields_of
from nvrx_slurm.core.attribution.matches import BETWEEN_LINES
from nvrx_slurm.core.attribution.raised import frames, raised_in
from nvrx_slurm.core.attribution.said import headline
from nvrx_slurm.core.attribution.verdict import owners_of
from nvrx_slurm.core.words import in_words, unix_s, utc
from nvrx_slurm.system.foreign import opened, size_of
from nvrx_slurm.types import Blame, FaultKind
from nvrx_slurm.views import complete
from nvrx_slurm.views.coordinator_logs import SAID, fault_of, logs_of
from nvrx_slurm.views.log_tree import began_s, result_of, title, written_by_others
from nvrx_slurm.views.screen import clock, show

_NOTES_SHOWN = 5
# of a log whose lines are counted; of it at once
_MOST_LOG_BYTES, _PIECE_BYTES = 256 << 20, 1 << 20
_MATCH_CHARS = 200
_LIBRARIES = re.compile(r".*(?:site-packages|dist-packages|/lib/python[\d.]+)/")
_COLOURS = {"first cause": "red", "what to do": "green"}


@click.command()
@complete.place
@click.option("--json", "as_json", is_flag=True, help="The same, and all of it, as JSON.")
def why(place: Path, as_json: bool) -> None:
    """Tell why a job failed or restarted.

    PLACE is a job id, or the directory of a job or run (default: the latest run). An ended job is told from its
    result.json, a running one from the event logs of its coordinators.
    """
    result, found = place / "result.json", result_of(place)
    if not found and os.path.lexists(result):
        raise click.UsageError(
            f"{result} is not the result of a job: it holds no JSON object that can be read"
        )
    with written_by_others(result if found else place):
        story = _story(found, place) if found else {}
        if "cycles" not in found:
            story["said"] = _of_events(place, found)
        lines = [] if as_json else list(_in_words(story, place))
    if as_json:
        return click.echo(json.dumps(story, indent=1))
    for number, line in enumerate(lines):
        show(line, _COLOURS.get(line.partition(":")[0]), bold=number == 0, hang=4)


# --- what is known ----------------------------------------------------------------------------------------------------


def _story(result: dict[str, Any], place: Path) -> dict[str, Any]:
    """All that there is to say about an ended job, each thing once."""
    cause, reason = result.get("first_cause"), str(result.get("reason"))
    story: dict[str, Any] = {
        "code": result.get("code"),
        "lasted_s": float(result.get("duration_s") or 0.0),
    }
    story["ended_by"], story["summary"] = result.get("ended_by") or "", result.get("summary") or ""
    same = ""
    if cause is not None:
        same = headline(fault_of({**cause, "finding": None}))
        reason = reason.replace(same, "").strip(";: ")
        story |= _of_cause(cause, result.get("last_faults") or (), place)
    story["reason"] = reason
    told = {"", story.get("what_happened"), same}
    story["restarts"] = [
        {
            "time": one["time"],
            "at_s": float(one.get("at_s") or 0.0),
            "cycle": one["cycle"],
            "lost_s": lost_s(one),
            "lost_steps": lost_steps(one),
            "cause": "" if one["cause"] in told else one["cause"],
            "elsewhere": bool(one.get("elsewhere")),
        }
        for one in result.get("restarts") or ()
    ]
    story["inprocess_restarts"] = list(result.get("inprocess_restarts") or ())
    story |= {
        what: list(result.get(what) or ())
        for what in ("excluded_nodes", "lost_nodes", "spares_used")
    }
    story["hangs"] = [str(report) for report in sorted(place.glob("cycle_*/hang.json"))]
    return story


def _of_cause(cause: dict[str, Any], faults: Any, place: Path) -> dict[str, Any]:
    finding = cause.get("finding") or {}
    line, others = (
        str(finding.get("line") or ""),
        [fault for fault in faults if _where(fault) != _where(cause)],
    )
    return {
        "what_happened": _what_happened(cause, finding, line),
        "kind": cause["kind"],
        "rank": cause["rank"],
        "node": cause["host"],
        "class": cause.get("class", ""),
        "rule": finding.get("rule", ""),
        "blame": finding.get("blame", ""),
        "confidence": finding.get("confidence", ""),
        "rests_on": finding.get("rests_on", ""),
        "line": line,
        "fields": fields_of(line),
        "names_node": finding.get("node", ""),
        "log": cause.get("log", ""),
        "log_line": _number_of(line.rpartition(BETWEEN_LINES)[2], place, str(cause.get("log", ""))),
        "code_line": cause.get("line", ""),
        "with_it": dict(
            Counter(fault.get("rule") or fault["kind"] for fault in others).most_common()
        ),
        "what_to_do": cause.get("what_to_do", ""),
    }


def _what_happened(cause: dict[str, Any], finding: dict[str, Any], line: str) -> str:
    """What a rule knows of its end goes first, then how it ended; without a rule its last lines come last."""
    message = _exception(str(cause["message"]), finding, str(cause.get("traceback", "")))
    is_exit = cause["kind"] == FaultKind.EXIT.value
    ended = f"exit code {cause.get('exit_code')}" if is_exit else str(cause["kind"])
    if not line:
        return message or (f"{ended}, without an exception" if is_exit else ended)
    if finding.get("rests_on") == "exit":
        return f"{message or ended}; it last wrote: {line}"
    if message and (line in message or message in line):
        return max(message, line, key=len)
    return f"{line}; {message}" if message else f"{line} ({ended})"


def _exception(message: str, finding: dict[str, Any], traceback: str) -> str:
    """The message, with its second line where the first one announces that, and the library that tells its meaning."""
    raised = raised_in(traceback)
    details = raised.details if raised is not None else ()
    if message.endswith(":") and details:
        message = f"{message} {details[0].strip()}"
    place = frames(traceback) if finding.get("rests_on") == "frame" else ()
    return f"{message} (raised in {_LIBRARIES.sub('', place[0][0])})" if place else message


def _where(fault: dict[str, Any]) -> tuple[int, str]:
    return fault["rank"], fault["host"]


def _number_of(line: str, run: Path, log: str) -> int:
    """The number of the last line of a log of the run that holds `line`, from 1; 0 where that cannot be told."""
    wanted = line[:_MATCH_CHARS].encode("utf-8", "replace")
    text = b""
    number = 1
    last = 0
    try:
        # cycle, node, rank: the tree may have been moved
        with opened(run, *Path(log).parts[-3:]) as file:
            size = size_of(file)
            # a log that grows faster than it is read has no end: only its present size is read
            left = size if wanted and size <= _MOST_LOG_BYTES else 0
            while left > 0 and (piece := file.read(_PIECE_BYTES)):
                left -= len(piece)
                text += piece
                if (at := text.rfind(wanted)) >= 0:
                    last = number + text.count(b"\n", 0, at)
                end = max(0, len(text) - len(wanted))
                number += text.count(b"\n", 0, end)
                text = text[end:]
    except (OSError, ValueError, LookupError):
        return 0  # it lay on the node, or is gone
    return last


def _of_events(place: Path, result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the coordinators have said so far, oldest first."""
    logs = logs_of(place)
    if not logs and not result:
        if any((place / "events").glob("*.jsonl")):
            raise click.UsageError(f"the event logs in {place} cannot be read, or have no step yet")
        raise click.UsageError(
            f"{place} has neither result.json nor events; give the directory of a run"
        )
    said = sorted(
        (found.wall_s, found.value) for log in logs for found in log.find(SAID, log.begin, log.size)
    )
    began = began_s(place, said[0][0] if said else 0.0)
    return [
        {"time": utc(wall), "after_s": round(wall - began, 1), "text": text} for wall, text in said
    ]


# --- in words ---------------------------------------------------------------------------------------------------------


def _in_words(story: dict[str, Any], place: Path) -> Iterator[str]:
    if "code" in story:
        reason = f": {story['reason']}" if story["reason"] else ""
        yield f"{title(place)}: ended with code {story['code']} after {in_words(story['lasted_s'])}{reason}"
        if "what_happened" in story:
            yield from _of_blame(story)
        yield from _done(story)
        if story.get("what_to_do"):
            yield f"what to do: {story['what_to_do']}"
    elif "said" in story:
        yield f"{title(place)}: no result.json: the job runs, or was killed; its coordinators said so far:"
    for said in story.get("said", ()):
        at = unix_s(said["time"])
        first, *more = said["text"].splitlines() or [""]
        yield f"  {clock(at, at - said['after_s'], time.time())}  {first}"
        yield from (f"    {line}" for line in more)


def _of_blame(story: dict[str, Any]) -> Iterator[str]:
    where = (
        f"rank {story['rank']} on node {story['node']}"
        if story["rank"] >= 0
        else f"node {story['node']}"
    )
    yield f"first cause: {story['what_happened']}"
    if story["rule"]:
        owners = " or ".join(one.value for one in owners_of(story["rule"], Blame(story["blame"])))
        blame = named_node.in_words(story["names_node"]) if story["names_node"] else owners
        yield f"to blame: {blame} ({story['confidence']}), by rule {story['rule']}"
    elif story["blame"]:
        yield f"to blame: {story['blame']}; no rule knows this end"
    yield f"evidence: {where}, {story['kind']}"
    if story["line"] and story["line"] not in story["what_happened"]:
        yield f"  line: {story['line']}"
    if story["log"]:
        yield f"  log: {story['log']}" + (f":{story['log_line']}" if story["log_line"] else "")
    if story["code_line"]:
        yield f"  at: {story['code_line']}"
    for rule, count in story["with_it"].items():
        yield f"  with it: {count} x {rule}"


def _done(story: dict[str, Any]) -> Iterator[str]:
    done = [story["ended_by"]] if story["ended_by"] else []
    for one in story["restarts"]:
        why = (f": {one['cause']}" if one["cause"] else " for this") + (
            "; then on other nodes" * one["elsewhere"]
        )
        steps = "" if one["lost_steps"] is None else f"{one['lost_steps']} steps and "
        at = unix_s(one["time"])
        when = clock(at, at - one["at_s"], time.time())
        done.append(
            f"{when}  cycle {one['cycle']} failed, {steps}{in_words(one['lost_s'])} lost{why}"
        )
    for note in story["inprocess_restarts"][-_NOTES_SHOWN:]:
        done.append(
            f"cycle {note['cycle']} iteration {note['iteration']} was restarted in process: {note['why']}"
        )
    for what in ("excluded_nodes", "lost_nodes", "spares_used"):
        if story[what]:
            done.append(f"{what.replace('_', ' ')}: {', '.join(story[what])}")
    done += [f"compared the ranks that hung: {report}" for report in story["hangs"]]
    if done or story["summary"]:
        yield f"what was done: {story['summary']}".rstrip()
    yield from (f"  {line}" for line in done)
