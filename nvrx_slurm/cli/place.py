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
from nvrx_slurm.agent.preflight_settings import PreflightSpec, preflight_spec
from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.agent.worker_env import WorkerContract
from nvrx_slurm.agent.workers import WorkerSpec
from nvrx_slurm.config import Config, NodeRange, Resolved, Std
from nvrx_slurm.config.values import MAX_SECONDS
from nvrx_slurm.control.auth import TOKEN_ENV
from nvrx_slurm.core.job.agent_events import AgentSettings
from nvrx_slurm.core.job.coordinator import CoordinatorSettings
from nvrx_slurm.core.job.restarts import RestartLimits
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import control
from nvrx_slurm.slurm.env import SlurmContext, Where, array_infra_rank, coordinator_ports, detect
from nvrx_slurm.system import gpus, numa
from nvrx_slurm.types import KindCount, Node, RestartPolicy

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
    log_dir = Path(config.launch.log_dir)
    log_dir = log_dir if log_dir.is_absolute() else _cwd() / log_dir
    if slurm is not None:
        return RunDir(log_dir, slurm.job_name_id, _file_name(env.get(RUN_ENV, "") or _run_name(slurm)))
    run_id = config.launch.rdzv_id
    if run_id == "none" and config.launch.node_range(None).max == 1:
        run_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return RunDir(log_dir, _file_name(run_id), "r0")


def _cwd() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        raise UsageError(f"the working directory is gone ({error.strerror}); cd to one that exists") from None


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
    """The number behind --nproc-per-node. Raises UsageError for `gpu` where there is none, and for too few workers."""
    nproc = _nproc(config, slurm, env)
    config.launch.check_local_ranks(nproc)
    return nproc


def _nproc(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> int:
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
    _check_script(script)
    return [*python, "-c", _RUN_PATH, script, *args] if launch.run_path else [*python, script, *args]


def _check_script(script: str) -> None:
    """Say it once, before every rank's Python says it in every cycle."""
    if not os.path.exists(script):  # False for whatever cannot be looked at, unlike Path's
        raise UsageError(f"the training script {script} does not exist (in {_cwd()}); check the path")
    if os.path.isdir(script) and not os.path.exists(os.path.join(script, "__main__.py")):
        raise UsageError(f"the training script {script} is a directory without a __main__.py; give a file")
    if not os.access(script, os.R_OK):
        raise UsageError(f"the training script {script} may not be read by this user; check its permissions")


def _numa(config: Config, nproc: int, env: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    found = numa_places(config, nproc, env)
    prefixes = tuple(where.prefix for where in found)
    what = numa.BY_NUMBER if config.launch.gpus_per_numa is not None else numa.BY_GPU
    if any(prefixes):
        numa.require_numactl(what)
        numa.check(prefixes, what)
    return prefixes


def numa_places(config: Config, nproc: int, env: Mapping[str, str]) -> tuple[numa.Place, ...]:
    """Where each worker of this node goes by --numa-bind or NVRX_GPUS_PER_NUMA; () if nothing is to be bound."""
    launch, strict = config.launch, config.ft.numa_bind_strict
    if launch.gpus_per_numa is not None:
        if launch.numa_bind != "off":
            raise UsageError(f"{numa.BY_GPU} and {numa.BY_NUMBER} exclude each other; leave one out")
        prefixes = numa.prefixes(nproc, launch.gpus_per_numa, strict)
        return tuple(numa.Place(prefix, numa.BY_NUMBER) for prefix in prefixes)
    if launch.numa_bind == "off":
        return ()
    return numa.by_gpu(nproc, env, strict, Path(launch.sysroot) / "sys")


def numa_note(job: Job) -> str:
    """A sentence about workers of this node that are not bound though NUMA binding is on, or ""."""
    loose = [str(rank) for rank, prefix in enumerate(job.spec.prefixes) if not prefix]
    if not loose:
        return ""
    return f"{numa.BY_GPU}: local ranks {','.join(loose)} are not bound; --dry-run on this node says why"


def make_job(config: Config, here: Here, env: Mapping[str, str], script: str, args: tuple[str, ...]) -> Job:
    """This node's part of the job. Asks Slurm at most for one node's address. Raises UsageError."""
    slurm = here.slurm
    nodes = node_range(config, slurm)
    meeting = _meeting(config, slurm, nodes, env)
    node = _node(config, slurm, meeting, workers_per_node(config, slurm, env))
    directory = run_dir(config, here, env)
    spec = WorkerSpec(
        argv=worker_argv(config, script, args),
        contract=WorkerContract(directory.job_id, config.launch.role, str(directory.path)),
        limits=config.ft.rank_limits(),
        termination_signal=config.ft.rank_termination_signal,
        shown=_shown(config),
        monitored=not config.launch.disable_rank_monitors,
        settings=config.ft.rank_settings(),
        prefixes=_numa(config, node.nproc, env),
        warning_signal=config.ft.warning_signal or 0,
        in_step=slurm is not None,
        wrapped=RestartPolicy(config.ft.restart_policy) is RestartPolicy.MIN_HEALTHY,
    )
    preflight = preflight_spec(config)
    agent = AgentSettings(
        stop_timeout_s=config.launch.workers_stop_timeout,
        term_timeout_s=_term_timeout_s(config, slurm, env),
        kill_timeout_s=_KILL_TIMEOUT_S,
        join_timeout_s=config.launch.rdzv_conf.join_timeout,
        in_step=slurm is not None,
        policy=RestartPolicy(config.ft.restart_policy),
        warning_signum=config.ft.warning_signal or 0,
    )
    hosts = meeting is None or _may_host(config, slurm, meeting)
    coordinator = _coordinator(config, slurm, nodes, agent, preflight) if hosts else None
    unsure = slurm is None and config.launch.node_rank is None and config.launch.rdzv_conf.is_host is None
    progress_file = _progress_file(config)
    return Job(node, directory, spec, agent, preflight, coordinator, meeting, slurm, progress_file, may_yield=unsure)


def _progress_file(config: Config) -> str | None:
    path = config.ft.checkpoint_iteration_file
    return os.path.join(_cwd(), path) if path is not None and config.ft.is_progress_tracking_enabled else None


def _coordinator(
    config: Config, slurm: SlurmContext | None, nodes: NodeRange, agent: AgentSettings, preflight: PreflightSpec
) -> CoordinatorSettings:
    conf = config.launch.rdzv_conf
    expected = tuple(f"node rank {i}" for i in range(nodes.max)) if config.launch.node_rank is not None else ()
    if slurm is not None:
        expected = slurm.nodes if config.launch.endpoint is None else ()  # a job array's nodes are not all in our list
    return CoordinatorSettings(
        min_nodes=nodes.min,
        max_nodes=nodes.max,
        max_restarts=config.launch.max_restarts,
        policy=agent.policy,
        limits=_restart_limits(config),
        max_active=config.launch.nnodes.max if config.launch.nnodes is not None else 0,
        tracks_progress=config.ft.is_progress_tracking_enabled,
        has_preflight=True,
        join_timeout_s=conf.join_timeout,
        last_call_s=conf.last_call_timeout,
        stop_timeout_s=agent.stop_timeout_s + 2 * agent.kill_timeout_s + preflight.longest_s,
        drain_timeout_s=max(agent.stop_timeout_s, agent.term_timeout_s) + agent.kill_timeout_s,
        time_limited=slurm is not None,
        warn_before_end_s=config.ft.warn_before_end,
        stop_before_end_s=config.ft.stop_before_end,
        warning_signum=agent.warning_signum,
        expected=expected,
    )


def _restart_limits(config: Config) -> RestartLimits:
    by_kind = config.ft.max_restarts_by_fault
    return RestartLimits(
        by_kind=tuple(KindCount(kind, count) for kind, count in by_kind.items()),
        crash_loop_s=config.ft.crash_loop_window,
        crash_loop_pause_s=config.ft.crash_loop_backoff,
        max_no_progress_cycles=max(0, config.ft.max_no_progress_cycles),
        min_progress_iterations=config.ft.min_progress_iterations,
        no_restart_code=config.ft.no_restart_exit_code,
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


def _term_timeout_s(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> float:
    wanted_s = config.launch.term_timeout
    return wanted_s if slurm is None else min(wanted_s, max(1.0, _kill_wait_s(env) - _KILL_WAIT_MARGIN_S))


def term_note(resolved: Resolved, slurm: SlurmContext | None, env: Mapping[str, str]) -> str:
    """A sentence where Slurm leaves workers less time to end than the user asked for, or ""."""
    wanted_s, origin = resolved.config.launch.term_timeout, resolved.origins["term_timeout"]
    left_s = _term_timeout_s(resolved.config, slurm, env)
    if left_s >= wanted_s or origin.layer == "default":
        return ""
    return (
        f"{origin.with_value(f'{wanted_s:g}')} is cut to {left_s:g} s: Slurm kills everything KillWait"
        f" ({_kill_wait_s(env):g} s) after its SIGTERM; use #SBATCH --signal to warn workers earlier"
    )


def time_limit_note(resolved: Resolved, slurm: SlurmContext | None) -> str:
    """A sentence about settings that count from a time limit where there is no Slurm to have one, or ""."""
    ft, origins = resolved.config.ft, resolved.origins
    told = {"ft_warn_before_end": ft.warn_before_end, "ft_stop_before_end": ft.stop_before_end}
    names = [origins[key].name for key, before_s in told.items() if before_s > 0]
    if slurm is not None or not names:
        return ""
    verb = "have" if len(names) > 1 else "has"
    return f"{' and '.join(names)} {verb} no effect: this is no Slurm job, and only those have a time limit"


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
        seconds = float(text) if text else _KILL_WAIT_S
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= MAX_SECONDS:  # a NaN is neither
        raise UsageError(f"{KILL_WAIT_ENV}={text!r} is not a number of seconds; unset it")
    return seconds


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
