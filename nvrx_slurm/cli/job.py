"""This node's part of the job: the settings of its agent and, on the node that hosts it, of the coordinator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nvrx_slurm.cli import rendezvous
from nvrx_slurm.cli.here import RUN_ENV, Here, Layout, layout, working_directory
from nvrx_slurm.cli.worker import worker_spec
from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.kinds import SECONDS
from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.coordinator import CoordinatorSettings
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.preflight.head_start import PreflightSpec, preflight_spec
from nvrx_slurm.slurm import srun
from nvrx_slurm.slurm.control import END_TIME
from nvrx_slurm.system import numa
from nvrx_slurm.types import KindCount, RestartPolicy

KILL_WAIT_ENV = "NVRX_KILL_WAIT"  # seconds between SIGTERM and SIGKILL on this cluster; set for the tasks of a step
_KILL_WAIT_MARGIN_S = 5.0  # for the agent to reap, report and exit
_KILL_TIMEOUT_S = 10.0


def make_job(here: Here, script: str, args: tuple[str, ...]) -> NodeJob:
    """This node's part of the job. Asks Slurm at most for one node's address. Raises UsageError."""
    launch, slurm, shape = here.launch, here.slurm, layout(here)
    meeting = rendezvous.meeting(here, shape.nodes)
    hosts = meeting is None or rendezvous.may_host(here, meeting)
    node = rendezvous.node(here, meeting, shape.nproc)
    preflight, agent = _preflight(here, shape), _agent(here, elects=meeting is not None)
    coordinator = _coordinator(here, shape, agent, preflight)
    info = logs = attribution = until_done = None
    # Imported only where they are wanted: most jobs start without them.
    if here.ft.per_cycle_applog_prefix or here.ft.cycle_info_dir:
        from nvrx_slurm.cli.merged_logs import cycle_files, log_spec

        logs = log_spec(here, shape)
        info = cycle_files(here, shape, logs)
    if here.ft.attribution_service:
        from nvrx_slurm.cli.attribution import attribution_spec

        attribution = attribution_spec(here, shape.run_dir, logs, hosts)
    if launch.until_done:
        from nvrx_slurm.cli.chain import limits

        until_done = limits(here.resolved.config)
    return NodeJob(
        node=node,
        run_dir=shape.run_dir,
        spec=worker_spec(here, shape, script, args, info.current if info is not None else ""),
        agent=agent,
        preflight=preflight,
        coordinator=coordinator if hosts else None,
        meeting=meeting,
        slurm=slurm,
        control=here.control,
        progress_file=_progress_file(here.ft),
        electable=coordinator if meeting is not None else None,
        logs=logs,
        attribution=attribution,
        cycle_info=info,
        until_done=until_done,
        may_yield=slurm is None and launch.node_rank is None and launch.rdzv_conf.is_host is None,
    )


def _preflight(here: Here, shape: Layout) -> PreflightSpec:
    spec, first = preflight_spec(here.resolved.config), shape.on_node.first
    if shape.on_node.world == shape.nproc:
        return spec
    return replace(spec, reclaim=replace(spec.reclaim, gpus=(first, first + shape.nproc)))


def _agent(here: Here, elects: bool) -> AgentSettings:
    return AgentSettings(
        stop_timeout_s=here.launch.workers_stop_timeout,
        idle_s=here.ft.stop_idle_timeout,
        term_timeout_s=_term_timeout_s(here),
        kill_timeout_s=_KILL_TIMEOUT_S,
        join_timeout_s=here.launch.rdzv_conf.join_timeout,
        in_step=here.slurm is not None,
        policy=RestartPolicy(here.ft.restart_policy),
        hang_collect_s=here.ft.hang_collect_s,
        warning_signum=here.ft.warning_signal or 0,
        elects=elects,
    )


def _coordinator(here: Here, shape: Layout, agent: AgentSettings, preflight: PreflightSpec) -> CoordinatorSettings:
    launch, ft, slurm, nodes = here.launch, here.ft, here.slurm, shape.nodes
    expected = tuple(f"node rank {i}" for i in range(nodes.max)) if launch.node_rank is not None else ()
    if slurm is not None:
        expected = slurm.agents if launch.endpoint is None else ()  # an array has more nodes than this job
    settings = CoordinatorSettings(
        min_nodes=nodes.min,
        max_nodes=nodes.max,
        segment=ft.segment,
        max_restarts=launch.max_restarts,
        policy=agent.policy,
        limits=_restart_limits(ft),
        max_active=launch.nnodes.max if launch.nnodes is not None else 0,
        hang_collect_s=agent.hang_collect_s,
        hang_exclude=ft.hang_exclude,
        tells_of_cycles=bool(ft.attribution_service or ft.cycle_info_dir),
        stops_on_advice=ft.attribution_stop_action == "no-restart",
        tracks_progress=ft.is_progress_tracking_enabled,
        has_preflight=True,
        join_timeout_s=launch.rdzv_conf.join_timeout,
        last_call_s=launch.rdzv_conf.last_call_timeout,
        stop_timeout_s=agent.stop_timeout_s + 2 * agent.kill_timeout_s + preflight.longest_s,
        drain_timeout_s=max(agent.stop_timeout_s, agent.term_timeout_s) + agent.kill_timeout_s,
        time_limited=slurm is not None,
        warn_before_end_s=ft.warn_before_end,
        stop_before_end_s=here.resolved.config.stop_before_end_s,
        warning_signum=agent.warning_signum,
        expected=expected,
    )
    if not agent.elects:
        return settings
    return replace(settings, electors=len(slurm.agents) if slurm is not None and launch.endpoint is None else 1)


def _progress_file(ft: FaultToleranceConfig) -> str | None:
    path = ft.checkpoint_iteration_file
    return os.path.join(working_directory(), path) if path and ft.is_progress_tracking_enabled else None


def _restart_limits(ft: FaultToleranceConfig) -> RestartLimits:
    by_kind = ft.max_restarts_by_fault
    return RestartLimits(
        by_kind=tuple(KindCount(kind, count) for kind, count in by_kind.items()),
        crash_loop_s=ft.crash_loop_window,
        crash_loop_pause_s=ft.crash_loop_backoff,
        max_no_progress_cycles=max(0, ft.max_no_progress_cycles),
        min_progress_iterations=ft.min_progress_iterations,
        no_restart_code=ft.no_restart_exit_code,
        stops_on_repeats=ft.attribution_stop_action == "no-restart",
    )


def _kill_wait_s(env: Mapping[str, str]) -> float:
    text = env.get(KILL_WAIT_ENV) or "30"  # Slurm's default
    try:
        return float(SECONDS.parse(text))
    except ValueError as error:
        raise UsageError(f"{KILL_WAIT_ENV}={text!r} {error}; correct or unset it") from None


def _term_timeout_s(here: Here) -> float:
    wanted_s = here.launch.term_timeout
    return wanted_s if here.slurm is None else min(wanted_s, max(1.0, _kill_wait_s(here.env) - _KILL_WAIT_MARGIN_S))


# --- what is said before the job starts -------------------------------------------------------------------------------


def notes(here: Here, job: NodeJob) -> list[str]:
    """What the coordinator's agent says before the job starts: settings without effect, cut short, or unsafe."""
    if job.coordinator is None:
        return []
    found = [
        rendezvous.token_note(here, job.meeting),
        _term_note(here),
        _numa_note(job),
        _tools_note(here),
        _no_kill_note(here),
        "" if job.spec.wrapped else _hang_note(job.spec.limits) if job.spec.monitored else _UNMONITORED,
        here.ft.attribution_note,
    ]
    if job.logs is not None:
        from nvrx_slurm.cli.merged_logs import log_note

        found.append(log_note(here, job.logs))
    return [*here.resolved.notes, *filter(None, found)]


_UNMONITORED = "hangs are not watched for: NVRX_DISABLE_RANK_MONITORS is set"


def _hang_note(limits: Mapping[str, Any]) -> str:
    """Whether hangs are noticed, and how."""
    named = {**limits, **limits["rank_section_timeouts"], "workload_check_interval": None}
    found = [f"{name} {limit_s:g} s" for name, limit_s in named.items() if isinstance(limit_s, float)]
    if found:
        return f"hangs are watched for: {', '.join(found)}"
    return "hangs are not watched for: set --ft-rank-heartbeat-timeout or section timeouts; nvrx stacks shows ranks now"


def _term_note(here: Here) -> str:
    """Slurm leaves workers less time to end than the user asked for."""
    wanted_s, origin = here.launch.term_timeout, here.resolved.origins["term_timeout"]
    left_s = _term_timeout_s(here)
    if left_s >= wanted_s or origin.layer == "default":
        return ""
    return (
        f"{origin.with_value(f'{wanted_s:g}')} is cut to {left_s:g} s: Slurm kills everything KillWait"
        f" ({_kill_wait_s(here.env):g} s) after its SIGTERM; use #SBATCH --signal to warn workers earlier"
    )


def _tools_note(here: Here) -> str:
    """Slurm cannot be asked from here, as in most images."""
    slurm, env = here.slurm, here.env
    if slurm is None or shutil.which("scontrol", path=env.get("PATH")) is not None or here.control.slurm.name != "cli":
        return ""
    gone = f"if the batch host is lost, the job goes on, but stays RUNNING after its end: scancel {slurm.job_id}"
    limit = "the time limit is unknown, so no rank is warned or stopped before it"
    timed = bool(here.ft.warn_before_end or here.resolved.config.stop_before_end_s) and END_TIME not in env
    found = [gone] * (slurm.nnodes > 1) + [limit] * timed
    return f"Slurm's tools are not on PATH here: {'; '.join(found)}" if found else ""


def _no_kill_note(here: Here) -> str:
    """The user's own srun, as in NeMo-Run's template; it is seen where it runs on this host."""
    slurm = here.slurm
    if slurm is None or slurm.nnodes == 1 or RUN_ENV in here.env or not srun.without_no_kill(slurm.job_id):
        return ""
    return "srun was started without --no-kill: Slurm ends the step when a node is lost; add --no-kill to that srun"


def _numa_note(job: NodeJob) -> str:
    """Workers of this node are not bound though NUMA binding is on."""
    loose = [str(rank) for rank, prefix in enumerate(job.spec.prefixes) if not prefix]
    if not loose:
        return ""
    return f"{numa.BY_GPU}: local ranks {','.join(loose)} are not bound; --dry-run on this node says why"
