"""This process's place in a Slurm job, from Slurm's environment variables. Pure: a mapping in, a record out.

Names and meanings are from srun(1), sbatch(1), salloc(1) "OUTPUT ENVIRONMENT VARIABLES", checked on 22.05.

Variables are written once, when a process starts, and go stale when a `--no-kill` job shrinks: a batch script keeps
the node list it began with, while a step has its own (SLURM_STEP_*), right at the time that step began. So inside a
step SLURM_STEP_* wins over SLURM_JOB_*. `slurm.control` asks Slurm for the present state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist

Env = Mapping[str, str]
# slurm.h: interactive, batch, extern, pending steps; none of them is an srun step
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_PORTS = range(20000, 30000)
_PORT_COUNT = 8


@dataclass(frozen=True)
class SlurmContext:
    """One process's place in a Slurm job. Node lists are as of the start of the step (or batch script)."""

    job_id: int  # SLURM_JOB_ID, unique also for array tasks; what squeue and scancel take
    job_name_id: str  # for log directories: "<array job>_<task>" in arrays, else str(job_id)
    # -1 outside a step that srun started: in a batch script, an salloc shell, an interactive step
    step_id: int = -1
    array_task_id: int = -1  # -1 outside an array
    procid: int = 0  # SLURM_PROCID: rank of this task in its step; 0 in a batch script
    nnodes: int = 1
    nodes: tuple[str, ...] = ()
    nodename: str = ""  # SLURMD_NODENAME; "" in an salloc shell
    cpus_per_task: int = 0  # 0 = the job did not ask
    gpus_per_node: int = 0  # SLURM_GPUS_ON_NODE; 0 = none or unknown
    restart_count: int = 0  # how often Slurm requeued this job
    cluster_name: str = ""
    conf: str = ""  # SLURM_CONF
    order: tuple[int, ...] = ()  # position in topology/block; () where there is no such topology
    block: str = ""  # its block in topology/block
    # CROSS_SLURM_PROCID: rank over several jobs that form one, given by their user
    cross_procid: int | None = None
    launchers: int = 1  # tasks per node, each an agent
    localid: int = 0  # SLURM_LOCALID: which of them this is
    cyclic: bool = False  # tasks go around the nodes, instead of node by node

    @property
    def agents(self) -> tuple[str, ...]:
        """The node of each agent, in the order of infra ranks."""
        if self.cyclic:
            return self.nodes * self.launchers
        return tuple(name for name in self.nodes for _ in range(self.launchers))

    @property
    def infra_rank(self) -> int:
        """The order Slurm gave us: CROSS_SLURM_PROCID where it is set, else SLURM_PROCID (see `array_infra_rank`)."""
        return self.procid if self.cross_procid is None else self.cross_procid


def detect(env: Env, several: bool = False, by_name: bool = False) -> SlurmContext | None:
    """This process's place in a Slurm job; None outside Slurm. `several`: a node may have several agents; `by_name`:
    the digits in a node's name are its place in the order.

    Raises UsageError for malformed numbers and lists, and a step with more tasks on a node than it may have.
    """
    if not env.get("SLURM_JOB_ID"):
        return None
    job_id = _number(env, "SLURM_JOB_ID")
    step_id = _step_id(env)
    in_step = step_id >= 0
    array_job, array_task = (
        env.get("SLURM_ARRAY_JOB_ID", ""),
        _number(env, "SLURM_ARRAY_TASK_ID", default=-1),
    )
    nodes = nodelist.expand(
        (in_step and env.get("SLURM_STEP_NODELIST")) or env.get("SLURM_JOB_NODELIST", "")
    )
    # topology/tree's addresses (switch names) have no order; without a topology the pattern is "node".
    in_blocks = env.get("SLURM_TOPOLOGY_ADDR_PATTERN") == "block.node"
    address = env.get("SLURM_TOPOLOGY_ADDR", "") if in_blocks else ""
    # "block03.node17" is (3, 17)
    order = tuple(int(found[:18]) for found in re.findall(r"[0-9]+", address))
    if by_name and (digits := re.sub(r"[^0-9]", "", env.get("SLURMD_NODENAME", ""))):
        order = (int(digits[:18]),)
    return SlurmContext(
        job_id=job_id,
        job_name_id=f"{array_job}_{array_task}" if array_job and array_task >= 0 else str(job_id),
        step_id=step_id,
        array_task_id=array_task,
        procid=_number(env, "SLURM_PROCID"),
        nnodes=len(nodes) or _number(env, "SLURM_JOB_NUM_NODES", default=1),
        nodes=tuple(nodes),
        nodename=env.get("SLURMD_NODENAME", ""),
        cpus_per_task=_number(env, "SLURM_CPUS_PER_TASK"),
        gpus_per_node=_number(env, "SLURM_GPUS_ON_NODE"),
        restart_count=_number(env, "SLURM_RESTART_COUNT"),
        cluster_name=env.get("SLURM_CLUSTER_NAME", ""),
        conf=env.get("SLURM_CONF", ""),
        order=order,
        block=address.partition(".")[0],
        launchers=_launchers(env, in_step, len(nodes), several),
        localid=_number(env, "SLURM_LOCALID"),
        cyclic=env.get("SLURM_DISTRIBUTION", "").startswith("cyclic"),
        cross_procid=_number(env, "CROSS_SLURM_PROCID") if env.get("CROSS_SLURM_PROCID") else None,
    )


def array_infra_rank(ctx: SlurmContext) -> int:
    """Infra rank in a job array whose tasks together form one training job: task id x agents + procid.

    All tasks of such an array have the same number of nodes and ids from 0. An explicit CROSS_SLURM_PROCID wins;
    outside an array it is `ctx.infra_rank`.
    """
    if ctx.array_task_id < 0 or ctx.cross_procid is not None:
        return ctx.infra_rank
    return ctx.array_task_id * ctx.nnodes * ctx.launchers + ctx.procid


def coordinator_ports(ctx: SlurmContext) -> list[int]:
    """8 distinct ports in 20000..29999 to try in this order, the same for all tasks of one step.

    So no port has to be published: all tasks of the step know where to listen and where to connect. Derived from
    (cluster, slurm.conf, job, step, restarts), so that jobs on shared nodes seldom collide.
    """
    identity = (ctx.cluster_name, ctx.conf, ctx.job_id, ctx.step_id, ctx.restart_count)
    return random.Random("\0".join(map(str, identity))).sample(_PORTS, _PORT_COUNT)


def _number(env: Env, name: str, default: int = 0) -> int:
    """A variable as an integer >= 0; `default` when it is not set."""
    text = env.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(
            f"{name}={text!r} is not a whole number; Slurm sets it, so do not change it."
        )
    return int(text)


def _step_id(env: Env) -> int:
    """Id of the srun step of this task, -1 in batch scripts, salloc shells and interactive steps."""
    text = env.get("SLURM_STEP_ID", "")
    # some versions give special steps as words or negative numbers
    step = int(text) if text.isdecimal() else -1
    return step if step < _FIRST_SPECIAL_STEP else -1


def _launchers(env: Env, in_step: bool, nodes: int, several: bool) -> int:
    """How many agents each node has, or gets by a step: as many as the job has tasks per node.

    Not by SLURM_TASKS_PER_NODE in a batch script, which counts CPUs where the job asked for no number of tasks.
    """
    if in_step:
        name = (
            "SLURM_STEP_TASKS_PER_NODE"
            if env.get("SLURM_STEP_TASKS_PER_NODE")
            else "SLURM_TASKS_PER_NODE"
        )
        counts = nodelist.different_counts(env.get(name) or "1")
        if not several and counts != {1}:
            raise UsageError(
                f"{name}={env[name]}: nvrx-run needs one task per node; use --ntasks-per-node=1 with srun, or set"
                " NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=1 if each task shall be an agent. In a shell of srun --pty, use"
                " --standalone for this node, or salloc for all."
            )
    elif not several:
        return 1
    elif wanted := _number(env, "SLURM_NTASKS_PER_NODE"):
        return wanted
    else:
        tasks = _number(env, "SLURM_NTASKS") or nodes
        counts = {tasks // nodes, -(-tasks // nodes)} if nodes else {1}
    if len(counts) > 1:
        raise UsageError(
            "nvrx-run needs the same number of tasks on each node; use --ntasks-per-node with srun."
        )
    return counts.pop()
