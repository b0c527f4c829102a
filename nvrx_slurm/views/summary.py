"""What a job, a chain or many jobs have lost, to what, and what would cost less: from the content of result.json files.

Advice: the interval between checkpoints after Young (1974) and Daly (2006), sqrt(2 x save x MTBF). Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nvrx_slurm.core.account.figures import grades, lost_s, lost_steps, shares
from nvrx_slurm.core.attribution.rules import named
from nvrx_slurm.core.checkpoint.interval import best_interval_s
from nvrx_slurm.core.words import in_words
from nvrx_slurm.types import Blame

Result = Mapping[str, Any]
_SHOWN = 8  # causes and nodes
_LONG_IMPORTS = (
    0.05  # share of all nodes' time, and of restarts: the first start imports in any case
)


def summary(runs: Sequence[Result], began_s: float, ended_s: float) -> dict[str, Any]:
    """The sums of the runs of one job or chain, from the first submission to the last end (Unix seconds).

    Runs without an account count as wall time only. No ratio is known where "rest" of all accounts is "unknown".
    """
    total: Counter[str] = Counter()
    accounts = [run["account"] for run in runs if run.get("account")]
    for account in accounts:
        total.update(account["node_seconds"])
    restarts = [
        dict(restart) | _fault(run, restart)
        for run in runs
        for restart in run.get("restarts") or ()
    ]
    productive_s = sum(account["productive_s"] for account in accounts)
    estimated = {
        bucket for account in accounts for bucket, grade in account["grades"].items() if grade == "estimated"
    }  # fmt: skip
    steps = [steps for restart in restarts if (steps := lost_steps(restart)) is not None]
    wall_s = ended_s - began_s
    rests = [account["rest"] for account in accounts if "rest" in account]
    known = (total, productive_s, wall_s)
    if accounts and rests.count("unknown") == len(accounts):
        known = (Counter(), 0.0, 0.0)
    return {
        "runs": len(runs),
        "runs_without_account": len(runs) - len(accounts),
        "runs_without_result": len(rests),
        "wall_s": round(wall_s, 3),
        "productive_s": round(productive_s, 3),
        **shares(*known),
        "node_seconds": {bucket: round(took_s, 3) for bucket, took_s in total.most_common()},
        "grades": grades(total, estimated),
        "restarts": len(restarts),
        "inprocess_restarts": sum(len(run.get("inprocess_restarts") or ()) for run in runs),
        "lost_s": round(sum(map(lost_s, restarts)), 3),
        "lost_steps": sum(steps) if steps else None,
        "by_cause": _by(restarts, "kind"),
        "by_node": _by(restarts, "host"),
        "advice": [*_advice(runs, accounts, restarts, total)],
    }


def _fault(run: Result, restart: Mapping[str, Any]) -> dict[str, str]:
    """Kind (or rule) and host of the first cause of a restart."""
    faults = [fault for fault in run.get("faults") or () if fault["cycle"] == restart["cycle"]]
    first = next(
        (fault for fault in faults if fault["rank"] == restart["rank"]), faults[0] if faults else {}
    )
    kind = " ".join(filter(None, [first.get("kind", "unknown"), first.get("rule", "")]))
    return {"kind": kind, "host": restart.get("host") or first.get("host", "")}


def _may_be_the_node(kind: str) -> bool:
    """Whether a first cause says anything of its node; who kills a rank, or a wrong script, does not."""
    fault, _, rule = kind.partition(" ")
    known = named(rule)
    if known is not None:
        return known.blame in (Blame.NODE, Blame.NETWORK)
    return fault not in ("", "unknown", "exit", "signal", "loss")


def _by(restarts: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """Restarts and seconds lost by kind or node, the most expensive first."""
    found: dict[str, list[float]] = defaultdict(list)
    for restart in restarts:
        found[str(restart[name]) or "unknown"].append(lost_s(restart))
    costs = [
        {name: what, "restarts": len(lost), "lost_s": round(sum(lost), 3)}
        for what, lost in found.items()
    ]
    return sorted(costs, key=lambda one: -float(one["lost_s"]))


def _advice(
    runs: Sequence[Result],
    accounts: Sequence[Result],
    restarts: Sequence[Any],
    total: Mapping[str, float],
) -> Iterator[str]:
    saves = sum(account["saves"] for account in accounts)
    took_s = sum(account["save_s"] * account["saves"] for account in accounts if account["saves"])
    wall_s = sum(account["wall_s"] for account in accounts)
    if saves and restarts and took_s > 0.0:
        save_s, mtbf_s = took_s / saves, wall_s / len(restarts)
        best_s, now_s = (
            best_interval_s(save_s, mtbf_s),
            (total["productive"] + total.get("recomputed", 0.0)) / saves,
        )
        costs = [
            100 * (save_s / every_s + every_s / 2 / mtbf_s)
            for every_s in (now_s, best_s)
            if every_s > 0.0
        ]
        measured = f"a save takes {in_words(save_s)}, a fault comes every {in_words(mtbf_s)}"
        if len(costs) == 2:
            yield (
                f"save every {in_words(best_s)} (Young/Daly; {measured}): that costs {costs[1]:.1f} %;"
                f" every {in_words(now_s)}, as now, {costs[0]:.1f} %"
            )
    elif restarts and not saves:
        yield (
            "nothing tells when checkpoints are saved: use start_section() and end_section() around them, with a"
            " timeout for that section, to learn what restarts repeat and how often to save"
        )
    import_s = total.get("import", 0.0)
    again_s = sum(float(one.get("again_s") or 0.0) for one in restarts)
    if import_s > _LONG_IMPORTS * sum(total.values()) and again_s > _LONG_IMPORTS * wall_s:
        yield (
            f"imports took {100 * import_s / sum(total.values()):.1f} % of all nodes' time: nvrx doctor --warm"
            " says what keeps ranks from being forked"
        )
    spare_s, took_over = (
        total.get("spare_idle", 0.0),
        sum(len(run.get("spares_used") or ()) for run in runs),
    )
    if spare_s > 0.0:
        share = 100 * spare_s / sum(total.values())
        often = f"{took_over} time{'s' * (took_over != 1)}"
        told = (
            f"spares waited {spare_s / 3600:.2f} node-hours ({share:.1f} %) and took over {often}"
        )
        queues = [account["queue_s"] for account in accounts if account.get("queue_s") is not None]
        mean_s = sum(queues) / len(queues) if queues else 0.0
        if took_over and mean_s >= 1.0:
            told += (
                f"; without them the job would have queued again, here {in_words(mean_s)} each time"
            )
        yield told
    of_nodes = [one for one in restarts if _may_be_the_node(one["kind"])]
    worst = next(iter(_by(of_nodes, "host")), None)
    if (
        worst is not None
        and worst["restarts"] > 1
        and worst["host"] != "unknown"
        and len(accounts[0]["nodes"]) > 1
    ):
        yield f"node {worst['host']} caused {worst['restarts']} of {len(restarts)} restarts: have it checked"


def in_lines(title: str, found: Mapping[str, Any]) -> Iterator[str]:
    """The same for people."""
    yield f"{title}: {found['runs']} run{'s' if found['runs'] != 1 else ''}, {in_words(found['wall_s'])}"
    if found["runs_without_account"]:
        yield f"  {found['runs_without_account']} of them without an account: their time counts as not productive"
    if found["runs_without_result"]:
        yield (
            f"  {found['runs_without_result']} of them without a result.json: counted until the last plan, by the event"
            " logs; what followed is estimated, or in the bucket other"
        )
    for name, what in (
        ("job_ettr", "productive time / time from submission to end"),
        ("productive_share", "productive / allocated node-seconds, spares included"),
        ("productive_share_of_training_nodes", "the same without spares and excluded nodes"),
    ):
        share = "-" if found[name] is None else f"{100 * found[name]:.1f} %"
        yield f"  {share:>7}  {name.replace('_', ' ')}: {what}"
    total_s = sum(found["node_seconds"].values())
    if total_s > 0.0:
        yield f"  {'bucket':<24} {'of all nodes':>12} {'share':>8}  known"
    for bucket, took_s in found["node_seconds"].items():
        yield f"  {bucket:<24} {in_words(took_s):>12} {100 * took_s / total_s:6.1f} %  {found['grades'][bucket]}"
    if found["restarts"] or found["inprocess_restarts"]:
        steps = "" if found["lost_steps"] is None else f"{found['lost_steps']} steps and "
        inside = (
            f", and {found['inprocess_restarts']} in process" if found["inprocess_restarts"] else ""
        )
        yield f"  {found['restarts']} restarts{inside}; they lost {steps}{in_words(found['lost_s'])}"
    for name, what in (("kind", "by_cause"), ("host", "by_node")):
        for one in found[what][:_SHOWN]:
            yield f"    {what.replace('_', ' ')}: {one[name]}: {one['restarts']} x, {in_words(one['lost_s'])}"
    yield from (f"  advice: {line}" for line in found["advice"])
