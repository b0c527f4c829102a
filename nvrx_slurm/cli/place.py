"""Where are we (srun task, batch script, login node, no Slurm), and what is this node's job then?"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nvrx_slurm.agent.job import Job, Meeting
from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.agent.worker_env import WorkerContract
from nvrx_slurm.agent.workers import WorkerSpec
from nvrx_slurm.config import Config, NodeRange, Std
from nvrx_slurm.control.auth import TOKEN_ENV
from nvrx_slurm.core.agent import AgentSettings
from nvrx_slurm.core.coordinator import CoordinatorSettings
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import control
from nvrx_slurm.slurm.env import SlurmContext, Where, array_infra_rank, coordinator_ports, detect
from nvrx_slurm.system import gpus, numa
from nvrx_slurm.types import Node

KILL_WAIT_ENV = "NVRX_KILL_WAIT"  # seconds between SIGTERM and SIGKILL of this cluster; the front asks Slurm once
RUN_ENV = "NVRX_RUN"  # name of the run's directory, from the front
_KILL_WAIT_S = 30.0  # Slurm's default
_KILL_WAIT_MARGIN_S = 5.0  # for us to reap, report and leave
_KILL_TIMEOUT_S = 10.0
_RUN_PATH = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
_SLURM_CONFS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")


class Place(Enum):
    """The four places that `nvrx-run` knows."""

    TASK = "a task of an srun step: the agent of this node"
    BATCH = "a batch script or salloc shell: start the step and stay in front of it"
    LOGIN = "a login node: say what to do"
    ALONE = "no Slurm: this node, or several by --nnodes and --rdzv-endpoint"


@dataclass(frozen=True)
class Here:
    """The place and what Slurm says about it."""

    place: Place
    slurm: SlurmContext | None


def find_place(config: Config, env: Mapping[str, str]) -> Here:
    """Decide by the environment. Raises UsageError for an allocation of the wrong shape."""
    launch = config.launch
    if launch.standalone:
        return Here(Place.ALONE, None)
    slurm = detect(env)
    if slurm is not None:
        return Here(Place.TASK if slurm.where is Where.STEP else Place.BATCH, slurm)
    by_hand = launch.nnodes is not None or launch.node_rank is not None or launch.endpoint is not None
    return Here(Place.ALONE if by_hand or not _is_login_node(env) else Place.LOGIN, None)


def _is_login_node(env: Mapping[str, str]) -> bool:
    conf = env.get("SLURM_CONF", "")
    return shutil.which("srun") is not None and any(Path(p).exists() for p in (conf, *_SLURM_CONFS) if p)


def run_dir(config: Config, here: Here, env: Mapping[str, str]) -> RunDir:
    """The log tree of this run."""
    slurm = here.slurm
    log_dir = Path(config.launch.log_dir).absolute()
    if slurm is not None:
        return RunDir(log_dir, slurm.job_name_id, _file_name(env.get(RUN_ENV, "") or _run_name(slurm)))
    run_id = config.launch.rdzv_id
    if run_id == "none" and config.launch.node_range(None).max == 1:
        run_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return RunDir(log_dir, _file_name(run_id), "r0")


def _run_name(slurm: SlurmContext) -> str:
    """r<Slurm restart>; steps that the user starts after the first one get a directory of their own."""
    return f"r{slurm.restart_count}" + (f"_step{slurm.step_id}" if slurm.step_id > 0 else "")


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in text).lstrip(".") or "run"


def node_range(config: Config, slurm: SlurmContext | None) -> NodeRange:
    """MIN and MAX nodes; inside Slurm whatever the step has beyond MIN is a spare."""
    nodes = config.launch.node_range(None if slurm is None else slurm.nnodes)
    if slurm is None or config.launch.endpoint is not None:
        return nodes
    if nodes.min > slurm.nnodes:
        raise UsageError(
            f"--nnodes wants at least {nodes.min} nodes but the allocation has {slurm.nnodes}; ask Slurm for more"
        )
    return NodeRange(nodes.min, slurm.nnodes)


def workers_per_node(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> int:
    """The number behind --nproc-per-node. Raises UsageError for `gpu` where there is none."""
    wanted = config.launch.nproc_per_node
    if isinstance(wanted, int):
        return wanted
    if wanted is None:
        return max(1, slurm.gpus_per_node) if slurm is not None else 1
    if wanted == "cpu":
        return len(os.sched_getaffinity(0))
    found = gpus.count(env)
    if found == 0 and wanted == "gpu":
        raise UsageError("--nproc-per-node=gpu, but NVML shows no GPU on this node; give a number, or `cpu`")
    return found or len(os.sched_getaffinity(0))


def worker_argv(config: Config, script: str, args: tuple[str, ...]) -> list[str]:
    """Command line of one worker. Raises UsageError when the script is not there."""
    launch = config.launch
    if launch.no_python:
        if shutil.which(script) is None:
            raise UsageError(f"the program {script} is not an executable file, nor on PATH; check the name")
        return [script, *args]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if launch.module:
        return [*python, "-m", script, *args]
    if not Path(script).exists():
        raise UsageError(f"the training script {script} does not exist (in {Path.cwd()}); check the path")
    return [*python, "-c", _RUN_PATH, script, *args] if launch.run_path else [*python, script, *args]


def _numa(config: Config, nproc: int) -> tuple[tuple[str, ...], ...]:
    per_node = config.launch.gpus_per_numa
    return () if per_node is None else numa.prefixes(nproc, per_node, config.ft.numa_bind_strict)


def make_job(config: Config, here: Here, env: Mapping[str, str], script: str, args: tuple[str, ...]) -> Job:
    """This node's part of the job. Asks Slurm at most for one node's address. Raises UsageError."""
    slurm = here.slurm
    nodes = node_range(config, slurm)
    meeting = _meeting(config, slurm, nodes, env)
    node = _node(config, slurm, meeting, workers_per_node(config, slurm, env))
    directory = run_dir(config, here, env)
    kill_after_s = config.launch.term_timeout
    if slurm is not None:
        kill_after_s = min(kill_after_s, max(1.0, _kill_wait_s(env) - _KILL_WAIT_MARGIN_S))
    spec = WorkerSpec(
        argv=worker_argv(config, script, args),
        contract=WorkerContract(directory.job_id, config.launch.role, str(directory.path)),
        limits=config.ft.rank_limits(),
        termination_signal=config.ft.rank_termination_signal,
        shown=_shown(config),
        monitored=not config.launch.disable_rank_monitors,
        settings=config.ft.rank_settings(),
        prefixes=_numa(config, node.nproc),
    )
    agent = AgentSettings(
        stop_timeout_s=config.launch.workers_stop_timeout,
        term_timeout_s=kill_after_s,
        kill_timeout_s=_KILL_TIMEOUT_S,
        join_timeout_s=config.launch.rdzv_conf.join_timeout,
        in_step=slurm is not None,
    )
    hosts = meeting is None or _may_host(config, slurm, meeting)
    coordinator = _coordinator(config, slurm, nodes, agent) if hosts else None
    unsure = slurm is None and config.launch.node_rank is None and config.launch.rdzv_conf.is_host is None
    return Job(node, directory, spec, agent, coordinator, meeting, may_yield=unsure)


def _coordinator(
    config: Config, slurm: SlurmContext | None, nodes: NodeRange, agent: AgentSettings
) -> CoordinatorSettings:
    conf = config.launch.rdzv_conf
    expected = tuple(f"node rank {i}" for i in range(nodes.max)) if config.launch.node_rank is not None else ()
    if slurm is not None:
        expected = slurm.nodes if config.launch.endpoint is None else ()  # a job array's nodes are not all in our list
    return CoordinatorSettings(
        min_nodes=nodes.min,
        max_nodes=nodes.max,
        max_restarts=config.launch.max_restarts,
        join_timeout_s=conf.join_timeout,
        last_call_s=conf.last_call_timeout,
        stop_timeout_s=agent.stop_timeout_s + 2 * agent.kill_timeout_s,
        drain_timeout_s=max(agent.stop_timeout_s, agent.term_timeout_s) + agent.kill_timeout_s,
        expected=expected,
    )


def _meeting(config: Config, slurm: SlurmContext | None, nodes: NodeRange, env: Mapping[str, str]) -> Meeting | None:
    endpoint = config.launch.endpoint
    keepalive = (config.ft.keepalive_interval, config.ft.keepalive_timeout)
    if endpoint is None and nodes.max == 1:
        return None
    if slurm is not None and endpoint is None:
        address = control.node_address(slurm.nodes[0])
        key = f"slurm/{slurm.cluster_name}/{slurm.job_id}.{slurm.step_id}/{slurm.restart_count}"
        endpoints = tuple((address, port) for port in coordinator_ports(slurm))
        return Meeting(key, endpoints, env.get(TOKEN_ENV, ""), keepalive, env.get("NVRX_MUNGE_SOCKET"))
    if endpoint is None:
        raise UsageError(
            f"{nodes.max} nodes have to meet somewhere; give all of them the same --rdzv-endpoint HOST:PORT,"
            " with HOST one of them"
        )
    if endpoint[1] == 0:
        raise UsageError("--rdzv-endpoint needs a port that all nodes know, for example HOST:29400")
    token = env.get(TOKEN_ENV, "") or hashlib.sha256(f"nvrx/{config.launch.rdzv_id}".encode()).hexdigest()
    return Meeting(f"rdzv/{config.launch.rdzv_id}", (endpoint,), token, keepalive)


def token_note(config: Config, meeting: Meeting | None, env: Mapping[str, str]) -> str:
    """A sentence about a job without a secret, or "". On loopback nobody else can come."""
    if meeting is None or not meeting.token or env.get(TOKEN_ENV):
        return ""
    host, port = meeting.endpoints[0]
    if _is_loopback(host):
        return ""
    return (
        f"{TOKEN_ENV} is not set: whoever reaches {host}:{port} and guesses --rdzv-id={config.launch.rdzv_id} can join;"
        f" export the same random {TOKEN_ENV} on all nodes"
    )


def _may_host(config: Config, slurm: SlurmContext | None, meeting: Meeting) -> bool:
    """Whether this node is the coordinator (or, without Slurm, tries to be: who listens first is)."""
    launch = config.launch
    if launch.rdzv_conf.is_host is not None:
        return launch.rdzv_conf.is_host
    if slurm is not None:
        return (slurm.infra_rank if launch.endpoint is None else array_infra_rank(slurm)) == 0
    return launch.node_rank == 0 if launch.node_rank is not None else _is_ours(meeting.endpoints[0][0])


def _node(config: Config, slurm: SlurmContext | None, meeting: Meeting | None, nproc: int) -> Node:
    launch = config.launch
    life = secrets.token_hex(4)
    if slurm is not None:
        rank = array_infra_rank(slurm) if launch.endpoint is not None else slurm.infra_rank
        host = slurm.nodename or socket.gethostname()
        address = launch.local_addr or (host if _resolves(host) else "")
        if not address and meeting is None:
            address = "127.0.0.1"
        elif not address and rank == 0 and meeting is not None:
            address = meeting.endpoints[0][0]
        return Node(f"{rank}-{life}", rank, host, address, nproc, slurm.order)
    if meeting is None:
        rank = launch.node_rank or 0
        return Node(f"{rank}-{life}", rank, socket.gethostname(), launch.local_addr or "127.0.0.1", nproc)
    rank = launch.node_rank if launch.node_rank is not None else _group_rank(os.environ)
    host = socket.gethostname()
    endpoint_host = meeting.endpoints[0][0]
    address = launch.local_addr or (endpoint_host if _is_ours(endpoint_host) else "")
    return Node(f"{host}-{rank}-{life}", rank, host, address, nproc)


def _group_rank(env: Mapping[str, str]) -> int:
    text = env.get("GROUP_RANK", "")
    return int(text) if text.isdecimal() and len(text) < 8 else -1


def _kill_wait_s(env: Mapping[str, str]) -> float:
    text = env.get(KILL_WAIT_ENV, "")
    try:
        return float(text) if text else _KILL_WAIT_S
    except ValueError:
        raise UsageError(f"{KILL_WAIT_ENV}={text!r} is not a number of seconds; unset it") from None


class _shown:
    """Local rank -> bits of the streams shown on the console (1 stdout, 2 stderr)."""

    def __init__(self, config: Config) -> None:
        self._launch = config.launch

    def __call__(self, local_rank: int) -> int:
        only = self._launch.local_ranks_filter
        if only is not None and local_rank not in only:
            return 0
        hidden = self._launch.redirects.of(local_rank) & ~self._launch.tee.of(local_rank)
        return int(Std.ALL & ~hidden)


def _resolves(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def _is_loopback(host: str) -> bool:
    return any(ipaddress.ip_address(a.partition("%")[0]).is_loopback for a in _addresses(host))


def _is_ours(host: str) -> bool:
    """Whether `host` is this machine: an address that can be bound here."""
    if host in ("localhost", socket.gethostname(), socket.getfqdn()):
        return True
    return any(_can_bind(address) for address in _addresses(host))


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
