"""Metrics of jobs: content of status.json -> samples -> text of Prometheus, or OTLP. Pure.

At most 120 series for a job of any size. No name of a node is in a label. Counters never go back, also after a
takeover; a requeued job is another `run`. `job_id` is no `job`: Prometheus gives that label to its targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from nvrx_slurm.core.coordinator.status import STATES
from nvrx_slurm.core.needs import rules
from nvrx_slurm.types import FaultKind

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_NODES = ("active", "spare", "missing", "excluded")
# Name -> type and help. The unit is in the name, as Prometheus asks.
METRICS: dict[str, tuple[str, str]] = {
    "nvrx_job_info": ("gauge", "1, with the job's name, user and partition"),
    "nvrx_job_state": ("gauge", "1 for the state of the job, 0 for all others"),
    "nvrx_job_state_since_timestamp_seconds": ("gauge", "when that state began"),
    "nvrx_job_began_timestamp_seconds": ("gauge", "when the job began"),
    "nvrx_job_end_code": ("gauge", "exit code of the job, once its end is decided"),
    "nvrx_status_timestamp_seconds": ("gauge", "when the coordinator told all this"),
    "nvrx_status_interval_seconds": ("gauge", "how long that is good for; after three of them the job is silent"),
    "nvrx_cycle": ("gauge", "the cycle; -1 before the first"),
    "nvrx_restarts_total": ("counter", "cycles that followed a fault"),
    "nvrx_restarts_used": ("gauge", "restarts that count against the limit, by kind of the first cause"),
    "nvrx_restarts_allowed": ("gauge", "that limit (--max-restarts)"),
    "nvrx_last_restart_timestamp_seconds": ("gauge", "when the fault before the last restart was noticed"),
    "nvrx_last_restart_duration_seconds": ("gauge", "from there to the next plan"),
    "nvrx_nodes": ("gauge", "nodes by what they are"),
    "nvrx_nodes_expected": ("gauge", "all nodes of the job, spares included"),
    "nvrx_nodes_needed": ("gauge", "nodes of each cycle"),
    "nvrx_hang_watch": ("gauge", "1: hung ranks are killed; 0: not watched for; none: by the in-process wrapper"),
    "nvrx_needs_person": ("gauge", "1: a person should look at the job, for this reason"),
    "nvrx_checkpoint_iteration": ("gauge", "iteration of the last checkpoint that is known to be complete"),
    "nvrx_checkpoint_timestamp_seconds": ("gauge", "when that checkpoint was written"),
    "nvrx_checkpoint_interval_seconds": ("gauge", "from the checkpoint before to that one"),
    "nvrx_checkpoints_torn": ("gauge", "later checkpoints that are not complete (--ft-checkpoint-dir)"),
    "nvrx_cycles_without_progress": ("gauge", "cycles in a row without a new checkpoint"),
    "nvrx_cycle_steps": ("gauge", "steps that each rank has made in this cycle, at least"),
    "nvrx_step_seconds": ("gauge", "median of the ranks' step times; where they do not tell, by checkpoints"),
    "nvrx_slow_ranks": ("gauge", "ranks that are slow now, at most 8"),
    "nvrx_slow_lost_seconds": ("gauge", "what these have cost the job so far"),
    "nvrx_allocation_end_timestamp_seconds": ("gauge", "when the time limit ends the job"),
    "nvrx_node_seconds_total": ("counter", "time of all nodes by bucket, counted until the last plan"),
    "nvrx_allocated_node_seconds": ("gauge", "time of all nodes until now"),
    "nvrx_productive_node_seconds": ("gauge", "productive part of it; work that is lost is taken off again"),
    "nvrx_productive_share_ratio": ("gauge", "productive / allocated node-seconds, spares included"),
    "nvrx_exporter_scan_timestamp_seconds": ("gauge", "when the log trees of a --log-dir were last read to the end"),
    "nvrx_exporter_scan_duration_seconds": ("gauge", "how long that took"),
    "nvrx_exporter_runs": ("gauge", "runs that are shown"),
    "nvrx_exporter_unreadable_runs": ("gauge", "runs with a status.json that is damaged, or of a later version"),
}


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(found: Mapping[str, Any]) -> list[Sample]:
    """The samples of one run. `found`: content of its status.json; raises KeyError, TypeError, ValueError and
    AttributeError for what is none."""
    who = {"job_id": str(found["job"]["job"]), "run": str(found["job"]["run"])}
    rows = [*_job(found), *_means(found), *_pace(found), *_time(found)]
    return [Sample(name, who | labels, float(value)) for name, value, labels in rows if value is not None]


_Row = tuple[str, "float | None", dict[str, str]]  # None: not known


def _job(found: Mapping[str, Any]) -> Iterator[_Row]:
    """What the job is and does."""
    job, end, written = found["job"], found["end"], found["written"]
    yield "nvrx_job_info", 1, {name: str(job[name]) for name in ("name", "user", "partition")}
    for state in STATES:
        yield "nvrx_job_state", found["state"] == state, {"state": state}
    yield "nvrx_job_state_since_timestamp_seconds", found["since"], {}
    yield "nvrx_job_began_timestamp_seconds", found["began"], {}
    yield "nvrx_job_end_code", None if end is None else end["code"], {}
    yield "nvrx_status_timestamp_seconds", written, {}
    yield "nvrx_status_interval_seconds", found["interval_s"], {}
    for reason, (_, holds) in rules(found, written - found["since"]).items():
        yield "nvrx_needs_person", holds and end is None, {"reason": reason}


def _means(found: Mapping[str, Any]) -> Iterator[_Row]:
    """What it has left, and what it has behind it."""
    nodes, restarts = found["nodes"], found["restarts"]
    done = [one for one in found["incidents"] if one["done"] == "restarted"]
    yield "nvrx_cycle", found["cycle"], {}
    if found["account"]:  # before, a coordinator may not know what earlier ones have counted
        yield "nvrx_restarts_total", max(0, found["cycle"]), {}
    for kind in FaultKind:
        yield "nvrx_restarts_used", restarts["by_kind"].get(kind.value, 0), {"kind": kind.value}
    yield "nvrx_restarts_allowed", restarts["allowed"], {}
    yield "nvrx_last_restart_timestamp_seconds", done[-1]["time"] if done else None, {}
    yield "nvrx_last_restart_duration_seconds", done[-1]["down_s"] if done else None, {}
    for state in _NODES:
        yield "nvrx_nodes", nodes[state], {"state": state}
    yield "nvrx_nodes_expected", nodes["expected"], {}
    yield "nvrx_nodes_needed", nodes["needed"], {}
    yield "nvrx_hang_watch", found["job"]["hangs_watched"], {}
    yield "nvrx_allocation_end_timestamp_seconds", found["allocation_ends"], {}


def _pace(found: Mapping[str, Any]) -> Iterator[_Row]:
    """How it goes on."""
    checkpoint, progress, slow = (found.get(name) or {} for name in ("checkpoint", "progress", "slow"))
    yield "nvrx_checkpoint_iteration", checkpoint.get("iteration"), {}
    yield "nvrx_checkpoint_timestamp_seconds", checkpoint.get("time"), {}
    yield "nvrx_checkpoint_interval_seconds", checkpoint.get("every_s"), {}
    yield "nvrx_checkpoints_torn", len(checkpoint["torn"]) if "torn" in checkpoint else None, {}
    yield "nvrx_cycles_without_progress", found["no_progress"], {}
    yield "nvrx_cycle_steps", progress.get("steps"), {}
    yield "nvrx_step_seconds", progress.get("step_s") or checkpoint.get("iteration_s"), {}
    yield "nvrx_slow_ranks", len(slow.get("ranks", ())), {}
    yield "nvrx_slow_lost_seconds", slow.get("lost_s"), {}


def _time(found: Mapping[str, Any]) -> Iterator[_Row]:
    """Where the time went."""
    account = found["account"]
    if account:
        for bucket, took_s in account["node_seconds"].items():
            yield "nvrx_node_seconds_total", took_s, {"bucket": bucket}
        allocated_s, productive_s = account["allocated_s"], account["productive_s"]
        yield "nvrx_allocated_node_seconds", allocated_s, {}
        yield "nvrx_productive_node_seconds", productive_s, {}
        yield "nvrx_productive_share_ratio", productive_s / allocated_s if allocated_s else None, {}


# --- text of Prometheus -----------------------------------------------------------------------------------------------

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def line(one: Sample) -> str:
    """The sample in the text format, which is the same in OpenMetrics."""
    labels = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in one.labels.items())
    return f"{one.name}{{{labels}}} {one.value!r}\n"


def exposition(lines: Iterable[tuple[str, str]], openmetrics: bool = False) -> bytes:
    """All of a scrape. `lines`: name and `line` of each sample, in any order; no series may be there twice."""
    families = defaultdict[str, list[str]](list)
    for name, text in lines:
        families[name].append(text)
    parts = []
    for name, (kind, text) in METRICS.items():
        if name in families:
            family = name.removesuffix("_total") if openmetrics else name
            parts += [f"# HELP {family} {text}\n# TYPE {family} {kind}\n", *families[name]]
    return "".join([*parts, "# EOF\n" if openmetrics else ""]).encode("utf-8", "replace")


def text_of(found: Mapping[str, Any]) -> bytes:
    """The samples of one run in the text format."""
    return exposition((one.name, line(one)) for one in samples(found))


# --- OTLP -------------------------------------------------------------------------------------------------------------


def otlp(found: Mapping[str, Any], resource: Mapping[str, str], version: str) -> dict[str, Any]:
    """The samples of one run as ExportMetricsServiceRequest of OTLP 1.0, in its JSON form; names as in Prometheus."""
    times = {"timeUnixNano": _nanos(found["written"]), "startTimeUnixNano": _nanos(found["began"])}
    points = defaultdict[str, list[dict[str, Any]]](list)
    for one in samples(found):
        points[one.name].append({"attributes": _attributes(one.labels), "asDouble": one.value, **times})
    metrics = []
    for name, found_points in points.items():
        kind, text = METRICS[name]
        data: dict[str, Any] = {"dataPoints": found_points}
        if kind == "counter":
            data |= {"aggregationTemporality": 2, "isMonotonic": True}  # 2: cumulative
        unit = "s" if "seconds" in name else "1" if name.endswith("_ratio") else ""
        metrics.append({"name": name, "description": text, "unit": unit, "sum" if kind == "counter" else kind: data})
    scope = {"scope": {"name": "nvrx_slurm", "version": version}, "metrics": metrics}
    return {"resourceMetrics": [{"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [scope]}]}


def _nanos(unix_s: float) -> str:
    return str(int(unix_s * 1e6) * 1000)


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": text}} for name, text in labels.items()]
