"""`nvrx status`: how a job is, from the files of its log tree. It sends no request, changes nothing.

What is read may be damaged, old, or of another version: then the answer is that this cannot be told.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

from nvrx_slurm.core import progress
from nvrx_slurm.core.needs import needs_a_person
from nvrx_slurm.core.words import in_words
from nvrx_slurm.system.foreign import document
from nvrx_slurm.views import complete
from nvrx_slurm.views.log_tree import RUN, find_run, result_of
from nvrx_slurm.views.screen import clock, show, show_all

VERSION = 1  # of status.json; see core.coordinator.status, which takes long to import
HEALTHY, CANNOT_TELL, NEEDS_A_PERSON, ENDED = range(4)  # exit codes
_MAX_BYTES = 1 << 20
_INCIDENTS_SHOWN, _RANKS_SHOWN = 5, 64
_WARMTHS_SHOWN, _HOSTS_SHOWN = 3, 3
PROGRESS = "progress    "  # begins the line of how far a job is
_HANG = 12  # columns before what a line says
COLOURS = {HEALTHY: "green", CANNOT_TELL: "yellow", NEEDS_A_PERSON: "red", ENDED: None}


class Seen(NamedTuple):
    """One run at one moment. `verdict`: a sentence; `head`: job and state; `lines`: what else there is to say."""

    code: int
    verdict: str
    head: str
    lines: tuple[str, ...] = ()
    found: dict[str, Any] = {}


@click.command()
@click.argument("place", default="latest", shell_complete=complete.jobs)
@click.option("--json", "as_json", is_flag=True, help="All that is known, as one line of JSON.")
@click.option("--ranks", is_flag=True, help="Also each node with its ranks.")
@click.option(
    "--watch", is_flag=False, flag_value=2.0, metavar="[S]", type=click.FloatRange(0.2, 600.0),
    help="Show it anew every S seconds (default: 2) until the job ends. Write PLACE before it.",
)  # fmt: skip
def status(place: str, as_json: bool, ranks: bool, watch: float | None) -> int:
    """Tell how a job is.

    PLACE is a job id, or the directory of a job or run (default: the latest run). Exit code: 0 it is healthy, 1 that
    cannot be told (also: its coordinator is silent), 2 a person should look at it, 3 it has ended.
    """
    redraws = watch is not None and sys.stdout.isatty() and not as_json
    while True:
        try:
            seen = observe(find_run(place), time.time(), ranks)
        except click.BadParameter as error:
            seen = Seen(CANNOT_TELL, f"cannot tell: {error.message}", place)
        if redraws:
            click.echo("\x1b[H\x1b[2J", nl=False)
        if as_json:
            click.echo(json.dumps({"code": seen.code, "verdict": seen.verdict, **seen.found}))
        else:
            _show(seen, redraws)
        if watch is None or seen.code == ENDED:
            return seen.code
        sys.stdout.flush()
        try:
            time.sleep(watch)
        except KeyboardInterrupt:
            return seen.code


# --- reading ----------------------------------------------------------------------------------------------------------


def observe(run: Path, now: float, ranks: bool = False) -> Seen:
    """How the run is at `now` (Unix seconds). `ranks`: also each node. Never raises for what the files hold."""
    try:
        if result := result_of(run):
            return _ended(run, result)
        if not (run / "status.json").exists():
            return Seen(
                CANNOT_TELL, "cannot tell: no coordinator has written a status yet", _name(run)
            )
        found = content(run)
        if found["version"] > VERSION:
            why = f"its status.json is of version {int(found['version'])}: use the nvrx of the job"
            return Seen(CANNOT_TELL, f"cannot tell: {why}", _name(run))
        return _told(run, found, now, ranks)
    except progress.DAMAGE as error:
        return Seen(
            CANNOT_TELL, f"cannot tell: {run} holds no readable status: {error!r:.200}", _name(run)
        )


def content(run: Path) -> dict[str, Any]:
    """What the status.json of a run holds. Raises OSError, ValueError."""
    return document(_MAX_BYTES, run, "status.json")


def _ended(run: Path, result: dict[str, Any]) -> Seen:
    code = int(result["code"])
    lasted = in_words(float(result.get("duration_s") or 0.0))
    by = str(result.get("ended_by") or result.get("summary") or "")
    verdict = f"ended with code {code} after {lasted}" + (f" ({by})" if by else "")
    told = tuple(f"reason      {line}" for line in str(result.get("reason") or "").splitlines()[:1])
    return Seen(ENDED, verdict, _name(run), told, {"result": result})


def _told(run: Path, found: dict[str, Any], now: float, ranks: bool) -> Seen:
    """What a status says. Ages are of the coordinator's clock, but for that of the status itself."""
    written = float(found["written"])
    silent_s = progress.SILENT * float(found["interval_s"])
    ahead_s = written - now
    age_s = max(0.0, now - written)
    found["age_s"] = age_s
    state_s = max(0.0, written - float(found["since"])) + age_s
    reasons = needs_a_person(found, state_s).values()
    lines = [*_lines(found, written, ranks)]
    if age_s > silent_s:
        code = CANNOT_TELL
        verdict = f"cannot tell: coordinator silent for {in_words(age_s)}"
        lines.insert(0, "before that:")
    elif ahead_s > silent_s:
        code = CANNOT_TELL
        verdict = f"cannot tell: the coordinator's clock is {in_words(ahead_s)} ahead of this one"
    elif reasons:
        code = NEEDS_A_PERSON
        verdict = f"needs a person: {'; '.join(reasons)}"
    else:
        code = HEALTHY
        verdict = "healthy"
    return Seen(
        code,
        verdict,
        f"{_name(run)}  {_head(found, written + age_s)}",
        tuple(lines),
        {"status": found},
    )


# --- in words ---------------------------------------------------------------------------------------------------------


def _name(run: Path) -> str:
    run = run.absolute()
    return f"job {run.parent.name} {run.name}" if RUN.fullmatch(run.name) else str(run)


def _head(found: dict[str, Any], at: float) -> str:
    job = found["job"]
    cycle = int(found["cycle"])
    who = ", ".join(filter(None, (job["user"], job["partition"])))
    name = " ".join(filter(None, (job["name"], f"({who}) " if who else "")))
    state = f"cycle {cycle}: {found['state']}" if cycle >= 0 else found["state"]
    in_all, here = (in_words(max(0.0, at - float(found[since]))) for since in ("began", "since"))
    return f"{name} {state} for {here} of {in_all}".strip()


def _lines(found: dict[str, Any], written: float, ranks: bool) -> Iterator[str]:
    nodes = found["nodes"]
    restarts = found["restarts"]
    ends = found["allocation_ends"]
    began = float(found["began"])
    if why := progress.waits(found, written):
        yield f"waits       {why}"
    if steps := ", ".join(progress.pace(found)):
        yield f"{PROGRESS}{steps}"
    kinds = {"active": "active", "spare": "spare"} if nodes["active"] else {"spare": "here"}
    kinds |= {"missing": "missing", "excluded": "excluded"}
    counts = ", ".join(f"{nodes[kind]} {what}" for kind, what in kinds.items())
    gone = ", ".join(
        f"{one['host']} {one['how']}"
        + (f" {clock(one['time'], began, written)}" if one["time"] is not None else "")
        for one in nodes["gone"][-3:]
    )
    yield f"nodes       {counts}" + (f"; {gone}" if gone else "")
    for text, hosts in list(_by_warmth(found["ranks"]).items())[:_WARMTHS_SHOWN]:
        more = f" and {len(hosts) - _HOSTS_SHOWN} more" if len(hosts) > _HOSTS_SHOWN else ""
        yield f"starts      {text} ({', '.join(hosts[:_HOSTS_SHOWN])}{more})"
    watched = {True: "; hangs are watched for", False: "; hangs are not watched for", None: ""}
    yield f"restarts    {restarts['used']} of {restarts['allowed']} used{watched[found['job']['hangs_watched']]}"
    if slow := found.get("slow"):
        signs = f"; {slow['signs']}" if slow["signs"] else ""
        yield f"slow        {slow['what']}; {in_words(float(slow['lost_s']))} lost{signs}"
    if checkpoint := found.get("checkpoint"):
        age = in_words(max(0.0, written - checkpoint["time"]))
        name = f" ({checkpoint['name']}), complete" if "name" in checkpoint else ""
        every = (
            f", one every {in_words(checkpoint['every_s'])}" if checkpoint.get("every_s") else ""
        )
        lost = (
            "; that work would be lost now"
            if "name" in checkpoint and found["state"] == "running"
            else ""
        )
        yield f"checkpoint  iteration {int(checkpoint['iteration'])}{name}, {age} old{every}{lost}"
        yield from (
            f"            {name} is torn: {why}" for name, why in checkpoint.get("torn", {}).items()
        )
    if ends:
        yield f"allocation  ends in {in_words(max(0.0, ends - written))}"
    if end := found["end"]:
        yield f"end         code {int(end['code'])}: {end['reason']}"
    for one in found["incidents"][-_INCIDENTS_SHOWN:]:
        rule = f" ({one['rule']})" if one["rule"] else ""
        done = "" if one["done"] == "restarted" else f", {one['done']}"
        cost = f"cycle {int(one['cycle'])}{done}, {in_words(one['down_s'])} down"
        yield f"{clock(one['time'], began, written)}  {one['cause']}{rule}; {cost}"
        if resumed := one.get("resumed"):
            yield f"            {resumed}"
    if ranks:
        yield from _ranks(found["ranks"], found.get("progress") or {})


def _warmths(nodes: dict[str, Any]) -> list[tuple[str, str]]:
    """Host, and how it starts ranks, of the active nodes and then of the spares. "": it has not told."""
    hosts = [*(row[0] for row in nodes["table"]), *nodes["spares"]]
    texts = nodes.get("warmth") or [""]
    numbers = nodes.get("warmth_of") or [0] * len(hosts)
    return [(host, texts[number]) for host, number in zip(hosts, numbers, strict=True)]


def _by_warmth(nodes: dict[str, Any]) -> dict[str, list[str]]:
    """The hosts that start ranks in the same way; those that cannot fork come first."""
    found: dict[str, list[str]] = {}
    for host, text in _warmths(nodes):
        if text:
            found.setdefault(text, []).append(host)
    return dict(sorted(found.items()))


def _ranks(nodes: dict[str, Any], told: dict[str, Any]) -> Iterator[str]:
    """Each node with its ranks, the spares at the end."""
    sections = {
        rank: f"{rank} in {name} for {in_words(age)}" for rank, name, age in told.get("open", ())
    }
    warmths = iter([text for _, text in _warmths(nodes)])  # of active nodes, then of spares
    rows = []
    for host, first, nproc, what in nodes["table"]:
        shown = range(first, first + min(nproc, _RANKS_SHOWN))
        inside = ", ".join(sections[rank] for rank in shown if rank in sections)
        rows.append([host, f"ranks {first}-{first + nproc - 1}", what, inside, next(warmths)])
    rows += [[host, "spare", next(warmths)] for host in nodes["spares"]]
    for cells in rows:
        yield "  ".join(filter(None, cells))


def _show(seen: Seen, redraws: bool) -> None:
    hang = None if redraws else _HANG
    show(seen.head, bold=True, hang=hang)
    show(seen.verdict, COLOURS[seen.code], bold=True, hang=hang)
    most = len(seen.lines)
    if redraws:
        most = max(1, shutil.get_terminal_size().lines - 3)
    show_all(seen.lines[:most], hang)
