"""The account in JSON: node-seconds by bucket, with grades; two ratios by name; what restarts have lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from typing import Any

from nvrx_slurm.core.account.account import BUCKETS, SECTION, START_GRACE_S, Grade
from nvrx_slurm.declared import plain, replace
from nvrx_slurm.types import Account, CycleCost, NodeTime, RestartRecord

SCHEMA = 1
_NO_COST = CycleCost(-1, 0.0, 0.0)
_COSTS = (
    "detect_s",
    "down_s",
    "again_s",
    "recomputed_s",
)


def to_json(
    account: Account, queue_s: float | None = None, before_s: float = 0.0
) -> dict[str, Any]:
    """The object "account" of result.json. `queue_s`: between submission and start of the allocation, None = not known;
    `before_s`: from there until the job began, on all nodes."""
    nodes = [_of_node(node, before_s) for node in account.nodes]
    total: Counter[str] = Counter()
    for node in nodes:
        total.update(node["seconds"])
    wall_s = account.wall_s + before_s
    saves = account.saves
    return {
        "schema": SCHEMA,
        "wall_s": round(wall_s, 6),
        "queue_s": queue_s,
        "before_s": round(before_s, 3),
        "productive_s": round(account.productive_s, 6),
        **shares(
            total,
            account.productive_s,
            wall_s + (queue_s or 0.0),
        ),
        "node_seconds": {bucket: round(took_s, 6) for bucket, took_s in total.items()},
        "grades": grades(total, account.estimated),
        "saves": saves.times,
        "save_s": saves.took_s / saves.times if saves.times else None,
        "reloads": {one.name: round(one.took_s, 6) for one in account.reloads},
        "nodes": nodes,
    }


def shares(total: Counter[str], productive_s: float, wall_s: float) -> dict[str, float | None]:
    """The ratios of a job, or of several. `total`: node-seconds by bucket; `wall_s`: since the submission."""
    allocated_s = sum(total.values())
    training_s = allocated_s - total["spare_idle"] - total["excluded"]
    return {
        "job_ettr": ratio(productive_s, wall_s),
        "productive_share": ratio(total["productive"], allocated_s),
        "productive_share_of_training_nodes": ratio(
            total["productive"],
            training_s,
        ),
    }


def _of_node(node: NodeTime, before_s: float) -> dict[str, Any]:
    times = dict(zip(BUCKETS, node.seconds, strict=False))
    times |= {f"{SECTION}{section.name}": section.took_s for section in node.sections}
    times["wait_nodes"] = times.get("wait_nodes", 0.0) + before_s
    found = {bucket: round(took_s, 6) for bucket, took_s in times.items() if took_s}
    return {
        "node": node.key,
        "host": node.host,
        "wall_s": round(sum(found.values()), 6),
        "seconds": found,
    }


def so_far(
    counted: Account, wall_s: float, nodes: int, active: int, until_s: float
) -> dict[str, Any]:
    """The object "account" of status.json. `node_seconds` are those of `counted`, the account until the last plan: no
    number in it goes back. The rest is of this moment, `wall_s` after the job began, and estimated: `active` of `nodes`
    nodes have trained from the plan to `until_s`, but for START_GRACE_S."""
    total = dict.fromkeys((*BUCKETS, "section"), 0.0)
    for node in counted.nodes:
        for bucket, took_s in zip(BUCKETS, node.seconds, strict=False):
            total[bucket] += took_s
        for section in node.sections:
            total["section"] += section.took_s
    since_s = max(0.0, wall_s - counted.wall_s)
    trained_s = max(0.0, until_s - counted.wall_s - START_GRACE_S)
    allocated_s = sum(total.values()) + nodes * since_s
    productive_s = total["productive"] + active * trained_s
    del total["queue"]
    return {
        "counted_s": round(counted.wall_s, 6),
        "node_seconds": {bucket: round(took_s, 6) for bucket, took_s in total.items()},
        "allocated_s": round(allocated_s, 3),
        "productive_s": round(productive_s, 3),
    }


def grades(buckets: Iterable[str], estimated: Collection[str]) -> dict[str, str]:
    """How well the number of each bucket is known. Where it is not known what was lost, productive work is bounded."""
    counted = [*buckets]
    found = {}
    for bucket in (*counted, "recomputed"):
        at_best = BUCKETS[bucket][0] if bucket in BUCKETS else Grade.COUNTED
        found[bucket] = Grade.ESTIMATED if bucket in estimated else at_best
    some_is_lost = "recomputed" in {*counted, *estimated}
    if some_is_lost and found.get("productive") is Grade.COUNTED:
        found["productive"] = Grade.BOUNDED
    return {bucket: grade.value for bucket, grade in found.items()}


def ratio(part: float, whole: float) -> float | None:
    """`part` of `whole`, to 6 digits; None of nothing."""
    return round(part / whole, 6) if whole > 0.0 else None


def priced(
    restarts: Iterable[RestartRecord], costs: Iterable[CycleCost]
) -> tuple[RestartRecord, ...]:
    """`restarts` with what the cycle before each of them has lost, and until the next one trained. `costs`: of cycles,
    oldest first."""
    known = list(costs)
    of_cycle = {cost.cycle: cost for cost in known}
    again = {before.cycle: after.again_s for before, after in pairwise(known)}

    def done(one: RestartRecord) -> RestartRecord:
        cost = of_cycle.get(one.cycle, _NO_COST)
        return replace(
            one,
            recomputed_s=cost.recomputed_s,
            again_s=again.get(one.cycle, 0.0),
            steps=cost.steps,
        )

    return tuple(map(done, restarts))


def lost_s(restart: RestartRecord | Mapping[str, Any]) -> float:
    """What a restart cost: from the last sign of life of its cause until the next cycle trained, and repeated work."""
    one = restart if isinstance(restart, Mapping) else plain(restart)
    return sum(float(one.get(name) or 0.0) for name in _COSTS)


def lost_steps(restart: RestartRecord | Mapping[str, Any]) -> int | None:
    """Steps that a restart repeated; None where they are not known."""
    one = restart if isinstance(restart, Mapping) else plain(restart)
    steps = int(one.get("steps", -1))
    if steps >= 0:
        return steps
    reached = int(one.get("iteration", -1))
    source = one.get("source")
    saved = int(one.get("checkpoint", -1))
    if source in ("memory", "peer"):
        saved = int(one.get("memory", -1))
    if reached < 0 or saved < 0:
        return None
    return max(0, reached - saved)
