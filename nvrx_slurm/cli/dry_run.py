"""`--dry-run`: what would be started, where, with which environment. Needs neither Slurm nor a GPU."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence

from nvrx_slurm import compat
from nvrx_slurm.cli.front import step_argv
from nvrx_slurm.cli.here import Here, Layout, Site, layout, planned_allocation
from nvrx_slurm.cli.options import spelling
from nvrx_slurm.cli.worker import contract, numa_bindings, worker_argv
from nvrx_slurm.core.coordinator.gathering import Placement, place
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.workers.worker_spec import rank_env
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.types import History, Node, Plan

_NODES_SHOWN = 8


def dry_run(here: Here, script: str, args: tuple[str, ...]) -> str:
    """The srun line, the plan per rank of cycle 0, and the first worker's environment, as text."""
    if here.site is Site.LOGIN:
        here = planned_allocation(here)
    shape = layout(here)
    nodes, nproc, directory = shape.nodes, shape.nproc, shape.run_dir
    lines = [f"place: {here.site.value}"]
    if here.site is Site.LOGIN:
        lines.append(f"planned as inside an allocation of {nodes.max} nodes (--nnodes, --spares)")
    if here.site is not Site.TASK and not here.launch.standalone:
        flags = sys.argv[1 : len(sys.argv) - len(args) - 1]  # the rest is the script and its arguments
        words = [*(word for word in flags if spelling(word) != "--dry-run"), script, *args]
        line = shlex.join(step_argv(here, directory, words))
        lines += ["", "srun line (in a batch script or salloc shell):", f"  {line}"]
    lines += ["", f"plan of cycle 0: {nodes.min} active nodes x {nproc} ranks, {nodes.max - nodes.min} spare nodes"]
    lines += _node_rows(here, shape)
    lines += ["", f"logs: {directory.path}", "worker: " + shlex.join(worker_argv(here.launch, script, args))]
    lines += _numa_rows(here, shape)
    lines += ["", "environment of rank 0, besides what is inherited:"]
    lines += [f"  {name}={value}" for name, value in _first_env(here, shape).items()]
    return "\n".join(lines)


def _node_rows(here: Here, shape: Layout) -> list[str]:
    nodes, nproc, segment = shape.nodes, shape.nproc, here.ft.segment
    names = here.slurm.agents if here.slurm is not None else ()
    group_ranks, notes = {index: index for index in range(nodes.min)}, []
    if segment is not None:
        found = _planned(here, names, nodes.min, segment)
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


def _planned(here: Here, names: Sequence[str], active: int, segment: int) -> Placement | str:
    """The first placement of these nodes, by number, as far as Slurm tells; else a sentence."""
    try:
        block_of = here.control.slurm.blocks() if names else {}
    except SlurmError:
        block_of = {}
    if not names or not all(name in block_of for name in names):
        return "the domains of the nodes are known only on them, so other nodes may be active"
    nodes = [Node(str(rank), rank, name, "", 1, domain=block_of[name]) for rank, name in enumerate(names)]
    found = place(nodes, {}, active, segment)
    return found or f"Slurm's blocks do not have {active // segment} complete segments of {segment} among these nodes"


def _numa_rows(here: Here, shape: Layout) -> list[str]:
    try:
        found = numa_bindings(here, shape.nproc, shape.on_node)
    except UsageError as error:  # the compute nodes may have what a login node lacks
        return ["", f"NUMA binding, if the workers ran on this node: {error}"]
    rows = [
        f"  local rank {rank}: {shlex.join(where.prefix) or '-'}  ({where.text})" for rank, where in enumerate(found)
    ]
    return ["", "NUMA binding, if the workers ran on this node:", *rows] if rows else []


def _first_env(here: Here, shape: Layout) -> dict[str, str]:
    active, nproc = shape.nodes.min, shape.nproc
    node = Node("0", 0, "node 0", "", nproc)
    plan = Plan(1, 0, History(), here.launch.max_restarts, active, active * nproc, "<first active node>", 0, 0, 0)
    env = rank_env(contract(here, shape), plan, node, 0, "<its error file>")
    path = {"PYTHONPATH": compat.python_path(os.environ)} if here.launch.compat else {}
    return {**env, **path, "MASTER_PORT": "<free port of that node, fresh per cycle>"}
