"""`--dry-run`: what would be started, where, with which environment. Needs neither Slurm nor a GPU."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace

from nvrx_slurm.agent.worker_env import WorkerContract, rank_env
from nvrx_slurm.cli.front import step_argv
from nvrx_slurm.cli.job import segment_of
from nvrx_slurm.cli.log_tree import run_dir
from nvrx_slurm.cli.options import spelling
from nvrx_slurm.cli.place import Here, Place, node_range, planned_allocation, workers_per_node
from nvrx_slurm.cli.worker import numa_bindings, worker_argv
from nvrx_slurm.config.layers import Config, Resolved
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.core.job.placement import place
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.api.facts import SlurmError
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
    lines += _numa_rows(config, nproc)
    lines += ["", "environment of rank 0, besides what is inherited:"]
    env = _first_env(config, directory.job_id, str(directory.path), nodes.min, nproc)
    lines += [f"  {name}={value}" for name, value in env.items()]
    return "\n".join(lines)


def _node_rows(config: Config, here: Here, wanted: NodeRange, nproc: int) -> list[str]:
    names = here.slurm.nodes if here.slurm is not None else ()
    names += tuple(f"node {index}" for index in range(len(names), wanted.max))
    nodes = [Node(str(rank), rank, name, "", nproc) for rank, name in enumerate(names[: wanted.max])]
    segment = segment_of(config, wanted)
    if segment:
        blocks = _blocks(here)
        if not blocks:
            return ["  by --ft-segment: NVLink domains are known on the nodes only"]
        nodes = [replace(node, domain=blocks.get(node.host, node.host)) for node in nodes]
    placement = place(nodes, {}, wanted.min, segment)
    if placement is None:
        return [f"  there are no {wanted.min // segment} complete segments of {segment} nodes in Slurm's blocks"]
    group_rank = {node_id: rank for rank, node_id in enumerate(placement.active)}
    rows = []
    for node in nodes[: wanted.max if segment else _NODES_SHOWN]:
        at = group_rank.get(node.node_id)
        ranks = "hot spare" if at is None else f"ranks {at * nproc}..{(at + 1) * nproc - 1}"
        rows.append(f"  {node.host:16} infra rank {node.infra_rank:<6} {ranks} {node.domain}".rstrip())
    return rows + (["  ..."] if len(rows) < len(nodes) else [])


def _blocks(here: Here) -> dict[str, str]:
    """The block of each node in Slurm's topology; {} where Slurm knows none."""
    if here.slurm is None or not here.slurm.nodes:
        return {}
    try:
        return connect().blocks()
    except SlurmError:
        return {}


def _numa_rows(config: Config, nproc: int) -> list[str]:
    try:
        found = numa_bindings(config, nproc, os.environ)
    except UsageError as error:  # the compute nodes may have what a login node lacks
        return ["", f"NUMA binding, if the workers ran on this node: {error}"]
    rows = [
        f"  local rank {rank}: {shlex.join(where.prefix) or '-'}  ({where.text})" for rank, where in enumerate(found)
    ]
    return ["", "NUMA binding, if the workers ran on this node:", *rows] if rows else []


def _first_env(config: Config, run_id: str, run_dir: str, active: int, nproc: int) -> dict[str, str]:
    node = Node("0", 0, "node 0", "", nproc)
    plan = Plan(1, 0, History(), config.launch.max_restarts, active, active * nproc, "<first active node>", 0, 0, 0)
    env = rank_env(WorkerContract(run_id, config.launch.role, run_dir), plan, node, 0, "<its error file>")
    return {**env, "MASTER_PORT": "<free port of that node, fresh per cycle>"}
