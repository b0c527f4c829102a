"""What a report shows of a job, from the content of its result.json and of the plans in its event logs. Pure.

Times are seconds since the job began. The numbers are those of `core.account`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nvrx_slurm.declared import Record

AGAIN, DOWN, WAITS = ("start", "import", "init", "reload"), ("stop", "plan"), "wait_nodes"
ACTIVE, SPARE, EXCLUDED, LOST = "active", "spare_idle", "excluded", "lost"
_FAILS = ("recomputed", "detect", *DOWN, WAITS)
_STEPS = ("productive", "recomputed")
_UNSPLIT = {
    "again_s": "start",
    "recomputed_s": "recomputed",
    "detect_s": "detect",
    "down_s": "plan",
}
_OF_NODE = (SPARE, EXCLUDED, WAITS)  # no part of a cycle, as its active nodes see it
_BRIEF_S = 0.01  # shorter waits are a part of the plan
_ROWS = 64  # nodes that each have a row; where there are more, equal ones share one


class CyclePlan(Record):
    """A plan. `buckets`: node-seconds until then, of all nodes; `active`: nodes; `changed`: what some are from then."""

    cycle: int
    at_s: float
    buckets: Mapping[str, float]
    active: int
    changed: Mapping[str, str]  # by key


class Stretch(Record):
    """A time of the job in one bucket."""

    begin_s: float
    took_s: float
    bucket: str


class NodeRow(Record):
    """Nodes with one history. `roles`: since when they are what: ACTIVE, SPARE, EXCLUDED, LOST or WAITS."""

    nodes: tuple[tuple[str, str], ...]  # name, and key as in types.Peer
    roles: tuple[tuple[float, str], ...]


class Incident(Record):
    """A restart, or the failure that ended the job (`ends`). The texts are of ranks, too, and may hold anything."""

    number: int
    cycle: int
    at_s: float
    cause: str
    host: str
    key: str  # the key of its node
    rank: int  # -1 = the node
    phases: tuple[Stretch, ...]  # in their order, from the work that was lost to the first step
    lost_s: float
    lost_steps: int | None
    said: tuple[tuple[float, str], ...] = ()  # by the coordinator: what it decided
    rule: str = ""
    blame: str = ""  # with its confidence
    lines: tuple[str, ...] = ()  # of its output, the last ones
    log: str = ""
    waits: tuple[tuple[str, str], ...] = ()  # which ranks waited, and where
    advice: str = ""
    again: str = ""  # how the next cycle made its ranks
    resumed: str = ""  # what they have loaded from memory
    ends: bool = False


class StepTime(Record):
    """The steps of one cycle, the first one behind its checkpoint, and their mean time."""

    begin_s: float
    end_s: float
    first: int
    steps: int
    step_s: float


class ReportFacts(Record):
    """All of a report. `summary`: as `core.account.goodput.summary` makes it."""

    title: str
    command: str
    sentence: str
    began_s: float  # Unix seconds
    wall_s: float
    stretches: tuple[Stretch, ...]  # as active nodes see it, without gaps
    rows: tuple[NodeRow, ...]
    nodes: tuple[Mapping[str, Any], ...]  # as result.json has them
    incidents: tuple[Incident, ...]
    paces: tuple[StepTime, ...]
    summary: Mapping[str, Any]
    source: str  # what the report was made of


def stretches(
    plans: Sequence[CyclePlan],
    restarts: Sequence[Mapping[str, Any]],
    total: Mapping[str, float],
    wall_s: float,
) -> dict[int, tuple[Stretch, ...]]:
    """The job from its beginning to `wall_s`, by cycle; what was before the first one is cycle -1.

    `total`: node-seconds at the end. A cycle without a plan here is told by its restart.
    """
    by_cycle = {int(one["cycle"]): one for one in restarts}
    begins = {0: 0.0} if 0 in by_cycle else {}
    for cycle, one in by_cycle.items():
        begins.setdefault(cycle + 1, float(one["at_s"]) + float(one["down_s"]))
    begins.update((plan.cycle, plan.at_s) for plan in plans)
    split = _split(plans, total)
    numbers = sorted(begins)
    before_s = begins[numbers[0]] if numbers else wall_s
    found: dict[int, tuple[Stretch, ...]] = {
        -1: (Stretch(0.0, before_s, WAITS if 0 in begins else "other"),)
    }
    for cycle, following in zip(numbers, [*numbers[1:], -1], strict=False):
        before = by_cycle.get(cycle - 1)
        after = by_cycle.get(cycle)
        known = split.get(cycle)
        if known and after:
            rest = WAITS
        elif known or after:
            rest = "productive"
        else:
            rest = "other"
        took = known or _of_restarts(before, after)
        end_s = begins.get(following, wall_s)
        found[cycle] = tuple(_in_order(begins[cycle], end_s, took, rest))
    return found


def phases(found: Mapping[int, Sequence[Stretch]], cycle: int) -> tuple[Stretch, ...]:
    """The phases from the work that a failure has lost to the first step of the next cycle."""
    failed = [one for one in found.get(cycle, ()) if one.bucket in _FAILS]
    started = [one for one in found.get(cycle + 1, ()) if one.bucket in AGAIN]
    return (*failed, *started)


def _split(plans: Sequence[CyclePlan], total: Mapping[str, float]) -> dict[int, dict[str, float]]:
    """Mean seconds by bucket of the active nodes, for each cycle whose end is known as well."""
    found = {}
    for plan, following in zip(plans, [*plans[1:], None], strict=False):
        if following is not None and following.cycle != plan.cycle + 1:
            continue
        after = total if following is None else following.buckets
        took = {
            bucket: s - plan.buckets.get(bucket, 0.0)
            for bucket, s in after.items()
            if bucket not in _OF_NODE
        }
        if plan.active and any(s > 0.0 for bucket, s in took.items() if bucket != "other"):
            found[plan.cycle] = {bucket: s / plan.active for bucket, s in took.items() if s > 0.0}
    return found


def _of_restarts(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> dict[str, float]:
    """The same as far as the restarts before and after a cycle tell it."""
    told = {"again_s": before, "recomputed_s": after, "detect_s": after, "down_s": after}
    return {_UNSPLIT[name]: float(one[name]) for name, one in told.items() if one is not None}


def _in_order(begin_s: float, end_s: float, took: Mapping[str, float], rest: str) -> list[Stretch]:
    """The stretches one after the other: starts, work, what of it was lost, and what led to the next cycle. `rest`:
    what has no bucket."""
    left_s = end_s - begin_s - sum(took.values())
    if rest == WAITS and left_s < _BRIEF_S:
        rest = "plan"
    seconds = defaultdict(float, took)
    seconds[rest] += max(0.0, left_s)
    work = sorted(took.keys() - {*AGAIN, "productive", *_FAILS})
    found = list[Stretch]()
    at_s = begin_s
    for bucket in dict.fromkeys((*AGAIN, "productive", *work, "other", *_FAILS)):
        took_s = min(seconds[bucket], end_s - at_s)
        if took_s > 0.0:
            found.append(Stretch(at_s, took_s, bucket))
            at_s += took_s
    return found


def node_rows(
    plans: Sequence[CyclePlan],
    hosts: Mapping[str, str],
    lost_at: Mapping[int, float],
    lost: Collection[str],
    went: Mapping[str, float],
) -> tuple[NodeRow, ...]:
    """What each node was, by the plans. `hosts`: names by key; `lost_at`: by cycle, when its first fault was seen;
    `lost`: hosts of lost nodes, which plans do not tell from excluded ones; `went`: by key, when a lost node went."""
    roles: dict[str, list[tuple[float, str]]] = defaultdict(lambda: [(0.0, WAITS)])
    for plan in plans:
        failed_s = min(plan.at_s, lost_at.get(plan.cycle - 1, plan.at_s))
        for key, role in plan.changed.items():
            if role != EXCLUDED:
                roles[key].append((plan.at_s, role))
            elif hosts.get(key) in lost:
                roles[key].append((failed_s, LOST))
            else:
                roles[key].append((failed_s, EXCLUDED))
    for key, at_s in went.items():
        if all(role != LOST for _, role in roles[key]):
            roles[key].append((at_s, LOST))
    names = _names(roles, hosts)
    alike: dict[object, list[str]] = defaultdict(list)
    for key in sorted(roles, key=lambda key: (len(key), key)):
        history = tuple(roles[key])
        alike[history if len(roles) > _ROWS else key].append(key)
    rows = sorted(alike.values(), key=len, reverse=True)
    return tuple(
        NodeRow(tuple((names[key], key) for key in keys), tuple(roles[keys[0]])) for keys in rows
    )


def _names(keys: Collection[str], hosts: Mapping[str, str]) -> dict[str, str]:
    """The name of each node: its host, with its key where several are on one."""
    found = {key: hosts.get(key, key) for key in keys}
    times = Counter(found.values())
    return {
        key: host if times[host] == 1 else f"{host} (node {key})" for key, host in found.items()
    }


def paces(
    found: Mapping[int, Sequence[Stretch]], restarts: Iterable[Mapping[str, Any]]
) -> Iterator[StepTime]:
    """The pace of each cycle whose first and last iteration are known: a restart goes on at its checkpoint.

    Where a failed one tells no iteration, its last checkpoint is the end.
    """
    begins = {0: 0}
    for one in restarts:
        begins[int(one["cycle"]) + 1] = int(one["checkpoint"])
    for one in restarts:
        cycle = int(one["cycle"])
        begin = begins.get(cycle, -1)
        seen = found.get(cycle, ())
        told = int(one["iteration"])
        reached = max(told, int(one["checkpoint"]))
        kept = _STEPS if told == reached else _STEPS[:1]
        worked = [s for s in seen if s.bucket in kept]
        worked = worked or [
            s for s in seen if s.bucket == "other"
        ]  # the last one of a job that runs
        steps = reached - begin
        took_s = sum(s.took_s for s in worked)
        if begin >= 0 and steps > 0 and took_s > 0.0:
            end_s = worked[-1].begin_s + worked[-1].took_s
            end_s = float(one["at_s"]) if told == reached else end_s
            yield StepTime(worked[0].begin_s, end_s, begin, steps, took_s / steps)
