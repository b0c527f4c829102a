"""`nvrx report`: what happened to a job, as one HTML file with pictures. It only reads the files of the job.

The facts are those of `nvrx why`, `status` and `goodput`: result.json, or the event logs of a job that has none.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import click

from nvrx_slurm.core.account.account import BUCKETS, SECTION
from nvrx_slurm.core.account.figures import lost_s, lost_steps
from nvrx_slurm.core.attribution.hang import RULE as HANG_RULE
from nvrx_slurm.core.attribution.hang import place
from nvrx_slurm.core.attribution.said import headline, what_to_do
from nvrx_slurm.core.progress import pace
from nvrx_slurm.core.redact import without_secrets
from nvrx_slurm.core.words import in_words, unix_s
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.system.foreign import document
from nvrx_slurm.types import (
    Blame,
    Confidence,
    FaultKind,
    Finding,
    LineRole,
    RankEvidence,
    Remedy,
)
from nvrx_slurm.views import complete, timeline
from nvrx_slurm.views.coordinator_logs import (
    Cycle,
    counted_in,
    cycles_in,
    fault_of,
    first_fault,
    logs_of,
)
from nvrx_slurm.views.goodput import of_events
from nvrx_slurm.views.html import IN_FULL, page
from nvrx_slurm.views.log_tree import (
    DAMAGE,
    RUN,
    result_of,
    status_of,
    written_by_others,
)
from nvrx_slurm.views.status import HEALTHY, NEEDS_A_PERSON, observe
from nvrx_slurm.views.summary import summary
from nvrx_slurm.views.timeline import CyclePlan, Incident, ReportFacts, Stretch

_MOST_LINES, _MOST_SAID, _MOST_PLACES, _MOST_RANKS = 12, 12, 12, 16
# of a hang.json; of a job of many ranks it has more, and the verdict is told without it
_MOST_HANG_BYTES = 4 << 20
_NOT_KNOWN = LineRole.UNCLEAR, Blame.UNKNOWN, Confidence.GUESS, Remedy.NONE
_STARTED: dict[object, str] = {True: "forked", False: "executed"}
_UNSEEN = Cycle(-1, 0.0, {}, [], [])
Stretches = Mapping[int, Sequence[Stretch]]
_CSS = Path(__file__).with_suffix(".css")


@click.command()
@complete.place
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write it (default: nvrx_report_JOB_RUN.html in this directory).",
)
def report(place: Path, output: Path | None) -> None:
    """Write what happened to a job as one HTML file, with pictures and their tables.

    PLACE is a job id, or the directory of a job or run (default: the latest run), of which result.json or the event
    logs of its coordinators are left. The page has no script, needs no network, and holds nothing that looks like a
    secret.
    """
    if not place.is_dir():
        raise click.UsageError(f"{place} is a file; give a job id, or the directory of a run")
    place = place.absolute()
    name = f"{place.parent.name}_{place.name}" if RUN.fullmatch(place.name) else place.name
    output = output or Path(f"nvrx_report_{name}.html")
    with written_by_others(place):
        text = page(facts_of(place), _CSS.read_text())
    try:
        write_atomic(output, text.encode("utf-8", "replace"))
    except OSError as error:
        raise click.UsageError(
            f"{output} cannot be written: {error.strerror}; choose another --output"
        ) from None
    click.echo(output.absolute())


def facts_of(run: Path) -> ReportFacts:
    """All that the page shows. Raises click.UsageError where nothing is known, errors of DAMAGE for strange files."""
    cycles = cycles_in(logs := logs_of(run))
    counted = counted_in(logs)
    status = status_of(run)
    told = of_events(logs, cycles, counted, status)
    result = result_of(run)
    known = told | result
    if not known.get("account"):
        raise click.UsageError(
            f"{run} has neither the account of a job nor a plan in its event logs: nothing is known"
        )
    restarts = {
        int(one["cycle"]): one for one in (*told.get("restarts", ()), *result.get("restarts", ()))
    }
    known["restarts"] = [restarts[cycle] for cycle in sorted(restarts)]
    nodes = {node["node_id"]: node for cycle in cycles for node in cycle.nodes()}
    keys = {
        name: str(node["infra_rank"]) if node["infra_rank"] >= 0 else name
        for name, node in nodes.items()
    }
    plans = [*_plans(cycles, counted, keys)]
    wall_s = float(known["duration_s"])
    began = [float(cycle.plan["history"]["began_s"]) for cycle in cycles[1:]]
    began_s = began[-1] if began else unix_s(known["ended"]) - wall_s
    found = timeline.stretches(plans, known["restarts"], known["account"]["node_seconds"], wall_s)
    shown = [*known["restarts"], *_end_of(known)]
    seen = {cycle.number: cycle for cycle in cycles}
    incidents = tuple(
        _incident(run, number, one, seen, began_s, found, number > len(shown) - IN_FULL)
        for number, one in enumerate(shown, 1)
    )
    known["faults"] = [
        *(known.get("faults") or ()),
        *told.get("faults", ()),
    ]  # the first one of a cycle counts
    lost_at = {cycle: float(one["at_s"]) for cycle, one in restarts.items()}
    lost = {str(host) for host in known.get("lost_nodes") or ()}
    hosts = {keys[name]: str(node["host"]) for name, node in nodes.items()}
    numbers = summary([known], began_s, began_s + wall_s)
    nodes_lost = {key for key, host in hosts.items() if host in lost}
    per_node = [_apart(node, nodes_lost) for node in known["account"]["nodes"]]
    away = {str(node["node"]): node["seconds"].get(timeline.LOST, 0.0) for node in per_node}
    if away_s := sum(away.values()):
        numbers["node_seconds"] = lost_apart(numbers["node_seconds"], away_s)
    last = status.get("checkpoint") or {"iteration": -1}
    reached = {"cycle": max(found), "at_s": wall_s, "checkpoint": -1, **last}
    ends = [*known["restarts"], *([] if max(found) in restarts else [reached])]
    job = f"job {run.parent.name}, run {run.name}"
    return ReportFacts(
        f"nvrx report · {job if RUN.fullmatch(run.name) else run}",
        without_secrets(str((status.get("job") or {}).get("command", ""))),
        _sentence(run, known, numbers) + ("" if "code" in known else _steps(status)),
        began_s,
        wall_s,
        tuple(one for some in found.values() for one in some),
        timeline.node_rows(
            plans, hosts, lost_at, lost, {key: wall_s - s for key, s in away.items() if s}
        ),
        tuple(per_node),
        incidents,
        tuple(timeline.paces(found, ends)),
        numbers,
        f"Made by nvrx report from {run}",
    )


def _apart(node: Mapping[str, Any], lost: Collection[str]) -> Mapping[str, Any]:
    """What the account calls excluded, as lost where the node was."""
    if node["node"] not in lost or timeline.EXCLUDED not in node["seconds"]:
        return node
    seconds = dict(node["seconds"])
    seconds[timeline.LOST] = seconds.pop(timeline.EXCLUDED)
    return {**node, "seconds": seconds}


def lost_apart(seconds: Mapping[str, float], away_s: float) -> dict[str, float]:
    """Node-seconds by bucket, of which `away_s` of excluded ones are those of lost nodes."""
    found = {**seconds, timeline.LOST: away_s}
    found[timeline.EXCLUDED] -= away_s
    return {bucket: took_s for bucket, took_s in found.items() if took_s > 0.005}


# --- what was planned -------------------------------------------------------------------------------------------------


def _plans(
    cycles: Sequence[Cycle], counted: Mapping[int, Mapping[str, Any]], keys: Mapping[str, str]
) -> Iterator[CyclePlan]:
    """The plans of a run. Only what is new in a plan is looked at: it may have gone to thousands of nodes."""

    def role_of(one: str) -> tuple[str, str]:
        name, rank, _ = one.rsplit(" ", 2)
        return keys.get(name, name), timeline.ACTIVE if int(rank) >= 0 else timeline.SPARE

    before = list[list[str]]()
    who = frozenset[str]()
    roles = dict[str, str]()
    active = 0
    buckets = Counter[str]()
    began_s = cycles[1].plan["history"]["began_s"] if cycles[1:] else 0.0
    for cycle in cycles[1:]:
        changed = dict[str, str]()
        if cycle.to != before:
            before = cycle.to
            old = who
            who = frozenset(chain.from_iterable(cycle.to))
            told = {key: timeline.EXCLUDED for key, _ in map(role_of, old - who)}
            told |= dict(sorted(map(role_of, who - old), key=lambda one: one[1] == timeline.ACTIVE))
            changed = {key: role for key, role in told.items() if roles.get(key) != role}
            roles |= changed
            active = Counter(roles.values())[timeline.ACTIVE]
        at_s = cycle.wall_s - float(began_s or cycles[0].wall_s)
        if account := counted.get(cycle.number, {}).get("account"):
            nodes = account["nodes"]
            at_s = float(account["wall_s"])
            sums = map(sum, zip(*(node["seconds"] for node in nodes), strict=True))
            buckets = Counter(dict(zip(BUCKETS, sums, strict=False)))
            for section in (section for node in nodes for section in node["sections"]):
                buckets[f"{SECTION}{section['name']}"] += section["took_s"]
        yield CyclePlan(cycle.number, at_s, buckets, active, changed)


def _end_of(known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The failure that ended the job, in the form of a restart; nothing where a restart that failed tells it."""
    cause = known.get("first_cause")
    last = known.get("last_faults") or ()
    if known.get("code") and cause:
        cycle = int(last[0]["cycle"]) if last else int(known["cycles"]) - 1
        restarts = [one for one in known["restarts"] if int(one["cycle"]) == cycle]
        at_s = min((float(fault["at_s"]) for fault in last), default=float(known["duration_s"]))
        end = {
            "cycle": cycle,
            "at_s": at_s,
            "cause": headline(fault_of(cause)),
            "first": cause,
            "ends": True,
        }
        same = {name: cause[name] for name in ("host", "rank", "infra_rank")}
        yield from [] if restarts else [{**same, **end}]
        for one in restarts:
            one.update(end)


# --- what is known of an incident -------------------------------------------------------------------------------------


def _incident(
    run: Path,
    number: int,
    one: Mapping[str, Any],
    cycles: Mapping[int, Cycle],
    began_s: float,
    found: Stretches,
    full: bool,
) -> Incident:
    """An incident with what result.json (`first`, of the failure that ended the job), events and hang.json say of it;
    `full`: also with the lines of logs."""
    cycle = int(one["cycle"])
    rank = int(one.get("rank", -1))
    seen = cycles.get(cycle, _UNSEEN)
    following = cycles.get(cycle + 1, _UNSEEN)
    first = first_fault(seen, one)
    known = bool(first["kind"])
    fault = fault_of({**first, "kind": first["kind"] or "exit"})
    hung = fault.kind is FaultKind.HANG
    finding = fault.finding or Finding(HANG_RULE if hung else "", *_NOT_KNOWN)
    lines = [finding.line, *fault.traceback.splitlines()[-_MOST_LINES:]]
    said = [*seen.said().items()] if full else []
    evidence = without_secrets(
        "\n".join(dict.fromkeys(line for line in lines if full and line.strip()))
    )
    return Incident(
        number,
        cycle,
        float(one["at_s"]),
        without_secrets(str(one["cause"])),
        str(one.get("host") or ""),
        str(one.get("infra_rank", "")),
        rank,
        timeline.phases(found, cycle),
        lost_s(one),
        lost_steps(one),
        said=tuple((at_s - began_s, without_secrets(line)) for line, at_s in said[-_MOST_SAID:]),
        rule=finding.rule,
        blame=f"{finding.blame.value} ({finding.confidence.value})"
        if fault.finding and finding.rule
        else "",
        lines=tuple(evidence.splitlines()),
        log=fault.log,
        waits=tuple(_waits(run, cycle)) if hung and full else (),
        advice=what_to_do(fault) if known else "",
        again=_STARTED.get(following.plan.get("forked"), ""),
        ends=bool(one.get("ends")),
        resumed=without_secrets(str(one.get("resumed") or "")),
    )


def _waits(run: Path, cycle: int) -> Iterator[tuple[str, str]]:
    """Where ranks waited as one hung, and which ones: the places of most ranks first."""
    try:
        ranks = document(_MOST_HANG_BYTES, run, f"cycle_{cycle}", "hang.json")["ranks"]
        where = defaultdict[str, list[int]](list)
        for one in ranks:
            at = place(
                RankEvidence(int(one["rank"]), -1, "", frames=tuple(map(str, one["frames"])))
            )
            where[at or f"no stack, process state {one['state']}"].append(int(one["rank"]))
    except DAMAGE:
        return
    for at, some in sorted(where.items(), key=lambda found: -len(found[1]))[:_MOST_PLACES]:
        more = f" and {len(some) - _MOST_RANKS} more" if len(some) > _MOST_RANKS else ""
        yield ", ".join(map(str, sorted(some)[:_MOST_RANKS])) + more, at


# --- in words ---------------------------------------------------------------------------------------------------------


def _steps(status: Mapping[str, Any]) -> str:
    """What the ranks told last; nothing where the status is damaged."""
    with suppress(*DAMAGE):
        if status["progress"]:
            return f" Steps: {', '.join(pace({**status, 'allocation_ends': 0.0}))}."
    return ""


def _sentence(run: Path, known: Mapping[str, Any], numbers: Mapping[str, Any]) -> str:
    lasted = in_words(float(known["duration_s"]))
    if "code" in known:
        how = "finished" if known["code"] == 0 else f"ended with code {known['code']}"
        why = (
            f" First cause: {headline(fault_of(known['first_cause']))}."
            if known.get("first_cause")
            else ""
        )
        # the tiles have the shares, of all nodes and of those that trained
        told = re.sub(r", [\d.]+ % productive$", "", str(known.get("summary") or ""))
        return f"The job {how} after {lasted}: {told or 'no fault was seen'}.{why}"
    seen = observe(run, time.time())
    runs = (
        "The job runs" if seen.code in (HEALTHY, NEEDS_A_PERSON) else "The job has left no result"
    )
    restarts = f"{numbers['restarts']} restarts, which cost {in_words(numbers['lost_s'])}"
    return f"{runs}. Its logs reach to {lasted} and tell {restarts}. Status: {seen.verdict.partition('; before')[0]}."
