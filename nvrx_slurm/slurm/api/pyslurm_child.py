"""The program in which pyslurm runs: its import can end a process, and it changes how libraries are loaded.

Reads one request per line on stdin, {"call": NAME, "args": [...]}, and answers one line, {"ok": RESULT} or
{"error": TEXT}. Ends when stdin does. A request that takes longer than its alarm ends the process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

ALARM_S = 30  # above the bound of the parent, which kills this process; for a parent that is gone

# slurm_init would run at import, and end the process without a config
os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"
_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what libslurm prints is no answer

import pyslurm  # noqa: E402


def _job(job_id: int) -> dict[str, Any]:
    job = pyslurm.Job.load(job_id)
    runs = job.state == "RUNNING"
    left_s = math.inf if job.time_limit is None else float(job.run_time_remaining or 0)
    return {
        "job_id": job.id,
        "state": job.state,
        "reason": "" if job.state_reason in (None, "None") else job.state_reason,
        "nodes": job.allocated_nodes or "",
        "excluded": job.excluded_nodes or "",
        "restarts": job.requeue_count or 0,
        "requeue": bool(job.is_requeueable),
        "partition": job.partition or "",
        "reservation": job.reservation or "",
        "num_nodes": job.num_nodes or 0,
        "batch_host": job.batch_host or "",
        "time_left_s": left_s if runs else None,
        "exit_code": 128 + job.exit_code_signal if job.exit_code_signal else job.exit_code or 0,
        "submitted_s": job.submit_time or 0,
        "started_s": (job.start_time or 0) if job.state != "PENDING" else 0,
    }


def _nodes(names: list[str]) -> list[dict[str, Any]]:
    nodes = [pyslurm.Node.load(names[0])] if len(names) == 1 else pyslurm.Nodes.load().values()
    wanted = set(names)
    return [
        {
            "name": node.name,
            "states": node.state.replace("*", "").split("+"),
            "reason": node.reason or "",
            # Slurm remembers it also after the reason
            "reason_by": node.reason_user or "" if node.reason else "",
            "address": node.address or "",
            "port": node.slurmd_port or 0,
            "partitions": node.partitions or [],
        }
        for node in nodes
        if not wanted or node.name in wanted
    ]


_CALLS: dict[str, Callable[..., Any]] = {
    "job": _job,
    "nodes": _nodes,
    "cancel": lambda job_id: pyslurm.Job(job_id).cancel(),
    "requeue": lambda job_id: pyslurm.Job(job_id).requeue(),
    "version": lambda: [pyslurm.__version__, pyslurm.slurmctld.Config.load().version],
}


def _answer(line: str) -> dict[str, Any]:
    try:
        request = json.loads(line)
        return {"ok": _CALLS[request["call"]](*request["args"])}
    except (pyslurm.PyslurmError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {"error": str(error) or type(error).__name__}


def main(_arguments: list[str]) -> None:
    """Serve until stdin ends."""
    signal.alarm(ALARM_S)
    pyslurm.slurm_init()
    for line in sys.stdin:
        signal.alarm(ALARM_S)
        print(json.dumps(_answer(line)), file=_out, flush=True)
        signal.alarm(0)
