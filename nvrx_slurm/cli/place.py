"""In which place nvrx-run was started, and how many nodes and workers the job has there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from nvrx_slurm.config.layers import Config
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import conf
from nvrx_slurm.slurm.env import SlurmContext, detect
from nvrx_slurm.system import gpus


class Place(Enum):
    """The four places that `nvrx-run` knows."""

    TASK = "a task of an srun step: the agent of this node"
    BATCH = "a batch script or salloc shell: starts the step and waits for it"
    LOGIN = "a login node: says how to submit"
    ALONE = "no Slurm: this node, or several by --nnodes and --rdzv-endpoint"


@dataclass(frozen=True)
class Here:
    """The place and what Slurm says about it (None outside a Slurm job)."""

    place: Place
    slurm: SlurmContext | None


def find_place(config: Config, env: Mapping[str, str]) -> Here:
    """Decide by the environment. Raises UsageError for a step with more than one task per node."""
    launch = config.launch
    if launch.standalone:
        return Here(Place.ALONE, None)
    slurm = detect(env, launch.enable_multi_launchers_per_node)
    if slurm is not None:
        return Here(Place.TASK if slurm.step_id >= 0 else Place.BATCH, slurm)
    by_hand = launch.node_rank is not None or launch.endpoint is not None
    by_hand |= launch.nnodes is not None and not launch.dry_run
    login = shutil.which("srun") is not None and conf.find(env) is not None
    return Here(Place.LOGIN if login and not by_hand else Place.ALONE, None)


def planned_allocation(config: Config) -> Here:
    """A login node as if inside the allocation that --nnodes and --spares ask for; for --dry-run."""
    wanted = config.launch.nnodes or NodeRange(1, 1)
    nodes = max(wanted.max, wanted.min + (config.launch.spares or 0))
    return Here(Place.LOGIN, SlurmContext(0, "<job id>", nnodes=nodes))


def node_range(config: Config, slurm: SlurmContext | None) -> NodeRange:
    """MIN and MAX nodes. Inside Slurm all nodes of the step beyond MIN are spares.

    Raises UsageError where the allocation has too few nodes.
    """
    nodes = config.launch.node_range(None if slurm is None else slurm.nnodes)
    if slurm is None or config.launch.endpoint is not None:
        return nodes
    needed = nodes.min + (config.launch.spares or 0)
    if needed > slurm.nnodes:
        raise UsageError(
            f"--nnodes and --spares need at least {needed} nodes but the allocation has {slurm.nnodes};"
            " ask Slurm for more"
        )
    return NodeRange(nodes.min, slurm.nnodes)


def workers_per_node(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> int:
    """The number behind --nproc-per-node. Raises UsageError for `gpu` where there is none, and for too few workers."""
    nproc = config.launch.nproc_per_node
    if nproc is None:
        nproc = max(1, slurm.gpus_per_node // slurm.launchers) if slurm is not None else 1
    elif isinstance(nproc, str):
        found = 0 if nproc == "cpu" else gpus.count(env)
        if found == 0 and nproc == "gpu":
            raise UsageError("--nproc-per-node=gpu, but NVML shows no GPU on this node; give a number, or `cpu`")
        nproc = found or len(os.sched_getaffinity(0))
    config.launch.check_local_ranks(nproc)
    return nproc
