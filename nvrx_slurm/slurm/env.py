"""This process's place in a Slurm job, from Slurm's environment variables. Pure: a mapping in, a record out.

Names and meanings are from srun(1), sbatch(1), salloc(1) "OUTPUT ENVIRONMENT VARIABLES", checked on 22.05.

Variables are written once, when a process starts, and go stale when a `--no-kill` job shrinks: a batch script keeps
the node list it began with, while a step has its own (SLURM_STEP_*), right at the time that step began. So inside a
step SLURM_STEP_* wins over SLURM_JOB_*. `slurm.control` asks Slurm for the present state.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # slurm.h: interactive, batch, extern, pending steps; none of them is an srun step
_PORTS = range(20000, 30000)
_PORT_COUNT = 8


@dataclass(frozen=True, slots=True)
class SlurmContext:
    """One process's place in a Slurm job. Node lists are as of the start of the step (or batch script)."""

    job_id: int  # SLURM_JOB_ID, unique also for array tasks; what squeue and scancel take
    job_name_id: str  # for log directories: "<array job>_<task>" in arrays, else str(job_id)
    step_id: int = -1  # -1 outside a step that srun started: in a batch script, an salloc shell, an interactive step
    array_task_id: int = -1  # -1 outside an array
    procid: int = 0  # SLURM_PROCID: rank of this task in its step; 0 in a batch script
    nnodes: int = 1
    nodes: tuple[str, ...] = ()  # the node of each launcher, by SLURM_PROCID
    launchers: int = 1  # on this node; more than one only with NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE
    local_id: int = 0  # SLURM_LOCALID: which of them this is
    nodename: str = ""  # SLURMD_NODENAME; "" in an salloc shell
    cpus_per_task: int = 0  # 0 = the job did not ask
    gpus_per_node: int = 0  # SLURM_GPUS_ON_NODE; 0 = none or unknown
    restart_count: int = 0  # how often Slurm requeued this job
    cluster_name: str = ""
    conf: str = ""  # SLURM_CONF
    order: tuple[int, ...] = ()  # position in topology/block; () where there is no such topology
    block: str = ""  # its block there
    cross_procid: int | None = None  # CROSS_SLURM_PROCID: rank over several jobs that form one, given by their user

    @property
    def infra_rank(self) -> int:
        """The order Slurm gave us: CROSS_SLURM_PROCID where it is set, else SLURM_PROCID (see `array_infra_rank`)."""
        return self.procid if self.cross_procid is None else self.cross_procid


def detect(env: Mapping[str, str], multiple: bool = False) -> SlurmContext | None:
    """This process's place in a Slurm job; None outside Slurm. `multiple`: a node may have several launchers.

    Raises UsageError for malformed numbers and lists, and a step with more than one task on a node.
    """
    if not env.get("SLURM_JOB_ID"):
        return None
    job_id = _number(env, "SLURM_JOB_ID")
    step_id = _step_id(env)
    in_step = step_id >= 0
    counts = _tasks_per_node(env) if multiple or in_step else []
    if in_step and not multiple:
        _check_one_task_per_node(env, counts)
    array_job, array_task = env.get("SLURM_ARRAY_JOB_ID", ""), _number(env, "SLURM_ARRAY_TASK_ID", default=-1)
    hosts = _nodes(env, in_step)
    nodes = hosts
    local_id = 0
    if multiple and len(counts) == len(hosts):
        nodes = tuple(host for host, count in zip(hosts, counts, strict=True) for _ in range(count))
        local_id = _number(env, "SLURM_LOCALID")
    procid = _number(env, "SLURM_PROCID")
    return SlurmContext(
        job_id=job_id,
        job_name_id=f"{array_job}_{array_task}" if array_job and array_task >= 0 else str(job_id),
        step_id=step_id,
        array_task_id=array_task,
        procid=procid,
        nnodes=len(nodes) or _number(env, "SLURM_JOB_NUM_NODES", default=1),
        nodes=nodes,
        launchers=nodes.count(nodes[procid]) if multiple and procid < len(nodes) else 1,
        local_id=local_id,
        nodename=env.get("SLURMD_NODENAME", ""),
        cpus_per_task=_number(env, "SLURM_CPUS_PER_TASK"),
        gpus_per_node=_number(env, "SLURM_GPUS_ON_NODE"),
        restart_count=_number(env, "SLURM_RESTART_COUNT"),
        cluster_name=env.get("SLURM_CLUSTER_NAME", ""),
        conf=env.get("SLURM_CONF", ""),
        order=_order(env),
        block=_block(env),
        cross_procid=_number(env, "CROSS_SLURM_PROCID") if env.get("CROSS_SLURM_PROCID") else None,
    )


def array_infra_rank(ctx: SlurmContext) -> int:
    """Infra rank in a job array whose tasks together form one training job: task id x nodes + procid.

    All tasks of such an array have the same number of nodes and ids from 0. An explicit CROSS_SLURM_PROCID wins;
    outside an array it is `ctx.infra_rank`.
    """
    if ctx.array_task_id < 0 or ctx.cross_procid is not None:
        return ctx.infra_rank
    return ctx.array_task_id * ctx.nnodes + ctx.procid


def coordinator_ports(ctx: SlurmContext) -> list[int]:
    """8 distinct ports in 20000..29999 to try in this order, the same for all tasks of one step.

    So no port has to be published: all tasks of the step know where to listen and where to connect. Derived from
    (cluster, slurm.conf, job, step, restarts) by SHA-256, so that jobs on shared nodes seldom collide.
    """
    identity = (ctx.cluster_name, ctx.conf, ctx.job_id, ctx.step_id, ctx.restart_count)
    ports: dict[int, None] = {}
    draw = 0
    while len(ports) < _PORT_COUNT:
        digest = hashlib.sha256("\0".join(map(str, (*identity, draw))).encode()).digest()
        ports[_PORTS.start + int.from_bytes(digest[:8], "big") % len(_PORTS)] = None
        draw += 1
    return list(ports)


def _number(env: Mapping[str, str], name: str, default: int = 0) -> int:
    """A variable as an integer >= 0; `default` when it is not set."""
    text = env.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{name}={text!r} is not a whole number; Slurm sets it, so do not change it.")
    return int(text)


def _step_id(env: Mapping[str, str]) -> int:
    """Id of the srun step of this task, -1 in batch scripts, salloc shells and interactive steps."""
    text = env.get("SLURM_STEP_ID", "")
    step = int(text) if text.isdecimal() else -1  # some versions give special steps as words or negative numbers
    return step if step < _FIRST_SPECIAL_STEP else -1


def _tasks_name(env: Mapping[str, str]) -> str:
    return "SLURM_STEP_TASKS_PER_NODE" if env.get("SLURM_STEP_TASKS_PER_NODE") else "SLURM_TASKS_PER_NODE"


def _tasks_per_node(env: Mapping[str, str]) -> list[int]:
    return list(nodelist.expand_counts(env.get(_tasks_name(env), "")))


def _check_one_task_per_node(env: Mapping[str, str], counts: list[int]) -> None:
    if any(count != 1 for count in counts):
        name = _tasks_name(env)
        raise UsageError(
            f"{name}={env.get(name, '')}: nvrx-run needs one task per node; use --ntasks-per-node=1 with srun, or set"
            " NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=1."
        )


def _nodes(env: Mapping[str, str], in_step: bool) -> tuple[str, ...]:
    step = env.get("SLURM_STEP_NODELIST") if in_step else None
    return tuple(nodelist.expand(step or env.get("SLURM_JOB_NODELIST", "")))


def _order(env: Mapping[str, str]) -> tuple[int, ...]:
    """Numbers of each component of a `block.node` address: "block03.node17" -> (3, 17); () for any other pattern.

    topology/tree's addresses (switch names) have no order; without a topology the pattern is "node".
    """
    if env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "") != "block.node":
        return ()
    block, _, node = env.get("SLURM_TOPOLOGY_ADDR", "").partition(".")
    return tuple(int(number[:18]) for part in (block, node) for number in re.findall(r"[0-9]+", part))


def _block(env: Mapping[str, str]) -> str:
    if env.get("SLURM_TOPOLOGY_ADDR_PATTERN", "") != "block.node":
        return ""
    return env.get("SLURM_TOPOLOGY_ADDR", "").partition(".")[0][:64]
