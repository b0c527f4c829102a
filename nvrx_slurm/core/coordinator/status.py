"""How the job is, as status.json tells it (docs/reference/logs-and-events.md): a dict that JSON can hold. Pure.

Times in it are Unix seconds of the coordinator's clock. At most 256 KiB, whatever the job went through.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from nvrx_slurm.core.account.figures import so_far
from nvrx_slurm.core.coordinator.states import CYCLE, OVER, RUNS, Stage
from nvrx_slurm.declared import Record
from nvrx_slurm.types import Account, FaultKind, JobReport, Warmth

if TYPE_CHECKING:
    from nvrx_slurm.core.coordinator.assignment import Slot
    from nvrx_slurm.core.coordinator.coordinator import Coordinator
    from nvrx_slurm.core.coordinator.members import Member

VERSION = 1  # of the content; a reader refuses a later one
MOST_NODES = 2048  # that are listed one by one
_MOST_INCIDENTS, _MOST_GONE = 16, 8
_CAUSE_CHARS, _NAME_CHARS = 240, 64
_MOST_WARMTHS, _MODULES_NAMED = 8, 6
_GONE = {
    FaultKind.NODE_LOST: "lost",
    FaultKind.EXCLUDED: "excluded",
    FaultKind.UNHEALTHY: "excluded",
}
_WORDS = {
    Stage.ELECTING: "electing", Stage.JOINING: "waiting", Stage.LAST_CALL: "waiting", Stage.TAKEOVER: "taking over",
    Stage.PAUSED: "paused", Stage.RUNNING: "running", Stage.LAST_RANKS: "running", Stage.STOPPING: "stopping",
    Stage.SCORING: "stopping", Stage.FINISHED: "ending", Stage.RETURNING: "ending", Stage.CLOSED: "ended",
}  # fmt: skip
STATES = tuple(dict.fromkeys(_WORDS.values()))


class JobLabels(Record):
    """What people call the job."""

    job: str
    run: str
    name: str = ""
    user: str = ""
    partition: str = ""
    # by a configured timeout, or by looking where ranks make no step; None: the in-process wrapper does, or not
    hangs_watched: bool | None = None
    command: str = ""  # script and arguments


def state_of(core: Coordinator) -> str:
    """The state of the job in a word or two."""
    assert isinstance(core.state, Stage)
    return _WORDS[core.state]


def status(
    core: Coordinator, since: float, now: float, unix_s: float, counted: Account | None = None
) -> dict[str, Any]:
    """How the job is. `since`, `now`: when the state began, and this moment (monotonic seconds); `unix_s`: the same.
    `counted`: the account until the last plan; None: not known."""
    ahead_s = unix_s - now
    s = core.settings
    end = core.ending.end
    history = core.budget.history
    report = core.ledger.so_far(history, core.job.cycle, now, _MOST_INCIDENTS)
    began_s = unix_s - report.duration_s
    why, until = _awaited(core)
    ends_at, search = core.ending.clock.end_at, core.hangs.found
    return {
        "term": core.job.term if core.roster.quorum.elected else 0,
        "state": state_of(core),
        "since": since + ahead_s,
        "began": began_s,
        "cycle": core.job.cycle,
        "waits": {"why": why, "until": None if until is None else until + ahead_s} if why else None,
        "end": None
        if end is None
        else {"code": int(end.code), "reason": end.reason[:_CAUSE_CHARS]},
        "allocation_ends": None if ends_at is None else ends_at + ahead_s,
        "nodes": _nodes(core) | {"gone": _gone(report, began_s)},
        "restarts": {
            "used": report.restarts_used,
            "allowed": s.max_restarts,
            "down_s": round(report.down_s, 3),
            "by_kind": {one.kind.value: one.count for one in history.spent},
        },
        "spares_used": list(report.spares_used[-_MOST_GONE:]),
        "hang": None
        if search is None
        else {"rank": search.first.rank, "host": search.first.host[:_NAME_CHARS]},
        "incidents": _incidents(report, began_s, core.state),
        "slow": _slow(core, report),
        "no_progress": history.no_progress,
        "account": None if counted is None else _account(core, report, counted),
    }


def _slow(core: Coordinator, report: JobReport) -> dict[str, Any] | None:
    """What is slow now."""
    last = report.stragglers[-1] if report.stragglers and core.state is Stage.RUNNING else None
    if last is None or not core.suspects.goes_on:
        return None
    return {
        "what": last.what,
        "ranks": list(last.ranks[:_MOST_GONE]),
        "lost_s": round(last.lost_s, 1),
        "signs": last.signs,
    }


def _awaited(core: Coordinator) -> tuple[str, float | None]:
    """What the job waits for, and until when at most (monotonic seconds)."""
    state = core.state
    quorum = core.roster.quorum
    search = core.hangs.found
    assert isinstance(state, Stage)
    if quorum.resign_at is not None and state not in OVER:
        return "most of the job's nodes are out of reach", quorum.resign_at
    if state is Stage.CLOSED:
        return "", None
    if state is Stage.RUNNING and search is None and core.ending.warning is not None:
        return f"ranks save their work: {core.ending.warning.reason}", core.ending.clock.end_at
    if state is Stage.RUNNING:
        return (
            ("", None)
            if search is None
            else (f"{len(search.pending)} nodes look at their ranks", search.by)
        )
    if state is Stage.ELECTING:
        return core.electing.missing(), None
    if state in (Stage.JOINING, Stage.LAST_CALL):
        return core.gathering.missing(), core.gathering.join_by
    if state is Stage.STOPPING:
        return (
            f"the workers of {len(core.stopping.pending)} nodes have not ended yet",
            core.timer_at(),
        )
    return state.value, core.deadline()


def _nodes(core: Coordinator) -> dict[str, Any]:
    """How many nodes are what."""
    s, members = core.settings, core.roster.members
    here = core.electing.votes if core.state is Stage.ELECTING else len(members)
    active = (
        len(core.job.assignment.group_ranks.keys() & members.keys()) if core.state in CYCLE else 0
    )
    excluded = len(core.budget.history.excluded)
    missing = 0 if core.state in OVER else max(0, s.max_nodes - here - excluded)
    counts = {"active": active, "spare": here - active, "missing": missing, "excluded": excluded}
    return {"expected": s.max_nodes, "needed": s.min_nodes, **counts}


def snapshot(core: Coordinator) -> Callable[[], dict[str, Any]]:
    """What is known of each node at this moment. The result lists it, which may be called in a thread."""
    assignment = core.job.assignment
    members = core.roster.members
    slots = dict(assignment.slots) if core.state in CYCLE else {}
    return partial(
        _table,
        slots,
        dict(members),
        set(assignment.broken),
        set(assignment.succeeded),
        dict(members.warmth),
    )


def _table(
    slots: dict[int, Slot],
    members: dict[str, Member],
    broken: set[int],
    done: set[int],
    told: dict[str, Warmth],
) -> dict[str, Any]:
    """The nodes with their ranks and state, the spares, and how each of them would start ranks."""
    table, warmth = [], []
    for group_rank, slot in list(slots.items())[:MOST_NODES]:
        member = members.pop(slot.node_id, None)
        host = slot.node_id if member is None else member.node.host
        if member is None:
            what = "gone"
        elif group_rank in broken:
            what = "failed"
        else:
            what = "done" if group_rank in done else member.use.name.lower()
        table.append((host[:_NAME_CHARS], slot.first_rank, slot.nproc, what))
        warmth.append("" if member is None else _warmth(told.get(slot.node_id)))
    spares = list(members.items())[: MOST_NODES - len(table)]
    warmth += [_warmth(told.get(node_id)) for node_id, _ in spares]
    # Most nodes are alike, so each text is there once.
    numbers = {text: number for number, text in enumerate(dict.fromkeys(["", *warmth]))}
    return {
        "table": table,
        "spares": [member.node.host[:_NAME_CHARS] for _, member in spares],
        "warmth": list(numbers)[:_MOST_WARMTHS],
        "warmth_of": [numbers[text] if numbers[text] < _MOST_WARMTHS else 0 for text in warmth],
    }


def _warmth(told: Warmth | None) -> str:
    """Whether a node forks its ranks, and with what; "" where it has not told."""
    if told is None:
        return ""
    if told.reason:
        return f"cold: {told.reason[:_CAUSE_CHARS]}"
    more = ["..."] if len(told.modules) > _MODULES_NAMED else []
    return f"warm: {', '.join([*told.modules[:_MODULES_NAMED], *more]) or 'without modules'}"[
        :_CAUSE_CHARS
    ]


def _account(core: Coordinator, report: JobReport, counted: Account) -> dict[str, Any]:
    job = core.job
    wall_s = report.duration_s
    until_s = wall_s
    failed = core.ledger.marks
    if failed is not None and failed[0] == job.cycle:
        _, _, sign_at = failed
        until_s = core.ledger.at_s(sign_at)
    active = len(job.assignment.group_ranks)
    return so_far(counted, wall_s, core.settings.max_nodes, active, until_s)


def _gone(report: JobReport, began_s: float) -> list[dict[str, Any]]:
    """The last nodes that were lost or excluded; where an earlier coordinator saw it, without the time."""
    seen: dict[str, dict[str, Any]] = {
        fault.host: {
            "host": fault.host[:_NAME_CHARS],
            "how": _GONE[fault.kind],
            "time": began_s + fault.at_s,
        }
        for fault in report.faults
        if fault.kind in _GONE
    }
    names = dict.fromkeys(report.lost_nodes, "lost") | dict.fromkeys(
        report.excluded_nodes, "excluded"
    )
    for host, how in names.items():
        if host not in seen:
            seen = {host: {"host": host[:_NAME_CHARS], "how": how, "time": None}} | seen
    return list(seen.values())[-_MOST_GONE:]


def _incidents(report: JobReport, began_s: float, state: object) -> list[dict[str, Any]]:
    """The last restarts, oldest first; the last of them may be under way."""
    rules = {(fault.cycle, fault.message): fault.rule for fault in report.faults}
    told = report.restarts[-_MOST_INCIDENTS:]
    under_way = bool(told) and state not in (*RUNS, *OVER)
    return [
        {
            "time": began_s + one.at_s,
            "cycle": one.cycle,
            "cause": one.cause[:_CAUSE_CHARS],
            "rule": rules.get((one.cycle, one.cause), ""),
            "done": "restarting" if under_way and one is told[-1] else "restarted",
            "down_s": round(one.down_s, 3),
            "resumed": one.resumed,
        }
        for one in told
    ]
