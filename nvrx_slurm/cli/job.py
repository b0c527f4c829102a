"""This node's part of the job: the settings of its workers, its agent and, where it may be, of the coordinator."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nvrx_slurm.cli import rendezvous
from nvrx_slurm.cli.here import (
    STDIN_ENV,
    Here,
    Layout,
    OnNode,
    in_foreground,
    layout,
    working_directory,
)
from nvrx_slurm.config.cores import agent_settings, coordinator_settings
from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.launch import LaunchConfig
from nvrx_slurm.core import preload
from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.coordinator import CoordinatorSettings
from nvrx_slurm.core.coordinator.status import JobLabels
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.preflight.head_start import PreflightSpec, preflight_spec
from nvrx_slurm.node.workers.worker_spec import (
    LINE_PREFIX,
    LOCAL_RANK_MACRO,
    WarmSpec,
    WorkerContract,
    WorkerSpec,
)
from nvrx_slurm.slurm.control import KILL_WAIT_S
from nvrx_slurm.system import numa
from nvrx_slurm.types import RestartPolicy

# seconds between SIGTERM and SIGKILL on this cluster; set for the tasks of a step
KILL_WAIT_ENV = "NVRX_KILL_WAIT"
BEGAN_ENV = "NVRX_BEGAN"  # when nvrx-run in front of the step began (Unix seconds)
# the job's; srun overwrites SLURM_JOB_NAME with the name of the step
JOB_NAME_ENV = "NVRX_JOB_NAME"
_KILL_WAIT_MARGIN_S = 5.0  # for the agent to reap, report and exit
_LONGEST_SCRIPT = 1 << 20  # characters that are read of it
_LABEL_CHARS = 120
_COMMAND_CHARS = 500
_RUN_PATH = (
    "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def make_job(here: Here, script: str, args: tuple[str, ...]) -> NodeJob:
    """This node's part of the job. Asks Slurm at most for one node's address. Raises UsageError."""
    launch = here.launch
    slurm = here.slurm
    shape = layout(here)
    meeting = rendezvous.meeting(here, shape.nodes)
    hosts = meeting is None or rendezvous.may_host(here, meeting)
    node = rendezvous.node(here, meeting, shape.nproc)
    preflight, agent = _preflight(here, shape), _agent(here, elects=meeting is not None)
    coordinator = _coordinator(here, shape, agent, preflight)
    info = logs = attribution = until_done = otlp = None
    # Imported only where they are wanted: most jobs start without them.
    if here.ft.per_cycle_applog_prefix or here.ft.cycle_info_dir:
        from nvrx_slurm.cli.job_logs import attribution_spec, check_writable, cycle_files, log_spec

        logs = log_spec(here, shape)
        info = cycle_files(here, shape, logs)
        if logs is not None and hosts:
            check_writable(logs)
        attribution = attribution_spec(here, shape.run_dir, logs, hosts)
    if launch.until_done:
        from nvrx_slurm.cli.chain import limits

        until_done = limits(here.resolved.config)
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in here.env):
        from nvrx_slurm.config.otel import otlp_target

        otlp = otlp_target(here.env)
    spec = _worker_spec(here, shape, script, args, info.current if info is not None else "")
    return NodeJob(
        node=node,
        run_dir=shape.run_dir,
        spec=spec,
        agent=agent,
        preflight=preflight,
        labels=_labels(here, shape, spec, script, args),
        coordinator=coordinator if hosts else None,
        meeting=meeting,
        slurm=slurm,
        control=here.control,
        progress_file=_progress_file(here.ft),
        checkpoints=_checkpoints(here.ft),
        electable=coordinator if meeting is not None else None,
        logs=logs,
        attribution=attribution,
        cycle_info=info,
        until_done=until_done,
        notify=here.ft.notify,
        slurm_comment=here.ft.slurm_comment,
        metrics_file=here.ft.metrics_file
        and here.ft.metrics_file.replace("{job}", shape.run_dir.job_id),
        otlp=otlp,
        began_s=float(here.env.get(BEGAN_ENV) or time.time()),
        may_yield=here.rank is None and launch.rdzv_conf.is_host is None,
    )


def _labels(
    here: Here, shape: Layout, spec: WorkerSpec, script: str, args: Sequence[str]
) -> JobLabels:
    env = here.env
    run = shape.run_dir
    watched = None
    if not spec.wrapped:
        watched = spec.monitored and bool(hang_limits(spec.limits) or spec.inspects_stalls)
    names = (JOB_NAME_ENV, "SLURM_JOB_NAME"), ("SLURM_JOB_USER", "USER"), ("SLURM_JOB_PARTITION",)
    name, user, partition = (
        next(filter(None, map(env.get, those)), "")[:_LABEL_CHARS] for those in names
    )
    command = shlex.join([script, *args])[:_COMMAND_CHARS]
    name = name or Path(script).stem[:_LABEL_CHARS]
    return JobLabels(run.job_id, run.run, name, user, partition, watched, command)


def hang_limits(limits: Mapping[str, Any]) -> list[str]:
    """The configured timeouts for hung ranks, as "NAME SECONDS s". `limits`: as of `rank_limits()`."""
    named = {**limits, **limits["rank_section_timeouts"], "workload_check_interval": None}
    return [
        f"{name} {limit_s:g} s" for name, limit_s in named.items() if isinstance(limit_s, float)
    ]


def _preflight(here: Here, shape: Layout) -> PreflightSpec:
    spec, first = preflight_spec(here.resolved.config), shape.on_node.first
    if shape.on_node.world == shape.nproc:
        return spec
    return replace(spec, reclaim=replace(spec.reclaim, gpus=(first, first + shape.nproc)))


def _agent(here: Here, elects: bool) -> AgentSettings:
    told = agent_settings(here.resolved.config, term_timeout_s(here))
    return replace(told, in_step=here.slurm is not None, elects=elects)


def _coordinator(
    here: Here, shape: Layout, agent: AgentSettings, preflight: PreflightSpec
) -> CoordinatorSettings:
    launch = here.launch
    slurm = here.slurm
    nodes = shape.nodes
    # an array that meets at an endpoint has more nodes than this job
    agents = slurm.agents if slurm is not None and launch.endpoint is None else ()
    by_hand = here.ranks_by_hand and launch.node_rank is not None
    return replace(
        coordinator_settings(here.resolved.config, agent, preflight.longest_s),
        min_nodes=nodes.min,
        max_nodes=nodes.max,
        time_limited=slurm is not None,
        expected=tuple(f"node rank {i}" for i in range(nodes.max)) if by_hand else agents,
        electors=(len(agents) or 1) if agent.elects else 0,
        one_life=bool(agents),
    )


def _progress_file(ft: FaultToleranceConfig) -> str | None:
    path = ft.checkpoint_iteration_file
    return (
        os.path.join(working_directory(), path)
        if path and ft.is_progress_tracking_enabled
        else None
    )


def _checkpoints(ft: FaultToleranceConfig) -> tuple[str, str | None] | None:
    path = ft.checkpoint_dir
    return (os.path.join(working_directory(), path), ft.checkpoint_pattern) if path else None


def kill_wait_s(env: Mapping[str, str]) -> float:
    """How long Slurm waits between SIGTERM and SIGKILL."""
    text = env.get(KILL_WAIT_ENV, "")
    return float(text) if text.replace(".", "", 1).isdecimal() else KILL_WAIT_S


def term_timeout_s(here: Here) -> float:
    """SIGTERM to SIGKILL at the end of the job; Slurm may leave less than the user asked for."""
    wanted_s = here.launch.term_timeout
    if here.slurm is None:
        return wanted_s
    return min(wanted_s, max(1.0, kill_wait_s(here.env) - _KILL_WAIT_MARGIN_S))


# --- workers ----------------------------------------------------------------------------------------------------------


def _worker_spec(
    here: Here, shape: Layout, script: str, args: tuple[str, ...], cycle_info: str
) -> WorkerSpec:
    """What starts the workers of this node. `cycle_info`: see `worker_spec.WorkerContract`.

    Raises UsageError where NUMA binding was asked for and fails.
    """
    launch, ft = here.launch, here.ft
    argv = worker_argv(launch, script, args)
    stdin = _stdin(here, shape)
    # forked workers have no input
    warm = None if stdin == 0 else _warm(here, argv, script, shape)
    return WorkerSpec(
        argv=argv,
        contract=contract(here, shape, cycle_info),
        limits=ft.rank_limits(),
        termination_signal=ft.rank_termination_signal,
        shown=partial(_shown, launch),
        line_prefix="" if launch.console_prefix == "none" else LINE_PREFIX,
        monitored=not launch.disable_rank_monitors,
        settings=ft.rank_settings(),
        prefixes=_prefixes(here, shape),
        warning_signal=ft.warning_signal or 0,
        in_step=here.slurm is not None,  # Slurm signals the workers of a step, too
        hang_collect_s=ft.hang_collect_s,
        straggler_window_s=ft.straggler_window,
        is_wait=ft.is_wait,
        step_hook=ft.step_hook == "auto" and not launch.no_python and argv[0] == sys.executable,
        step_timeout_factor=ft.step_timeout_factor,
        step_timeout_s=ft.step_timeout_min,
        warm=warm,
        stdin=stdin,
        script=os.path.abspath(script),
        wrapped=RestartPolicy(ft.restart_policy) is RestartPolicy.MIN_HEALTHY,
    )


def contract(here: Here, shape: Layout, cycle_info: str = "") -> WorkerContract:
    """What the environment of each worker says."""
    run, local = shape.run_dir, shape.on_node
    memory = here.ft.checkpoint_memory or 0
    return WorkerContract(
        run.job_id,
        here.launch.role,
        str(run.path),
        cycle_info,
        local.first,
        local.world,
        memory,
        here.ft.checkpoint_interface or "",
    )


def worker_argv(launch: LaunchConfig, script: str, args: tuple[str, ...]) -> list[str]:
    """Command line of one worker. Raises UsageError when the script is not there."""
    if launch.no_python:
        if shutil.which(script) is None:
            raise UsageError(
                f"the program {script} is not an executable file, nor on PATH; check the name"
            )
        return [script, *args]
    python = [os.environ.get("PYTHON_EXEC", sys.executable), "-u"]
    if launch.module:
        return [*python, "-m", script, *args]
    _check_script(script)
    return (
        [*python, "-c", _RUN_PATH, script, *args] if launch.run_path else [*python, script, *args]
    )


def _stdin(here: Here, shape: Layout) -> int:
    """The only rank of a job has the terminal of the person who started it, for breakpoint(); others have no input."""
    given = STDIN_ENV in here.env or in_foreground()
    return 0 if given and shape.nodes.max == shape.on_node.world == 1 else subprocess.DEVNULL


def _warm(here: Here, argv: list[str], script: str, shape: Layout) -> WarmSpec | None:
    """What the workers' template does; None where there is none."""
    launch, ft = here.launch, here.ft
    # other agents have workers on this node
    shared = shape.on_node.world > shape.nproc
    # a template has the command line of its workers
    differs = any(LOCAL_RANK_MACRO in word for word in argv)
    if ft.warm == "off" or launch.no_python or differs or argv[0] != sys.executable:
        return None
    # one template for each agent would take more memory than it saves
    if shared and not ft.preload:
        return None
    path0: str | None = os.path.dirname(os.path.realpath(script))
    if launch.module:
        path0 = os.getcwd()
    elif launch.run_path:
        path0 = ""
    if os.environ.get("PYTHONSAFEPATH"):
        path0 = None
    if launch.module or ft.preload:
        return WarmSpec(path0, ft.preload)
    guess = preload.guess(_text(os.path.abspath(script)), shape.nproc, partial(_text_beside, path0))
    return WarmSpec(path0, (), guess.first, guess.later, guess.next, guess.scout)


def _text_beside(path0: str | None, module: str) -> str:
    """The text of a module beside the script; "" where there is none."""
    if path0 is None:
        return ""
    path = os.path.join(path0, *module.split("."))
    return _text(f"{path}.py") or _text(os.path.join(path, "__init__.py"))


def _text(path: str) -> str:
    """The text of the script; "" where it cannot be read, and of a folder or zip file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_LONGEST_SCRIPT)
    except UnicodeDecodeError:
        return _text_of_encoding(path)
    except (OSError, ValueError):
        return ""


def _text_of_encoding(path: str) -> str:
    """The text of a script whose first lines name an encoding (PEP 263)."""
    import tokenize  # takes milliseconds, which most scripts do not need

    try:
        with tokenize.open(path) as file:
            return file.read(_LONGEST_SCRIPT)
    except (OSError, ValueError, SyntaxError):
        return ""


def _check_script(script: str) -> None:
    """Refuse it here once; otherwise each rank's Python would report it in each cycle."""
    if not os.path.exists(script):  # False for a path that is too long, unlike Path.exists
        raise UsageError(
            f"the training script {script} does not exist (in {working_directory()}); check the path"
        )
    if not os.access(script, os.R_OK):
        raise UsageError(
            f"the training script {script} may not be read by this user; check its permissions"
        )


def numa_bindings(here: Here, nproc: int, local: OnNode) -> tuple[numa.Binding, ...]:
    """The binding of each worker of this agent by --numa-bind or NVRX_GPUS_PER_NUMA; () if binding is off."""
    launch, strict = here.launch, here.ft.numa_bind_strict
    if launch.gpus_per_numa is not None:
        if launch.numa_bind != "off":
            raise UsageError(
                f"{numa.BY_GPU} and {numa.BY_NUMBER} exclude each other; leave one out"
            )
        prefixes = numa.prefixes(local.position + nproc, launch.gpus_per_numa, strict)[
            local.position :
        ]
        return tuple(numa.Binding(prefix, numa.BY_NUMBER) for prefix in prefixes)
    if launch.numa_bind == "off":
        return ()
    return numa.by_gpu(local.first + nproc, here.env, strict, Path(launch.sysroot) / "sys")[
        local.first :
    ]


def _prefixes(here: Here, shape: Layout) -> tuple[tuple[str, ...], ...]:
    prefixes = tuple(binding.prefix for binding in numa_bindings(here, shape.nproc, shape.on_node))
    numa.check(prefixes, numa.BY_NUMBER if here.launch.gpus_per_numa is not None else numa.BY_GPU)
    return prefixes


def _shown(launch: LaunchConfig, local_rank: int) -> int:
    """Bits of the streams of a local rank that the console shows (1 stdout, 2 stderr)."""
    only = launch.local_ranks_filter
    if only and local_rank not in only:
        return 0
    hidden = launch.redirects.of(local_rank) & ~launch.tee.of(local_rank)
    return 3 & ~hidden
