"""GPUs that somebody still uses: memory in use and processes that belong to no job that may be there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

from nvrx_slurm.health.check import NVML, Check, Expected, NodeView, Setting, Verdict, listed
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
    this is no job's script. `why`: no memory in use is known."""

    used_mb: Mapping[str, float]
    processes: Mapping[str, list[Process]]
    ours: frozenset[str] | None
    why: str = ""


def gather(node: NodeView, expected: Expected) -> Facts:
    """A look every second for `gpu_settle_s`, until nothing is wrong: what was killed may be on its way out."""
    until_s = min(time.monotonic() + expected["gpu_settle_s"], node.deadline_s - _MARGIN_S)
    while True:
        facts = _look(node)
        if judge(facts, expected)[0] is not Verdict.FAIL or time.monotonic() + _APART_S > until_s:
            return facts
        node.doing("waiting for processes on GPUs to end")
        time.sleep(_APART_S)


def _look(node: NodeView) -> Facts:
    try:
        env = chosen(node)
        pids = gpu_facts.processes(env, say=node.doing)
    except HardwareError as failure:
        raise ValueError(str(failure)) from None
    try:
        used_mb, why = gpus.memory_used_mb(env, say=node.doing), ""
    except Absent:  # GPUs that have no memory of their own
        used_mb, why = {}, ""
    except HardwareError as failure:
        used_mb, why = {}, str(failure)
    found = {gpu: [who for pid in some if (who := _process(node, pid))] for gpu, some in pids.items()}
    return Facts(used_mb, found, may_be_there(node.env), why)


def chosen(node: NodeView) -> Mapping[str, str]:
    """In a script of Slurm the GPUs that it gave the job, by their device files; else those we may use."""
    given = node.env.get("SLURM_JOB_GPUS", "").split(",") if in_script(node.env) else []
    minors = [int(word) for word in given if word.strip().isdecimal()]
    return gpu_facts.with_minors(minors, say=node.doing) if minors else visible(node)


def may_be_there(env: Mapping[str, str]) -> frozenset[str] | None:
    """Jobs whose processes are no left-overs on the GPUs looked at.

    In the prolog of a job its own, in its epilog none; of any job where Slurm gave the job no GPUs of its own.
    """
    if not in_script(env) or not env.get("SLURM_JOB_GPUS"):
        return None
    if env.get("SLURM_SCRIPT_CONTEXT", "").startswith("epilog") or env.get("SLURM_JOB_EXIT_CODE"):
        return frozenset()
    return frozenset(env[name] for name in ("SLURM_JOB_ID", "SLURM_JOB_SLUID") if env.get(name))


def _process(node: NodeView, pid: int) -> Process | None:
    """None if it has ended. Where Slurm tracks no jobs by cgroup, the environment says which job it is of."""
    try:
        name = node.text(f"/proc/{pid}/comm", 64).strip()
        return Process(pid, name, frozenset(jobs.of_cgroup(node, pid) or _of_environment(node, pid)))
    except (FileNotFoundError, ProcessLookupError):
        return None


def _of_environment(node: NodeView, pid: int) -> set[str]:
    try:
        return jobs.of_environment(node, pid)
    except OSError:  # somebody else's
        return set()


def judge(facts: Facts, expected: Expected) -> tuple[Verdict, str]:
    """Fails for processes that may not be there, and for memory in use on a GPU without any process that may."""
    strange: dict[str, str] = {}
    for gpu, processes in facts.processes.items():
        for process in processes:
            if not _may(process, facts, expected):
                strange.setdefault(f"{process.name} ({process.pid})", gpu)
    if strange:
        return Verdict.FAIL, f"left over: {listed(f'{who} on {gpu}' for who, gpu in strange.items())}"
    most = expected["gpu_memory_used_mb"]
    held = [f"{gpu} holds {mb:.0f} MiB" for gpu, mb in facts.used_mb.items() if mb > most and not _in_use(gpu, facts)]
    if held:
        return Verdict.FAIL, f"in use without a process: {listed(held)}"
    untold = [gpu for gpu in facts.processes if gpu not in facts.used_mb and not _in_use(gpu, facts)]
    if untold and (facts.used_mb or facts.why):
        why = facts.why or f"{listed(untold)} does not tell its memory in use"
        return Verdict.UNKNOWN, f"no process is left over, but {why}"
    return Verdict.PASS, f"nothing is left over on {len(facts.processes)} GPUs"


def _in_use(gpu: str, facts: Facts) -> bool:
    return bool(facts.processes.get(gpu))


def _may(process: Process, facts: Facts, expected: Expected) -> bool:
    if process.name in expected["gpu_processes"]:
        return True
    return bool(process.jobs if facts.ours is None else process.jobs & facts.ours)


_SERVICES = ("nvidia-persiste", "nv-hostengine", "nvidia-cuda-mps", "Xorg", "dcgm-exporter")

CHECKS = (
    Check(
        name="gpu-processes",
        lane=NVML,
        reads="NVML: processes and memory in use; /proc/PID/comm and cgroup of those; SLURM_JOB_GPUS",
        fails="A process of no job is on a GPU (in a job's prolog and epilog: of another job, on its GPUs), or memory"
        " is in use without a process.",
        gather=gather,
        judge=judge,
        per_job="SLURM_JOB_GPUS",
        contexts=("prolog", "epilog", "manual"),
        settings=(
            Setting("gpu_memory_used_mb", "number", 512.0, "MiB that may be in use on a GPU without a process"),
            Setting("gpu_settle_s", "seconds", 2.5, "how long what was killed may take to be gone, in seconds"),
            Setting("gpu_processes", "names", _SERVICES, "processes that may be on GPUs, by name (15 characters)"),
        ),
        budget_s=5.0,
    ),
)
