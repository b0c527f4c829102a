"""Metrics of jobs: content of status.json -> samples -> text of Prometheus, or OTLP. Pure.

At most 120 series for a job of any size. No name of a node is in a label. Counters never go back, also after a
takeover; a requeued job is another `run`. `job_id` is no `job`: Prometheus gives that label to its targets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from nvrx_slurm.core.coordinator.status import STATES
from nvrx_slurm.core.needs import rules
from nvrx_slurm.types import FaultKind

TEXT = "text/plain; version=0.0.4; charset=utf-8"
_NODES = ("active", "spare", "missing", "excluded")
_MOST_SAMPLES = 200
_LABEL_CHARS = 256


# Name -> help, and where its value is in the content of status.json; "" = it is calculated, or has labels. The unit is
# in the name, as Prometheus asks.
METRICS: dict[str, tuple[str, str]] = {
    "nvrx_job_info": ("1, with the job's name, user and partition", ""),
    "nvrx_job_state": ("1 for the state of the job, 0 for all others", ""),
    "nvrx_job_state_since_timestamp_seconds": ("when that state began", "since"),
    "nvrx_job_began_timestamp_seconds": ("when the job began", "began"),
    "nvrx_job_end_code": ("exit code of the job, once its end is decided", "end.code"),
    "nvrx_status_timestamp_seconds": ("when the coordinator told all this", "written"),
    "nvrx_status_interval_seconds": (
        "how long that is good for; after three of them the job is silent",
        "interval_s",
    ),
    "nvrx_cycle": ("the cycle; -1 before the first", "cycle"),
    "nvrx_restarts_total": ("cycles that followed a fault", ""),
    "nvrx_restarts_used": ("restarts that count against the limit, by kind of the first cause", ""),
    "nvrx_restarts_allowed": ("that limit (--max-restarts)", "restarts.allowed"),
    "nvrx_last_restart_timestamp_seconds": (
        "when the fault before the last restart was noticed",
        "",
    ),
    "nvrx_last_restart_duration_seconds": ("from there to the next plan", ""),
    "nvrx_nodes": ("nodes by what they are", ""),
    "nvrx_nodes_expected": ("all nodes of the job, spares included", "nodes.expected"),
    "nvrx_nodes_needed": ("nodes of each cycle", "nodes.needed"),
    "nvrx_hang_watch": (
        "1: hung ranks are killed, by a timeout or after a look; 0: not watched for; none: in-process wrapper",
        "job.hangs_watched",
    ),
    "nvrx_needs_person": ("1: a person should look at the job, for this reason", ""),
    "nvrx_checkpoint_iteration": (
        "iteration of the last complete checkpoint",
        "checkpoint.iteration",
    ),
    "nvrx_checkpoint_timestamp_seconds": ("when that checkpoint was written", "checkpoint.time"),
    "nvrx_checkpoint_interval_seconds": (
        "from the checkpoint before to that one",
        "checkpoint.every_s",
    ),
    "nvrx_checkpoints_torn": ("later checkpoints that are not complete (--ft-checkpoint-dir)", ""),
    "nvrx_cycles_without_progress": ("cycles in a row without a new checkpoint", "no_progress"),
    "nvrx_cycle_steps": ("steps that each rank has made in this cycle, at least", "progress.steps"),
    "nvrx_step_seconds": (
        "median of the ranks' step times; where they do not tell, by checkpoints",
        "",
    ),
    "nvrx_step_age_seconds": (
        "since the last step of the rank that made one last",
        "progress.still_s",
    ),
    "nvrx_slow_ranks": ("ranks that are slow now, at most 8", ""),
    "nvrx_slow_lost_seconds": ("what these have cost the job so far", "slow.lost_s"),
    "nvrx_allocation_end_timestamp_seconds": (
        "when the time limit ends the job",
        "allocation_ends",
    ),
    "nvrx_node_seconds_total": ("time of all nodes by bucket, counted until the last plan", ""),
    "nvrx_allocated_node_seconds": ("time of all nodes until now", "account.allocated_s"),
    "nvrx_productive_node_seconds": (
        "productive part of it; lost work is taken off again",
        "account.productive_s",
    ),
    "nvrx_productive_share_ratio": ("productive / allocated node-seconds, spares included", ""),
    "nvrx_exporter_scan_timestamp_seconds": (
        "when the log trees of a --log-dir were last read to the end",
        "",
    ),
    "nvrx_exporter_scan_duration_seconds": ("how long that took", ""),
    "nvrx_exporter_runs": ("runs that are shown", ""),
    "nvrx_exporter_unreadable_runs": (
        "runs with a status.json that is damaged, or of a later version",
        "",
    ),
}


class Sample(NamedTuple):
    """One value of a metric."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(found: Mapping[str, Any]) -> list[Sample]:
    """The samples of one run. `found`: content of its status.json; raises KeyError, TypeError, ValueError and
    AttributeError for what is none."""
    who = {"job_id": found["job"]["job"], "run": found["job"]["run"]}
    rows = islice(chain(_single(found), _labelled(found)), _MOST_SAMPLES + 1)
    told = [
        Sample(name, _written(who | labels), value + 0.0)
        for name, value, labels in rows
        if value is not None
    ]
    if len(told) > _MOST_SAMPLES:
        raise ValueError("it has too many series")
    return told


def _written(labels: Mapping[str, Any]) -> dict[str, str]:
    """The labels as they are sent, so that none are equal there that differ here."""
    texts = {name: str(label).encode("utf-8", "replace").decode() for name, label in labels.items()}
    if max(map(len, texts.values())) > _LABEL_CHARS:
        raise ValueError("a name in it is too long")
    return texts


_Row = tuple[str, "float | None", dict[str, str]]  # None: not known


def _single(found: Mapping[str, Any]) -> Iterator[_Row]:
    """One value each."""
    for name, (_, path) in METRICS.items():
        if path:
            yield name, _at(path, found), {}
    restarts = [one for one in found["incidents"] if one["done"] == "restarted"]
    if restarts:
        yield "nvrx_last_restart_timestamp_seconds", restarts[-1]["time"], {}
        yield "nvrx_last_restart_duration_seconds", restarts[-1]["down_s"], {}
    checkpoint = found.get("checkpoint") or {}
    if "torn" in checkpoint:
        yield "nvrx_checkpoints_torn", len(checkpoint["torn"]), {}
    step_s = _at("progress.step_s", found) or checkpoint.get("iteration_s")
    yield "nvrx_step_seconds", step_s, {}
    yield "nvrx_slow_ranks", len(_at("slow.ranks", found) or ()), {}
    account = found.get("account")
    if account:  # restarts are not told before all were counted
        yield "nvrx_restarts_total", max(0, found["cycle"]), {}
        if account["allocated_s"]:
            yield (
                "nvrx_productive_share_ratio",
                account["productive_s"] / account["allocated_s"],
                {},
            )


def _at(path: str, found: Mapping[str, Any]) -> Any:
    """The value behind these keys; None where one of them is missing."""
    value: Any = found
    for key in path.split("."):
        value = (value or {}).get(key)
    return value


def _labelled(found: Mapping[str, Any]) -> Iterator[_Row]:
    """Several values each."""
    job = found["job"]
    account = found["account"] or {"node_seconds": {}}
    yield (
        "nvrx_job_info",
        1,
        {name: str(job[name])[:_LABEL_CHARS] for name in ("name", "user", "partition")},
    )
    for state in STATES:
        yield "nvrx_job_state", found["state"] == state, {"state": state}
    for reason, (_, holds) in rules(found, found["written"] - found["since"]).items():
        yield "nvrx_needs_person", holds and found["end"] is None, {"reason": reason}
    for kind in FaultKind:
        yield (
            "nvrx_restarts_used",
            found["restarts"]["by_kind"].get(kind.value, 0),
            {"kind": kind.value},
        )
    for state in _NODES:
        yield "nvrx_nodes", found["nodes"][state], {"state": state}
    for bucket, took_s in account["node_seconds"].items():
        yield "nvrx_node_seconds_total", took_s, {"bucket": bucket}


# --- text of Prometheus -----------------------------------------------------------------------------------------------

_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def kind_of(name: str) -> str:
    """The type of a metric."""
    return "counter" if name.endswith("_total") else "gauge"


def line(one: Sample) -> str:
    """The sample in the text format."""
    labels = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in one.labels.items())
    return f"{one.name}{{{labels}}} {one.value!r}\n"


def exposition(lines: Iterable[tuple[str, str]]) -> bytes:
    """All of a scrape. `lines`: name and `line` of each sample, in any order; no series may be there twice."""
    families = defaultdict[str, list[str]](list)
    for name, sample in lines:
        families[name].append(sample)
    parts = []
    for name, (text, _) in METRICS.items():
        if name in families:
            parts += [f"# HELP {name} {text}\n# TYPE {name} {kind_of(name)}\n", *families[name]]
    return "".join(parts).encode("utf-8", "replace")


def text_of(found: Mapping[str, Any]) -> bytes:
    """The samples of one run in the text format."""
    return exposition((one.name, line(one)) for one in samples(found))


# --- OTLP -------------------------------------------------------------------------------------------------------------


def otlp(found: Mapping[str, Any], resource: Mapping[str, str], version: str) -> dict[str, Any]:
    """The samples of one run as ExportMetricsServiceRequest of OTLP 1.0, in its JSON form; names as in Prometheus."""
    times = {"timeUnixNano": _nanos(found["written"]), "startTimeUnixNano": _nanos(found["began"])}
    points = defaultdict[str, list[dict[str, Any]]](list)
    for one in samples(found):
        points[one.name].append(
            {"attributes": _attributes(one.labels), "asDouble": one.value, **times}
        )
    metrics = []
    for name, found_points in points.items():
        kind = kind_of(name)
        text = METRICS[name][0]
        data: dict[str, Any] = {"dataPoints": found_points}
        if kind == "counter":
            data |= {"aggregationTemporality": 2, "isMonotonic": True}  # 2: cumulative
        unit = "s" if "seconds" in name else "1" if name.endswith("_ratio") else ""
        metrics.append(
            {
                "name": name,
                "description": text,
                "unit": unit,
                "sum" if kind == "counter" else kind: data,
            }
        )
    scope = {"scope": {"name": "nvrx_slurm", "version": version}, "metrics": metrics}
    return {
        "resourceMetrics": [
            {"resource": {"attributes": _attributes(resource)}, "scopeMetrics": [scope]}
        ]
    }


def _nanos(unix_s: float) -> str:
    return str(int(unix_s * 1e6) * 1000)


def _attributes(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"key": name, "value": {"stringValue": text}} for name, text in labels.items()]
