"""`--dry-run`: what would be started, where, with which environment. Needs neither Slurm nor a GPU."""

from __future__ import annotations

import os
import shlex
import sys

from nvrx_slurm import compat
from nvrx_slurm.cli.domains import planned
from nvrx_slurm.cli.front import step_argv
from nvrx_slurm.cli.log_tree import run_dir
from nvrx_slurm.cli.options import spelling
from nvrx_slurm.cli.place import Here, OnNode, Place, node_range, on_node, planned_allocation, workers_per_node
from nvrx_slurm.cli.worker import numa_bindings, worker_argv
from nvrx_slurm.config.layers import Config, Resolved
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.workers.worker_env import WorkerContract, rank_env
from nvrx_slurm.types import History, Node, Plan

_NODES_SHOWN = 8


def dry_run(resolved: Resolved, here: Here, script: str, args: tuple[str, ...]) -> str:
    """The srun line, the plan per rank of cycle 0, and the first worker's environment, as text."""
    config = resolved.config
    if here.place is Place.LOGIN:
        here = planned_allocation(config)
    nodes = node_range(config, here.slurm)
    nproc = workers_per_node(config, here.slurm, os.environ)
    directory = run_dir(config, here.slurm, os.environ)
    lines = [f"place: {here.place.value}"]
    if here.place is Place.LOGIN:
        lines.append(f"planned as inside an allocation of {nodes.max} nodes (--nnodes, --spares)")
    if here.place is not Place.TASK and not config.launch.standalone:
        flags = sys.argv[1 : len(sys.argv) - len(args) - 1]  # the rest is the script and its arguments
        words = [*(word for word in flags if spelling(word) != "--dry-run"), script, *args]
        line = shlex.join(step_argv(config, here, directory, words))
        lines += ["", "srun line (in a batch script or salloc shell):", f"  {line}"]
    lines += ["", f"plan of cycle 0: {nodes.min} active nodes x {nproc} ranks, {nodes.max - nodes.min} spare nodes"]
    lines += _node_rows(config, here, nodes, nproc)
    lines += ["", f"logs: {directory.path}", "worker: " + shlex.join(worker_argv(config, script, args))]
    local = on_node(here.slurm, nproc, os.environ)
    lines += _numa_rows(config, nproc, local)
    lines += ["", "environment of rank 0, besides what is inherited:"]
    contract = WorkerContract(
        directory.job_id, config.launch.role, str(directory.path), first_local=local.first, local_world=local.world
    )
    env = _first_env(config, contract, nodes.min, nproc)
    lines += [f"  {name}={value}" for name, value in env.items()]
    return "\n".join(lines)


def _node_rows(config: Config, here: Here, nodes: NodeRange, nproc: int) -> list[str]:
    names = here.slurm.agents if here.slurm is not None else ()
    group_ranks, notes = {index: index for index in range(nodes.min)}, []
    if config.ft.segment is not None:
        found = planned(names, nodes.min, config.ft.segment)
        if isinstance(found, str):
            notes = [f"  {found}"]
        else:
            group_ranks = {int(index): group_rank for group_rank, index in enumerate(found.active)}
    rows = []
    for index in range(min(nodes.max, _NODES_SHOWN)):
        name = names[index] if index < len(names) else f"node {index}"
        first = group_ranks[index] * nproc if index in group_ranks else -1
        ranks = f"ranks {first}..{first + nproc - 1}" if first >= 0 else "hot spare"
        rows.append(f"  {name:16} infra rank {index:<6} {ranks}")
    return rows + (["  ..."] if nodes.max > _NODES_SHOWN else []) + notes


def _numa_rows(config: Config, nproc: int, local: OnNode) -> list[str]:
    try:
        found = numa_bindings(config, nproc, os.environ, local)
    except UsageError as error:  # the compute nodes may have what a login node lacks
        return ["", f"NUMA binding, if the workers ran on this node: {error}"]
    rows = [
        f"  local rank {rank}: {shlex.join(where.prefix) or '-'}  ({where.text})" for rank, where in enumerate(found)
    ]
    return ["", "NUMA binding, if the workers ran on this node:", *rows] if rows else []


def _first_env(config: Config, contract: WorkerContract, active: int, nproc: int) -> dict[str, str]:
    node = Node("0", 0, "node 0", "", nproc)
    plan = Plan(1, 0, History(), config.launch.max_restarts, active, active * nproc, "<first active node>", 0, 0, 0)
    env = rank_env(contract, plan, node, 0, "<its error file>")
    path = {"PYTHONPATH": compat.python_path(os.environ)} if config.launch.compat else {}
    return {**env, **path, "MASTER_PORT": "<free port of that node, fresh per cycle>"}
