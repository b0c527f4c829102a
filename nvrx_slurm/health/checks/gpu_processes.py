"""GPUs still in use: memory, and processes of no job that may be there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from nvrx_slurm.health.check import (
    NVML,
    Expected,
    Judgement,
    NodeView,
    SiteKey,
    Verdict,
    check,
    judged,
)
from nvrx_slurm.health.checks.gpu import in_script, visible
from nvrx_slurm.slurm import jobs
from nvrx_slurm.system import gpu_facts, gpus
from nvrx_slurm.system.hardware import Absent, HardwareError

_APART_S = 1.0  # between two readings
_MARGIN_S = 0.5


class GpuUse(NamedTuple):
    """By GPU: MiB in use, and "name (pid)" of each process with whether it may be there. `why`: reason why no memory is
    known."""

    used_mb: Mapping[str, float]
    processes: Mapping[str, Mapping[str, bool]]
    why: str = ""


def gpu_use(node: NodeView, expected: Expected) -> GpuUse:
    """Who uses the GPUs of this job, or of this node, now. Raises Absent and HardwareError."""
    env, allowed = chosen(node), may_be_there(node.env)
    processes: dict[str, dict[str, bool]] = {}
    for gpu, pids in gpu_facts.processes(env, say=node.doing).items():
        processes[gpu] = dict(
            found for pid in pids if (found := _process(node, pid, allowed, expected))
        )
    try:
        return GpuUse(gpus.memory_used_mb(env, say=node.doing), processes)
    except Absent:  # GPUs that have no memory of their own
        return GpuUse({}, processes)
    except HardwareError as failure:
        return GpuUse({}, processes, str(failure))


def chosen(node: NodeView) -> gpus.Env:
    """The GPUs to look at: in a script of Slurm those that it gave the job, by their device files; else those we may
    use."""
    given = node.env.get("SLURM_JOB_GPUS", "").split(",") if in_script(node.env) else []
    minors = [int(word) for word in given if word.strip().isdecimal()]
    return gpu_facts.with_minors(minors, say=node.doing) if minors else visible(node)


def may_be_there(env: gpus.Env) -> frozenset[str] | None:
    """Jobs whose processes may be on the GPUs: in a prolog the job itself, in its epilog none.

    None, that is any job, where Slurm gave the job no GPUs of its own.
    """
    if not in_script(env) or not env.get("SLURM_JOB_GPUS"):
        return None
    if env.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog") or env.get("SLURM_JOB_EXIT_CODE"):
        return frozenset()
    return frozenset(env[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_SLUID") if env.get(name))


def _process(
    node: NodeView, pid: int, allowed: frozenset[str] | None, expected: Expected
) -> tuple[str, bool] | None:
    """("name (pid)", whether it may be there); None if it has ended."""
    try:
        name = node.text(f"/proc/{pid}/comm", 64).strip()
        of_jobs = jobs.of_cgroup(node, pid)
    except (FileNotFoundError, ProcessLookupError):
        return None
    may = bool(of_jobs if allowed is None else of_jobs & allowed)
    return f"{name} ({pid})", may or name in expected["gpu_processes"]


_SERVICES = ("nvidia-persiste", "nv-hostengine", "nvidia-cuda-mps", "Xorg", "dcgm-exporter")


@check(
    "gpu-processes",
    "NVML: processes and memory in use; /proc/PID/comm and cgroup of those; SLURM_JOB_GPUS",
    group=NVML,
    contexts=("prolog", "epilog", "manual"),
    settings=(
        SiteKey(
            "gpu_memory_used_mb",
            "number",
            512.0,
            "MiB that may be in use on a GPU without a process",
        ),
        SiteKey(
            "gpu_settle_s",
            "seconds",
            2.5,
            "how long a killed process may take to be gone, in seconds",
        ),
        SiteKey(
            "gpu_processes",
            "names",
            _SERVICES,
            "processes that may be on GPUs, by name (15 characters)",
        ),
    ),
    budget_s=5.0,
)
def gpu_processes(node: NodeView, expected: Expected) -> Judgement:
    """A process of no job is on a GPU (in a job's prolog and epilog: of another job, on its GPUs), or memory is in use
    without a process."""
    until_s = min(time.monotonic() + expected["gpu_settle_s"], node.deadline_s - _MARGIN_S)
    while True:  # until nothing is wrong: a killed process may still be ending
        verdict, text = judge(gpu_use(node, expected), expected)
        if verdict is not Verdict.FAIL or time.monotonic() + _APART_S > until_s:
            return verdict, text
        node.doing("waiting for processes on GPUs to end")
        time.sleep(_APART_S)


def judge(use: GpuUse, expected: Expected) -> Judgement:
    """The verdict by one reading."""
    left = {
        name: gpu for gpu, found in use.processes.items() for name, may in found.items() if not may
    }
    wrong = [f"left over: {name} on {gpu}" for name, gpu in left.items()]
    for gpu, mb in use.used_mb.items():
        if mb > expected["gpu_memory_used_mb"] and not use.processes.get(gpu):
            wrong.append(f"in use without a process: {gpu} holds {mb:.0f} MiB")
    is_used = any(use.processes.values())
    unknown = [f"no process is left over, but {use.why}"] if use.why and not is_used else []
    return judged(wrong, f"no process is left over on {len(use.processes)} GPUs", unknown)


CHECKS = (gpu_processes,)
