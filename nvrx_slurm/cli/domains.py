"""The domain of this node, for `--ft-segment`: the nodes of a segment are all of one domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nvrx_slurm.config.layers import Config
from nvrx_slurm.core.coordinator.gathering import Placement, place
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.system.hardware import Absent, HardwareError
from nvrx_slurm.types import Node


def node_domain(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> str:
    """This node's domain, "" where the job has no segments. Asks NVML, for at most 10 s.

    By NVRX_REPLACEMENT_GROUP_ID, else the ClusterUUID of its GPUs, its block in Slurm's topology, or its task of a job
    array whose tasks form one job. Raises UsageError where there is none, or NVML does not say.
    """
    if config.ft.segment is None:
        return ""
    if config.launch.replacement_group_id is not None:
        return config.launch.replacement_group_id
    from nvrx_slurm.system import gpu_facts  # most jobs have no segments

    try:
        return next(iter(gpu_facts.cluster_uuids(env).values()))
    except Absent as why:
        nvlink = str(why)
    except HardwareError as error:
        raise UsageError(f"--ft-segment needs this node's NVLink domain: {error}; drain the node") from None
    if slurm is not None and slurm.block:
        return f"block {slurm.block}"
    if slurm is not None and slurm.array_task_id >= 0 and config.launch.endpoint is not None:
        return f"array task {slurm.array_task_id}"
    raise UsageError(
        f"--ft-segment {config.ft.segment} needs this node's NVLink domain, and there is none ({nvlink}), nor a block"
        " of Slurm's topology; name it with NVRX_REPLACEMENT_GROUP_ID, or leave --ft-segment out"
    )


def planned(names: Sequence[str], active: int, segment: int) -> Placement | str:
    """For --dry-run: the first placement of these nodes, by number, as far as Slurm tells; else a sentence."""
    block_of = _blocks() if names else {}
    if not names or not all(name in block_of for name in names):
        return "the domains of the nodes are known only on them, so other nodes may be active"
    nodes = [Node(str(rank), rank, name, "", 1, domain=block_of[name]) for rank, name in enumerate(names)]
    found = place(nodes, {}, active, segment)
    return found or f"Slurm's blocks do not have {active // segment} complete segments of {segment} among these nodes"


def _blocks() -> dict[str, str]:
    """The block of each node in Slurm's topology; {} where it has none, or does not answer."""
    try:
        return connect().blocks()
    except SlurmError:
        return {}
