"""GPUs still in use: memory, and processes of no job that may be there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from nvrx_slurm.health.check import NVML, Expected, NodeView, Setting, Verdict, check, judged, listed
from nvrx_slurm.health.checks.gpu import in_script, visible
from nvrx_slurm.slurm import jobs
from nvrx_slurm.system import gpu_facts, gpus
from nvrx_slurm.system.hardware import Absent, HardwareError

_APART_S = 1.0  # between two looks
_MARGIN_S = 0.5


class Process(NamedTuple):
    """A process on a GPU. `jobs`: Slurm jobs (ids as in cgroups) that it belongs to."""

    pid: int
    name: str
    jobs: frozenset[str]


class Facts(NamedTuple):
    """`used_mb` and `processes` by GPU. `ours`: the jobs that may be there; None: any job, since jobs share the node or
    this is not a script of a job. `why`: reason why no memory in use is known."""

    used_mb: Mapping[str, float]
    processes: Mapping[str, list[Process]]
    ours: frozenset[str] | None
    why: str = ""


def _read(node: NodeView) -> Facts:
    env = chosen(node)
    pids = gpu_facts.processes(env, say=node.doing)
    try:
        used_mb, why = gpus.memory_used_mb(env, say=node.doing), ""
    except Absent:  # GPUs that have no memory of their own
        used_mb, why = {}, ""
    except HardwareError as failure:
        used_mb, why = {}, str(failure)
    found = {gpu: [one for pid in some if (one := _process(node, pid))] for gpu, some in pids.items()}
    return Facts(used_mb, found, may_be_there(node.env), why)


def chosen(node: NodeView) -> Mapping[str, str]:
    """In a script of Slurm the GPUs that it gave the job, by their device files; else those we may use."""
    given = node.env.get("SLURM_JOB_GPUS", "").split(",") if in_script(node.env) else []
    minors = [int(word) for word in given if word.strip().isdecimal()]
    return gpu_facts.with_minors(minors, say=node.doing) if minors else visible(node)


def may_be_there(env: Mapping[str, str]) -> frozenset[str] | None:
    """Jobs whose processes may be on the GPUs: in a prolog the job itself, in its epilog none.

    None, that is any job, where Slurm gave the job no GPUs of its own.
    """
    if not in_script(env) or not env.get("SLURM_JOB_GPUS"):
        return None
    if env.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog") or env.get("SLURM_JOB_EXIT_CODE"):
        return frozenset()
    return frozenset(env[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_SLUID") if env.get(name))


def _process(node: NodeView, pid: int) -> Process | None:
    """None if it has ended. Where Slurm tracks no jobs by cgroup, the environment names the job."""
    try:
        name = node.text(f"/proc/{pid}/comm", 64).strip()
        return Process(pid, name, frozenset(jobs.of_cgroup(node, pid) or _of_environment(node, pid)))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _of_environment(node: NodeView, pid: int) -> set[str]:
    try:
        return jobs.of_environment(node, pid)
    except OSError:  # of another user
        return set()


def _may(process: Process, facts: Facts, expected: Expected) -> bool:
    if process.name in expected["gpu_processes"]:
        return True
    return bool(process.jobs if facts.ours is None else process.jobs & facts.ours)


def gather(node: NodeView, expected: Expected) -> Facts:
    """A look every second for `gpu_settle_s`, until nothing is wrong: a killed process may still be ending."""
    until_s = min(time.monotonic() + expected["gpu_settle_s"], node.deadline_s - _MARGIN_S)
    while True:
        facts = _read(node)
        if gpu_processes.judge(facts, expected)[0] is not Verdict.FAIL or time.monotonic() + _APART_S > until_s:
            return facts
        node.doing("waiting for processes on GPUs to end")
        time.sleep(_APART_S)


_SERVICES = ("nvidia-persiste", "nv-hostengine", "nvidia-cuda-mps", "Xorg", "dcgm-exporter")
_SETTINGS = (
    Setting("gpu_memory_used_mb", "number", 512.0, "MiB that may be in use on a GPU without a process"),
    Setting("gpu_settle_s", "seconds", 2.5, "how long a killed process may take to be gone, in seconds"),
    Setting("gpu_processes", "names", _SERVICES, "processes that may be on GPUs, by name (15 characters)"),
)


@check(
    "gpu-processes",
    gather,
    "NVML: processes and memory in use; /proc/PID/comm and cgroup of those; SLURM_JOB_GPUS",
    group=NVML,
    contexts=("prolog", "epilog", "manual"),
    settings=_SETTINGS,
    budget_s=5.0,
)
def gpu_processes(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """A process of no job is on a GPU (in a job's prolog and epilog: of another job, on its GPUs), or memory is in use
    without a process."""
    strange: dict[str, str] = {}
    for gpu, processes in facts.processes.items():
        for process in processes:
            if not _may(process, facts, expected):
                strange.setdefault(f"{process.name} ({process.pid})", gpu)
    wrong = [f"left over: {name} on {gpu}" for name, gpu in strange.items()]
    most, used_mb = expected["gpu_memory_used_mb"], facts.used_mb
    held = [gpu for gpu, mb in used_mb.items() if mb > most and not facts.processes.get(gpu)]
    wrong += [f"in use without a process: {gpu} holds {used_mb[gpu]:.0f} MiB" for gpu in held]
    untold = [gpu for gpu, some in facts.processes.items() if not some and gpu not in used_mb]
    untold = untold if used_mb or facts.why else []  # GPUs without memory of their own tell none
    unknown = [f"no process is left over, but {facts.why or f'{listed(untold)} does not tell its memory'}"]
    return judged(wrong, f"no process is left over on {len(facts.processes)} GPUs", unknown if untold else [])


CHECKS = (gpu_processes,)
