"""`nvrx goodput`: how much of the allocation trained, what was lost to what, and what would cost less."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import click

from nvrx_slurm.codec import from_plain
from nvrx_slurm.core.account.account import BUCKETS, Role
from nvrx_slurm.core.account.figures import priced, to_json
from nvrx_slurm.core.attribution.hang import RULE as HANG_RULE
from nvrx_slurm.core.progress import DAMAGE
from nvrx_slurm.core.words import in_words, unix_s, utc
from nvrx_slurm.declared import plain, replace
from nvrx_slurm.system.foreign import first_bytes, names_in
from nvrx_slurm.types import Account, Counted, CycleCost, NodeTime, RestartRecord
from nvrx_slurm.views import complete
from nvrx_slurm.views.coordinator_logs import (
    CoordinatorLog,
    Cycle,
    coordinators_of,
    counted_in,
    cycles_in,
    first_fault,
    logs_of,
)
from nvrx_slurm.views.log_tree import (
    RUN,
    closed,
    find_run,
    log_dir,
    result_of,
    runs_of,
    status_of,
    written_by_others,
)
from nvrx_slurm.views.screen import columns, period_s, show
from nvrx_slurm.views.summary import in_lines, summary

_CHAIN_BYTES = 1 << 20


def _since(ctx: object, param: object, text: str | None) -> float | None:
    """Seconds."""
    since_s = period_s(text or "")
    if text is not None and not since_s:
        raise click.BadParameter(f"{text!r} is no period; write 12h, 7d or 4w")
    return since_s


@click.command()
@click.argument("places", nargs=-1, metavar="[JOB|RUN]...", shell_complete=complete.jobs)
@click.option(
    "--since",
    metavar="PERIOD",
    callback=_since,
    help="All jobs that ended within 12h, 7d or 4w, one a line.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as JSON.")
def goodput(places: tuple[str, ...], since: float | None, as_json: bool) -> None:
    """Tell where the time of a job went: how much of it trained, what was lost, and what would cost less.

    A job counts with all its runs (r0, r1, ...; default: the latest job); several jobs, or the chain_* file of
    nvrx submit --chain, count as one chain. With
    --since each job of the log directory has a line. docs/reference/buckets.md defines each number.
    """
    if since is not None and places:
        raise click.UsageError(
            "--since is about all jobs of the log directory; name no job with it"
        )
    if since is None:
        runs = [run for place in places or ("latest",) for run in _runs(place)]
        if not runs:
            raise click.UsageError(f"{', '.join(places)} names no run that is here")
        names = list(dict.fromkeys(run.absolute().parent.name for run in runs))
        with written_by_others(runs[0].parent):
            found = _summary(runs)
            shown = [
                *in_lines(
                    f"job {names[0]}" if len(names) == 1 else f"jobs {', '.join(names)}", found
                )
            ]
    else:
        found, shown = _of_each(_jobs(time.time() - since))
        if hidden := closed(log_dir()):
            click.echo(hidden, err=True)
    if as_json:
        return click.echo(json.dumps(found, indent=1))
    for number, line in enumerate(shown):
        advice = line.lstrip().startswith("advice:")
        show(line, "yellow" if advice else None, bold=number == 0, hang=None if since else 4)


def _runs(place: str) -> list[Path]:
    links = log_dir() / place
    # of nvrx submit --chain: the ids of its jobs
    if links.name.startswith("chain_") and links.is_file():
        jobs = first_bytes(links, _CHAIN_BYTES).decode("ascii", "replace").split()
        return [run for job in jobs if job.isdecimal() for run in runs_of(log_dir() / job)]
    run = find_run(place)
    if not run.is_dir():
        raise click.UsageError(f"{place} is a file; give a job id, or the directory of a run")
    if RUN.fullmatch(Path(place).name) or not RUN.fullmatch(run.name):
        return [run]
    return runs_of(run.parent)


def _jobs(begin_s: float) -> dict[Path, list[Path]]:
    """Jobs with a run that wrote its result, or its last event, after `begin_s`."""
    found: dict[Path, list[Path]] = {}
    for job in (log_dir() / name for name in sorted(names_in(log_dir()))):
        runs = runs_of(job)
        if any(_changed_s(run) >= begin_s for run in runs) and not job.is_symlink():
            found[job] = runs
    return found


def _changed_s(run: Path) -> float:
    changed_s = [0.0]
    for name in ("result.json", *(f"events/{name}" for name in coordinators_of(run))):
        with suppress(OSError):  # it is not there, or is gone
            changed_s.append((run / name).lstat().st_mtime)
    return max(changed_s)


def _user(job: Path) -> str:
    try:
        return job.owner()
    except (KeyError, OSError):
        return "unknown"


def _summary(runs: Sequence[Path]) -> dict[str, Any]:
    """Raises click.UsageError, or an error of DAMAGE."""
    results = [_known(run) for run in runs]
    starts = []
    ends = []
    for result in results:
        queue_s, before_s = (
            (result.get("account") or {}).get(name) or 0.0 for name in ("queue_s", "before_s")
        )
        try:
            ended_s = unix_s(result.get("ended"))
            began_s = ended_s - float(result.get("duration_s") or 0.0)
        except (TypeError, ValueError):
            continue
        starts.append(began_s - queue_s - before_s)
        ends.append(ended_s)
    if not starts:
        raise click.UsageError(
            f"{runs[0]} has neither a result.json nor a plan in its event logs: nothing is known"
        )
    return {"schema": 1, **summary(results, min(starts), max(ends))}


def _known(run: Path) -> dict[str, Any]:
    """The result of a run, with causes that only its event logs know: those of earlier coordinators, or all."""
    result = result_of(run)
    causes = {fault["cycle"] for fault in result.get("faults") or ()}
    if result and all(one["cycle"] in causes for one in result.get("restarts") or ()):
        return result
    logs = logs_of(run)
    told = of_events(logs, cycles_in(logs), counted_in(logs), status_of(run))
    return told | result | {"faults": [*(result.get("faults") or ()), *told.get("faults", ())]}


def _of_each(jobs: dict[Path, list[Path]]) -> tuple[dict[str, Any], list[str]]:
    """What is known of each job, and a line of it: the dearest first, and last those that cannot be read."""
    told = dict[str, Any]()
    unreadable = dict[str, str]()
    rows = list[tuple[float, list[str]]]()
    for job, runs in jobs.items():
        try:
            with written_by_others(job):
                found = _summary(runs) | {"user": _user(job)}
                rows.append((sum(found["node_seconds"].values()), _row(job.name, found)))
                told[job.name] = found
        except click.UsageError as error:
            unreadable[job.name] = error.message
    cells = [row for _, row in sorted(rows, key=lambda one: -one[0])]
    bad = [f"{name}  {why}" for name, why in unreadable.items()]
    lines = columns([_HEADS, *cells], _NUMBERS)
    return {"schema": 1, "jobs": told, "unreadable": unreadable}, [*lines, *bad]


_HEADS = ["job", "user", "wall", "ETTR", "share", "restarts", "lost", "most by"]
_NUMBERS = ("wall", "ETTR", "share", "restarts", "lost")


def _row(job: str, found: dict[str, Any]) -> list[str]:
    known = (found[name] for name in ("job_ettr", "productive_share"))
    ratios = ["-" if ratio is None else f"{100 * ratio:.1f} %" for ratio in known]
    most = found["by_cause"][0]["kind"] if found["by_cause"] else ""
    wall = in_words(found["wall_s"])
    lost = in_words(found["lost_s"])
    return [job, found["user"], wall, *ratios, str(found["restarts"]), lost, most]


# --- a run that has left no result ------------------------------------------------------------------------------------


class _Passed(NamedTuple):
    """What has passed since the last plan. `wall_s`: of the job, until then; the others are node-seconds."""

    wall_s: float
    allocated_s: float
    productive_s: float


def _passed(status: Mapping[str, Any], counted_s: float) -> _Passed | None:
    """What status.json estimates; None: it is of another plan, or no rank has told of a step, which says little."""
    try:
        told = status["account"]
        paced = status.get("progress")
        begins = paced and not paced["stepped"]
        if begins or told["counted_s"] != round(counted_s, 6):
            return None
        before = told["node_seconds"]
        return _Passed(
            status["written"] - status["began"],
            told["allocated_s"] - sum(before.values()),
            told["productive_s"] - before["productive"],
        )
    except DAMAGE:
        return None


# where the time since the last plan went, but for what was trained
_REST = {
    Role.ACTIVE: "other",
    Role.AWAY: "wait_nodes",
    Role.HERE: "spare_idle",
    Role.OUT: "excluded",
}


def _until_now(counted: Account, passed: _Passed, cycle: Cycle) -> Account:
    """The account with what has passed since the plan of this cycle, the last one."""
    since_s = max(0.0, passed.wall_s - counted.wall_s)
    trained_s = passed.productive_s / (cycle.plan.get("active_nodes") or 1)
    spares = len({one for some in cycle.to for one in some if one.endswith(" -1 -1")})
    roles = [Role(node.role) for node in counted.nodes if node.key]
    # of nodes that are not told one by one
    others_trained_s = passed.productive_s - trained_s * roles.count(Role.ACTIVE)
    others_idle_s = since_s * max(0, spares - roles.count(Role.HERE))
    others_s = passed.allocated_s - since_s * len(roles) - others_idle_s

    def filled(node: NodeTime) -> NodeTime:
        took = dict(zip(BUCKETS, node.seconds, strict=True))
        role = Role(node.role)
        left_s = since_s
        trains_s = trained_s if role is Role.ACTIVE else 0.0
        if not node.key:
            role = Role.ACTIVE
            left_s = others_s
            trains_s = others_trained_s
            took["spare_idle"] += others_idle_s
        took["productive"] += trains_s
        took[_REST[role]] += left_s - trains_s
        return replace(node, seconds=tuple(took.values()))

    return replace(
        counted,
        wall_s=passed.wall_s,
        productive_s=counted.productive_s + trained_s,
        nodes=tuple(map(filled, counted.nodes)),
        estimated=(*counted.estimated, *["productive"] * (trained_s > 0.0)),
    )


def of_events(
    logs: Sequence[CoordinatorLog],
    cycles: Sequence[Cycle],
    counted: Mapping[int, Mapping[str, Any]],
    status: Mapping[str, Any],
) -> dict[str, Any]:
    """The account and all restarts, as in a result.json; {} where there is no account. "rest" of the account: whether
    `status` has estimated the time since the last plan; else all time since then, until the last event, is "other"."""
    if not counted:
        return {}
    known = from_plain(
        max(counted.values(), key=lambda one: float(one["account"]["wall_s"])), Counted
    )
    costs = {int(cost["cycle"]): cost for one in counted.values() for cost in one["costs"]}
    told = [cycle.plan["history"] for cycle in cycles if cycle.plan]
    began_s = max((float(one["began_s"]) for one in told), default=0.0) or logs[0].walls[0]
    counted_s = known.account.wall_s
    wall_s = max(log.walls[1] for log in logs) - began_s
    estimated = _passed(status, counted_s)
    passed = estimated or _Passed(wall_s, (wall_s - counted_s) * len(known.account.nodes), 0.0)
    account = _until_now(known.account, passed, cycles[-1])
    restarts = {int(one["cycle"]): one for past in told for one in past["restarts"]}
    records = from_plain([restarts[cycle] for cycle in sorted(restarts)], tuple[RestartRecord, ...])
    all_restarts = plain(priced(records, from_plain(list(costs.values()), tuple[CycleCost, ...])))
    seen = {cycle.number: cycle for cycle in cycles}
    return {
        "account": {**to_json(account), "rest": "estimated" if estimated else "unknown"},
        "duration_s": passed.wall_s,
        "ended": utc(began_s + passed.wall_s),
        "restarts": all_restarts,
        "faults": [_first(seen[one["cycle"]], one) for one in all_restarts if one["cycle"] in seen],
        "spares_used": [*told[-1].get("promoted", ())] if told else [],
        "lost_nodes": [*told[-1].get("lost", ())] if told else [],
    }


def _first(cycle: Cycle, restart: Mapping[str, Any]) -> dict[str, Any]:
    """The first cause, as the list of faults in a result.json has it."""
    found = first_fault(cycle, restart)
    rule = (found.get("finding") or {}).get("rule") or (
        HANG_RULE if found["kind"] == "hang" else ""
    )
    told = {"kind": found["kind"], "rule": rule, "host": restart["host"]}
    return {"cycle": cycle.number, "rank": restart["rank"], **told}
