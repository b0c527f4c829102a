"""`--dry-run`: what would be started, where, with which environment. Needs neither Slurm nor a GPU."""

from __future__ import annotations

import os
import shlex
import sys

from nvrx_slurm import compat
from nvrx_slurm.cli.front import step_argv
from nvrx_slurm.cli.here import Here, Layout, StartPlace, layout, planned_allocation
from nvrx_slurm.cli.job import contract, numa_bindings, worker_argv
from nvrx_slurm.cli.options import spelling
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.workers.worker_spec import rank_env
from nvrx_slurm.types import History, Node, Plan

_NODES_SHOWN = 8


def dry_run(here: Here, script: str, args: tuple[str, ...]) -> str:
    """The srun line, the plan per rank of cycle 0, and the first worker's environment, as text."""
    if here.place is StartPlace.LOGIN:
        here = planned_allocation(here)
    shape = layout(here)
    nodes = shape.nodes
    nproc = shape.nproc
    directory = shape.run_dir
    lines = [f"place: {here.place.value}"]
    if here.place is StartPlace.LOGIN:
        lines.append(f"planned as inside an allocation of {nodes.max} nodes (--nnodes, --spares)")
    if here.place is not StartPlace.TASK and not here.launch.standalone:
        # the rest is the script and its arguments
        flags = sys.argv[1 : len(sys.argv) - len(args) - 1]
        words = [*(word for word in flags if spelling(word) != "--dry-run"), script, *args]
        line = shlex.join(step_argv(here, directory, words))
        lines += ["", "srun line (in a batch script or salloc shell):", f"  {line}"]
    lines += [
        "",
        f"plan of cycle 0: {nodes.min} active nodes x {nproc} ranks, {nodes.max - nodes.min} spare nodes",
    ]
    lines += _node_rows(here, shape)
    lines += [
        "",
        f"logs: {directory.path}",
        "worker: " + shlex.join(worker_argv(here.launch, script, args)),
    ]
    lines += _numa_rows(here, shape)
    lines += ["", "environment of rank 0, besides what is inherited:"]
    lines += [f"  {name}={value}" for name, value in _first_env(here, shape).items()]
    return "\n".join(lines)


def _node_rows(here: Here, shape: Layout) -> list[str]:
    nodes = shape.nodes
    nproc = shape.nproc
    names = here.slurm.agents if here.slurm is not None else ()
    rows = []
    for index in range(min(nodes.max, _NODES_SHOWN)):
        name = names[index] if index < len(names) else f"node {index}"
        first = index * nproc
        ranks = f"ranks {first}..{first + nproc - 1}" if index < nodes.min else "hot spare"
        rows.append(f"  {name:16} infra rank {index:<6} {ranks}")
    if nodes.max > _NODES_SHOWN:
        rows.append("  ...")
    if here.ft.segment is not None:
        rows.append(
            "  other nodes may be active: only they know their NVLink domains (--ft-segment)"
        )
    return rows


def _numa_rows(here: Here, shape: Layout) -> list[str]:
    try:
        found = numa_bindings(here, shape.nproc, shape.on_node)
    except UsageError as error:  # the compute nodes may have what a login node lacks
        return ["", f"NUMA binding, if the workers ran on this node: {error}"]
    rows = [
        f"  local rank {rank}: {shlex.join(one.prefix) or '-'}  ({one.text})"
        for rank, one in enumerate(found)
    ]
    return ["", "NUMA binding, if the workers ran on this node:", *rows] if rows else []


def _first_env(here: Here, shape: Layout) -> dict[str, str]:
    active = shape.nodes.min
    nproc = shape.nproc
    node = Node("0", 0, "node 0", "", nproc)
    plan = Plan(
        1,
        0,
        History(),
        here.launch.max_restarts,
        active,
        active * nproc,
        "<first active node>",
        0,
        0,
        0,
    )
    env = rank_env(contract(here, shape), plan, node, 0, "<its error file>")
    path = {"PYTHONPATH": compat.python_path(os.environ)} if here.launch.compat else {}
    return {**env, **path, "MASTER_PORT": "<free port of that node, fresh per cycle>"}
