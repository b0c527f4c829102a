"""What the environment and Slurm say about this process, and the shape that the job has there.

The way of the settings: `find_here` -> `Here` -> `layout` -> `Layout` -> `cli.job.make_job` -> `Job`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.config.layers import Resolved
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.declared import Record, replace
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm import conf
from nvrx_slurm.slurm.control import Control
from nvrx_slurm.slurm.env import SlurmContext, array_infra_rank, detect
from nvrx_slurm.system import gpus

# name of the run's directory, set for the tasks of a step by the nvrx-run that starts it
RUN_ENV = "NVRX_RUN"
# set for the task of a step where srun passes the terminal's input on
STDIN_ENV = "NVRX_STDIN"
# set by an agent for its ranks: see `step_of`
STEP_ENV = "NVRX_STEP"


class StartPlace(Enum):
    """The four kinds of places where `nvrx-run` starts."""

    TASK = "a task of an srun step: the agent of this node"
    BATCH = "a batch script or salloc shell: starts the step and waits for it"
    LOGIN = "a login node: says how to submit"
    ALONE = "no Slurm: this node, or several by --nnodes and --rdzv-endpoint"


class Here(Record):
    """The settings, the environment, where this process is, and what Slurm says about it (None outside a job)."""

    resolved: Resolved
    env: Mapping[str, str]
    place: StartPlace
    slurm: SlurmContext | None
    control: Control

    @property
    def launch(self) -> LaunchConfig:
        """Settings of the launcher."""
        return self.resolved.config.launch

    @property
    def ft(self) -> FaultToleranceConfig:
        """Settings of fault tolerance."""
        return self.resolved.config.ft

    @property
    def ranks_by_hand(self) -> bool:
        """Whether --node-rank counts: outside of Slurm, and where this is the only agent of its step and meets those of
        other steps at an endpoint."""
        slurm = self.slurm
        if slurm is None:
            return True
        is_one_of_many = slurm.cross_procid is not None or slurm.array_task_id >= 0
        return not is_one_of_many and slurm.nnodes * slurm.launchers == 1 and self._meets

    @property
    def rank(self) -> int | None:
        """Infra rank; None: the agents get their order as they join."""
        slurm = self.slurm
        if slurm is None or self.ranks_by_hand:
            return self.launch.node_rank
        is_part = self._meets or (self.launch.endpoint is not None and self.ft.segment is not None)
        return array_infra_rank(slurm) if is_part else slurm.infra_rank

    @property
    def _meets(self) -> bool:
        """Whether the job has more nodes than this step, which meet at an endpoint."""
        slurm = self.slurm
        if slurm is None or self.launch.endpoint is None:
            return False
        return node_range(self).max > slurm.nnodes * slurm.launchers


class OnNode(NamedTuple):
    """Where the workers of this agent are among those of all agents of its node."""

    position: int  # how many come before them
    first: int  # LOCAL_RANK of the first: scripts choose their GPU by it
    world: int  # LOCAL_WORLD_SIZE


class Layout(Record):
    """How many nodes and workers the job has, where this node's are, and where the job's files go."""

    nodes: NodeRange
    nproc: int  # workers of one agent
    on_node: OnNode
    run_dir: RunDir


def find_here(resolved: Resolved, env: Mapping[str, str]) -> Here:
    """Decide by the environment. Raises UsageError for a step with more tasks per node than were allowed."""
    place, slurm = _place(resolved.config.launch, env)
    return Here(resolved, env, place, slurm, Control(resolved.config.launch.slurm_api))


def as_it_is_now(here: Here, began_as: SlurmContext) -> SlurmContext:
    """The job's nodes of this moment: the variables are as old as the batch script, and nodes may be lost since.
    Variables of another job are removed from the environment."""
    job = here.control.job_now(began_as.job_id)
    if job is None:
        return began_as
    for name in [*os.environ]:
        if name.startswith(job.inherited):
            del os.environ[name]
    own = find_here(here.resolved, os.environ).slurm
    assert own is not None
    nodes = job.nodes or own.nodes
    return replace(own, nodes=nodes, nnodes=len(nodes))


def layout(here: Here) -> Layout:
    """The shape of the job. Asks nothing. Raises UsageError where the allocation does not fit the settings."""
    nodes, nproc = node_range(here), workers_per_node(here)
    return Layout(nodes, nproc, on_node(here, nproc), _run_dir_in_step(here))


def step_of(env: Mapping[str, str]) -> str:
    """The job and step of a process, as far as it is in one. A step or job that a rank starts has another name."""
    return f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}"


def _place(launch: LaunchConfig, env: Mapping[str, str]) -> tuple[StartPlace, SlurmContext | None]:
    # a rank may start nvrx-run as it may start torchrun: its step has an agent here
    if launch.standalone or env.get(STEP_ENV) == step_of(env):
        return StartPlace.ALONE, None
    slurm = detect(
        env, launch.enable_multi_launchers_per_node, launch.infra_rank_from_nodename is not None
    )
    if slurm is not None:
        return StartPlace.TASK if slurm.step_id >= 0 else StartPlace.BATCH, slurm
    by_hand = launch.node_rank is not None or launch.endpoint is not None
    by_hand |= launch.nnodes is not None and not launch.dry_run
    login = shutil.which("srun") is not None and conf.find(env) is not None
    return StartPlace.LOGIN if login and not by_hand else StartPlace.ALONE, None


def planned_allocation(here: Here) -> Here:
    """A login node as if inside the allocation that --nnodes and --spares ask for; for --dry-run."""
    wanted = here.launch.nnodes or NodeRange(1, 1)
    nodes = max(wanted.max, wanted.min + (here.launch.spares or 0))
    return replace(here, slurm=SlurmContext(0, "<job id>", nnodes=nodes))


def node_range(here: Here) -> NodeRange:
    """MIN and MAX nodes. Inside Slurm all nodes of the step beyond MIN are spares.

    Raises UsageError where the allocation has too few nodes, and where MIN is no multiple of --ft-segment.
    """
    slurm = here.slurm
    launch = here.launch
    segment = here.ft.segment
    have = None if slurm is None else slurm.nnodes * slurm.launchers
    nodes = launch.node_range(have)
    if launch.replacement_group_id is not None and segment is None:
        raise UsageError(
            "NVRX_REPLACEMENT_GROUP_ID needs --ft-segment N, the nodes of a group; give it, or unset it"
        )
    if nodes.min % (segment or 1):
        raise UsageError(
            f"--ft-segment {segment} does not divide {nodes.min}, MIN of --nnodes; change one of them"
        )
    if have is None or launch.endpoint is not None:
        return nodes
    needed = nodes.min + (launch.spares or 0)
    if needed > have:
        raise UsageError(
            f"--nnodes and --spares need {needed} nodes but the allocation has {have}; ask for more"
        )
    return NodeRange(nodes.min, have)


def workers_per_node(here: Here) -> int:
    """The number behind --nproc-per-node. Raises UsageError for `gpu` where there is none, and for too few workers."""
    slurm = here.slurm
    nproc = here.launch.nproc_per_node
    if nproc is None:
        nproc = max(1, _gpus_of_slurm(slurm, here.env)) if slurm is not None else 1
    elif isinstance(nproc, str):
        found = 0 if nproc == "cpu" else gpus.count(here.env)
        if nproc != "cpu" and slurm is not None:
            found = _gpus_of_slurm(slurm, here.env) or found
        if found == 0 and nproc == "gpu":
            raise UsageError(
                "--nproc-per-node=gpu, but neither Slurm nor NVML shows a GPU on this node; give a number, or `cpu`"
            )
        nproc = found or len(os.sched_getaffinity(0))
    here.launch.check_local_ranks(nproc)
    return nproc


def _gpus_of_slurm(slurm: SlurmContext, env: Mapping[str, str]) -> int:
    """The GPUs that Slurm gave each agent, of any vendor; fewer where a list of devices names fewer."""
    given = slurm.gpus_per_node // slurm.launchers
    named = [count for name in gpus.LISTS if (count := gpus.listed(env, name)) is not None]
    return min([given, *named])


def on_node(here: Here, nproc: int) -> OnNode:
    """The place of this task's workers on its node. Where a task sees only GPUs of its own (srun --gpus-per-task), its
    local ranks begin at 0."""
    slurm = here.slurm
    if slurm is None or slurm.launchers == 1:
        return OnNode(0, 0, nproc)
    position = slurm.localid * nproc
    if gpus.count(here.env) == nproc:
        return OnNode(position, 0, nproc)
    return OnNode(position, position, slurm.launchers * nproc)


def in_foreground() -> bool:
    """Whether this process may read from its terminal; a shell that has it in the background reads itself."""
    with suppress(OSError):
        return os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp()
    return False


def passes_input_on(here: Here, agents: int) -> bool:
    """Whether the terminal's input is for the one rank of a step."""
    nproc = here.launch.nproc_per_node
    one_rank = agents == 1 and not isinstance(nproc, str) and workers_per_node(here) == 1
    return one_rank and in_foreground()


def working_directory() -> Path:
    """Raises UsageError where it was removed."""
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(
            f"the working directory is gone ({error.strerror}); cd to one that exists"
        ) from None


def run_dir(here: Here) -> RunDir:
    """The log tree of this run: by job id and number of requeues in Slurm, else by --rdzv-id."""
    slurm, log_dir = here.slurm, Path(here.launch.log_dir)
    log_dir = log_dir if log_dir.is_absolute() else working_directory() / log_dir
    if slurm is not None:
        # Steps that the user starts after the first one get a directory of their own.
        run = f"r{slurm.restart_count}" + (f"_step{slurm.step_id}" if slurm.step_id > 0 else "")
        return RunDir(log_dir, slurm.job_name_id, _file_name(here.env.get(RUN_ENV, "") or run))
    run_id = here.launch.rdzv_id
    if run_id == "none" and here.launch.node_range(None).max == 1:
        run_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return RunDir(log_dir, _file_name(run_id), "r0")


def _run_dir_in_step(here: Here) -> RunDir:
    """The directory of this run. Of several runs in one step, as in `srun --pty bash`, each has its own: the first
    without an end.

    All agents of a run find the same one: those before it have ended on each node.
    """
    wanted = run_dir(here)
    if here.place is not StartPlace.TASK or RUN_ENV in here.env or here.launch.dry_run:
        return wanted
    if here.slurm is not None and here.slurm.nnodes * here.slurm.launchers == 1:
        return own_run_dir(wanted)
    return next(one for one in _numbered(wanted) if not one.result.exists())


def _numbered(wanted: RunDir) -> Iterator[RunDir]:
    yield wanted
    for number in itertools.count(2):
        yield replace(wanted, run=f"{wanted.run}_{number}")


def own_run_dir(wanted: RunDir) -> RunDir:
    """Make the first of r0, r0_2, r0_3, ... that no other nvrx-run of this allocation has made."""
    wanted.create_parent()
    for mine in _numbered(wanted):
        with suppress(FileExistsError):
            mine.path.mkdir()
            break
    mine.create()
    return mine


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).lstrip(".") or "run"
