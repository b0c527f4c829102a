"""What a step with one task per node gets of the job: all that the job has on the node. Pure.

A header may have a task per GPU. Then its options describe tasks that we do not start. srun takes them from its
environment; checked on 22.05 and 26.05.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist
from nvrx_slurm.slurm.env import Env

DEVICES_ENV = "NVRX_DEVICES"
# those that Slurm sets
_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
_SHARE = re.compile(r"S(?:LURM|RUN)_(?:GPUS(?:_PER_\w+)?|MEM_PER_\w+|\w+_PER_TASK)")
_BINDING = re.compile(
    r"S(?:LURM|RUN)_(?:NTASKS_PER_(?:CORE|GPU|SOCKET)|(?:CPU|GPU|MEM|TRES)_BIND\w*|HINT|THREADS_PER_CORE)"
)


def srun_env(env: Env) -> dict[str, str]:
    """The environment for srun, without shares and bindings: then the step has all that the job has.

    The header may describe other tasks, and sbatch passes on what the job that it is called in had.
    """
    return {
        name: value
        for name, value in env.items()
        if not (_SHARE.fullmatch(name) or _BINDING.fullmatch(name))
    }


def srun_options(env: Env) -> list[str]:
    """Ranks get the environment of the batch script, also after sbatch --export, and the shares."""
    kept = [
        f"{name}={value}"
        for name, value in sorted(env.items())
        if _SHARE.fullmatch(name) and "," not in value
    ]
    options = [f"--export={','.join(['ALL', *kept])}"]
    return [*options, *_gpus_by_tasks(env)]


def own_devices(env: Env, nodes: int) -> str:
    """The lists of devices that the user set, as "NAME=0,1 NAME=0,1"; srun gives the step lists of Slurm's own.

    Slurm's are the job's numbers, or 0, 1, ... in a cgroup. Names, other than numbers, are those of one node's devices.
    """
    given = env.get("SLURM_GPUS_ON_NODE", "")
    if not given.isdecimal():
        return ""
    in_a_cgroup = ",".join(map(str, range(int(given))))
    of_slurm = (env.get("SLURM_JOB_GPUS"), in_a_cgroup)
    own = []
    for name in _LISTS:
        value = env.get(name)
        if value is None:
            continue
        value = value.replace(" ", "")
        names = re.search(r"[^0-9,]", value)
        if value not in of_slurm and (nodes == 1 or not names):
            own.append(f"{name}={value}")
    return " ".join(own)


def take_own_devices(env: MutableMapping[str, str]) -> None:
    """Put the lists of `own_devices` in the place of Slurm's. Raises UsageError where Slurm gave other devices."""
    for pair in env.get(DEVICES_ENV, "").split():
        name, _, value = pair.partition("=")
        given = env.get(name, value)
        wanted = set(filter(None, value.split(",")))
        if not wanted <= set(given.split(",")):
            raise UsageError(
                f"{name}={value} is set where nvrx-run was started, but Slurm gave the step {given} on this node;"
                f" unset {name}, or name devices that each node has"
            )
        env[name] = value


def lost(env: Env, usable_cpus: int, machine_cpus: int, of_front: bool = False) -> str:
    """A sentence where this task has a small part of what its job has on the node, else "". `of_front`: nvrx-run in
    the batch script has started its step."""
    found = []
    counts = nodelist.different_counts(env.get("SLURM_JOB_CPUS_PER_NODE") or "0")
    share = min(counts)
    if usable_cpus * 2 < min(share, machine_cpus):
        found.append(f"{usable_cpus} of {share} CPUs")
    given = env.get("SLURM_GPUS_ON_NODE", "")
    of_job = env.get("SLURM_JOB_GPUS", "")
    count = len(of_job.split(","))
    if given.isdecimal() and of_job and int(given) < count:
        found.append(f"{given} of {count} GPUs")
    if not found:
        return ""
    way = (
        "ask for all in the header, or by --srun-arg"
        if of_front
        else "start nvrx-run without srun, or leave options per task and --cpu-bind out of that srun"
    )
    return f"this task may use {' and '.join(found)} that the job has on its node; {way}"


def _gpus_by_tasks(env: Env) -> list[str]:
    """The job's GPUs where they were asked for per task, which srun would give our one task of each node."""
    per_task = re.search(r"gres/gpu[^,]*[=:](\d+)", env.get("SLURM_TRES_PER_TASK", ""))
    per_task = per_task or re.search(r"(?:^|:)(\d+)$", env.get("SLURM_GPUS_PER_TASK", ""))
    if not per_task:
        return []
    tasks = env.get("SLURM_TASKS_PER_NODE") or "1"
    counts = nodelist.different_counts(tasks)
    if len(counts) == 1:
        return [f"--gpus-per-node={int(per_task[1]) * counts.pop()}"]
    total = sum(count * nodes for count, nodes in nodelist.counts(tasks))
    return [f"--gpus={int(per_task[1]) * total}"]
