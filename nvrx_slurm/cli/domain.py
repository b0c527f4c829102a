"""The NVLink domain of this node, for --ft-segment: as its GPUs, Slurm's topology or its job array tell."""

from __future__ import annotations

from collections.abc import Mapping

from nvrx_slurm.config.layers import Config
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.system.gpu_facts import cluster_uuids
from nvrx_slurm.system.hardware import Absent, HardwareError


def domain(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> str:
    """Name of the domain. Blocks for NVML. Raises UsageError where nothing tells it."""
    uuids, why = _of_gpus(env)
    if len(uuids) > 1:
        raise UsageError(
            f"the GPUs of this node are in several NVLink domains ({', '.join(uuids)}); --ft-segment needs one"
        )
    if uuids:
        return uuids[0]
    if config.launch.replacement_group_id:
        return f"group {config.launch.replacement_group_id}"
    if slurm is not None and slurm.block:
        return f"block {slurm.block}"
    if slurm is not None and slurm.array_task_id >= 0 and config.launch.endpoint is not None:
        return f"array task {slurm.array_task_id}"
    raise UsageError(
        f"--ft-segment {config.ft.segment}: the NVLink domain of this node is not known ({why}; Slurm tells no block);"
        " leave the flag out, or set NVRX_REPLACEMENT_GROUP_ID to the same text on the nodes of a domain"
    )


def _of_gpus(env: Mapping[str, str]) -> tuple[list[str], str]:
    try:
        return sorted(set(cluster_uuids(env).values())), ""
    except (Absent, HardwareError) as error:
        return [], str(error)
