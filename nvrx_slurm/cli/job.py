"""This node's part of the job: the settings of its agent and, on the node that hosts it, of the coordinator."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nvrx_slurm.cli import rendezvous
from nvrx_slurm.cli.log_tree import RUN_ENV, run_dir, working_directory
from nvrx_slurm.cli.place import Here, node_range, on_node, workers_per_node
from nvrx_slurm.cli.worker import worker_spec
from nvrx_slurm.config.kinds import SECONDS
from nvrx_slurm.config.layers import Config, Resolved
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.coordinator import CoordinatorSettings
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.job import Job
from nvrx_slurm.node.preflight.preflight_settings import PreflightSpec, preflight_spec
from nvrx_slurm.slurm import control, srun
from nvrx_slurm.slurm.api import connect
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.system import numa
from nvrx_slurm.types import KindCount, RestartPolicy

KILL_WAIT_ENV = "NVRX_KILL_WAIT"  # seconds between SIGTERM and SIGKILL on this cluster; set for the tasks of a step
_KILL_WAIT_MARGIN_S = 5.0  # for the agent to reap, report and exit
_KILL_TIMEOUT_S = 10.0


def make_job(config: Config, here: Here, env: Mapping[str, str], script: str, args: tuple[str, ...]) -> Job:
    """This node's part of the job. Asks Slurm at most for one node's address. Raises UsageError."""
    slurm = here.slurm
    nodes = node_range(config, slurm)
    meeting = rendezvous.meeting(config, slurm, nodes, env)
    nproc = workers_per_node(config, slurm, env)
    node, place = rendezvous.node(config, slurm, meeting, nproc), on_node(slurm, nproc, env)
    directory = run_dir(config, slurm, env)
    preflight = preflight_spec(config)
    if place.world > nproc:
        preflight = replace(preflight, reclaim=replace(preflight.reclaim, gpus=(place.first, place.first + nproc)))
    agent = AgentSettings(
        stop_timeout_s=config.launch.workers_stop_timeout,
        idle_s=config.ft.stop_idle_timeout,
        term_timeout_s=_term_timeout_s(config, slurm, env),
        kill_timeout_s=_KILL_TIMEOUT_S,
        join_timeout_s=config.launch.rdzv_conf.join_timeout,
        in_step=slurm is not None,
        policy=RestartPolicy(config.ft.restart_policy),
        hang_collect_s=config.ft.hang_collect_s,
        warning_signum=config.ft.warning_signal or 0,
    )
    info = logs = attribution = None
    hosts = meeting is None or rendezvous.may_host(config, slurm, meeting)
    coordinator = _coordinator(config, slurm, nodes, agent, preflight)
    if meeting is not None:
        of_slurm = slurm is not None and config.launch.endpoint is None
        agent = replace(agent, elects=True)
        coordinator = replace(coordinator, electors=len(slurm.agents) if slurm is not None and of_slurm else 1)
    # Imported only where they are wanted, here and below: most jobs start without them.
    if config.ft.per_cycle_applog_prefix or config.ft.cycle_info_dir:
        from nvrx_slurm.cli.merged_logs import cycle_files, log_spec

        logs = log_spec(config, slurm, nodes, directory)
        info = cycle_files(config, slurm, directory, logs)
    if config.ft.attribution_service:
        from nvrx_slurm.cli.attribution import attribution_spec

        attribution = attribution_spec(config, slurm, env, directory, logs, hosts)
    until_done = None
    if config.launch.until_done:
        from nvrx_slurm.cli.chain import limits

        until_done = limits(config)
    in_step, current = slurm is not None, info.current if info is not None else ""
    spec = worker_spec(config, env, nproc, directory, script, args, in_step, current, place)
    return Job(
        node,
        directory,
        spec,
        agent,
        preflight,
        coordinator if hosts else None,
        meeting,
        slurm,
        _progress_file(config),
        coordinator if meeting is not None else None,
        logs=logs,
        attribution=attribution,
        cycle_info=info,
        until_done=until_done,
        may_yield=slurm is None and config.launch.node_rank is None and config.launch.rdzv_conf.is_host is None,
    )


def notes(resolved: Resolved, job: Job, env: Mapping[str, str]) -> list[str]:
    """What the coordinator's agent says before the job starts: settings without effect, cut short, or unsafe."""
    found = [
        rendezvous.token_note(resolved.config, job.meeting, env),
        _term_note(resolved, job.slurm, env),
        _numa_note(job),
        _tools_note(resolved.config, job.slurm, env),
        _no_kill_note(job.slurm, env),
        "" if job.spec.wrapped else _hang_note(job.spec.limits) if job.spec.monitored else _UNMONITORED,
        resolved.config.ft.attribution_note,
    ]
    if job.logs is not None:
        from nvrx_slurm.cli.merged_logs import log_note

        found.append(log_note(resolved, job.logs))
    return [*resolved.notes, *filter(None, found)] if job.coordinator is not None else []


_UNMONITORED = "hangs are not watched for: NVRX_DISABLE_RANK_MONITORS is set"


def _hang_note(limits: Mapping[str, Any]) -> str:
    """Whether hangs are noticed, and how."""
    named = {**limits, **limits["rank_section_timeouts"], "workload_check_interval": None}
    found = [f"{name} {limit_s:g} s" for name, limit_s in named.items() if isinstance(limit_s, float)]
    if found:
        return f"hangs are watched for: {', '.join(found)}"
    return "hangs are not watched for: set --ft-rank-heartbeat-timeout or section timeouts; nvrx stacks shows ranks now"


def _progress_file(config: Config) -> str | None:
    path = config.ft.checkpoint_iteration_file
    return os.path.join(working_directory(), path) if path and config.ft.is_progress_tracking_enabled else None


def _coordinator(
    config: Config, slurm: SlurmContext | None, nodes: NodeRange, agent: AgentSettings, preflight: PreflightSpec
) -> CoordinatorSettings:
    conf = config.launch.rdzv_conf
    expected = tuple(f"node rank {i}" for i in range(nodes.max)) if config.launch.node_rank is not None else ()
    if slurm is not None:
        expected = slurm.agents if config.launch.endpoint is None else ()  # an array has more nodes than this job
    return CoordinatorSettings(
        min_nodes=nodes.min,
        max_nodes=nodes.max,
        segment=config.ft.segment,
        max_restarts=config.launch.max_restarts,
        policy=agent.policy,
        limits=_restart_limits(config),
        max_active=config.launch.nnodes.max if config.launch.nnodes is not None else 0,
        hang_collect_s=agent.hang_collect_s,
        hang_exclude=config.ft.hang_exclude,
        attributes=bool(config.ft.attribution_service),
        stops_on_advice=config.ft.attribution_stop_action == "no-restart",
        tracks_progress=config.ft.is_progress_tracking_enabled,
        has_preflight=True,
        join_timeout_s=conf.join_timeout,
        last_call_s=conf.last_call_timeout,
        stop_timeout_s=agent.stop_timeout_s + 2 * agent.kill_timeout_s + preflight.longest_s,
        drain_timeout_s=max(agent.stop_timeout_s, agent.term_timeout_s) + agent.kill_timeout_s,
        time_limited=slurm is not None,
        warn_before_end_s=config.ft.warn_before_end,
        stop_before_end_s=config.stop_before_end_s,
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
        stops_on_repeats=config.ft.attribution_stop_action == "no-restart",
    )


def _kill_wait_s(env: Mapping[str, str]) -> float:
    text = env.get(KILL_WAIT_ENV) or "30"  # Slurm's default
    try:
        return float(SECONDS.parse(text))
    except ValueError as error:
        raise UsageError(f"{KILL_WAIT_ENV}={text!r} {error}; correct or unset it") from None


def _term_timeout_s(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> float:
    wanted_s = config.launch.term_timeout
    return wanted_s if slurm is None else min(wanted_s, max(1.0, _kill_wait_s(env) - _KILL_WAIT_MARGIN_S))


def _term_note(resolved: Resolved, slurm: SlurmContext | None, env: Mapping[str, str]) -> str:
    """Slurm leaves workers less time to end than the user asked for."""
    wanted_s, origin = resolved.config.launch.term_timeout, resolved.origins["term_timeout"]
    left_s = _term_timeout_s(resolved.config, slurm, env)
    if left_s >= wanted_s or origin.layer == "default":
        return ""
    return (
        f"{origin.with_value(f'{wanted_s:g}')} is cut to {left_s:g} s: Slurm kills everything KillWait"
        f" ({_kill_wait_s(env):g} s) after its SIGTERM; use #SBATCH --signal to warn workers earlier"
    )


def _tools_note(config: Config, slurm: SlurmContext | None, env: Mapping[str, str]) -> str:
    """Slurm cannot be asked from here, as in most images."""
    if slurm is None or shutil.which("scontrol", path=env.get("PATH")) is not None or connect().name != "cli":
        return ""
    gone = f"if the batch host is lost, the job goes on, but stays RUNNING after its end: scancel {slurm.job_id}"
    limit = "the time limit is unknown, so no rank is warned or stopped before it"
    timed = bool(config.ft.warn_before_end or config.stop_before_end_s) and control.END_TIME not in env
    found = [gone] * (slurm.nnodes > 1) + [limit] * timed
    return f"Slurm's tools are not on PATH here: {'; '.join(found)}" if found else ""


def _no_kill_note(slurm: SlurmContext | None, env: Mapping[str, str]) -> str:
    """The user's own srun, as in NeMo-Run's template; it is seen where it runs on this host."""
    if slurm is None or slurm.nnodes == 1 or RUN_ENV in env or not srun.without_no_kill(slurm.job_id):
        return ""
    return "srun was started without --no-kill: Slurm ends the step when a node is lost; add --no-kill to that srun"


def _numa_note(job: Job) -> str:
    """Workers of this node are not bound though NUMA binding is on."""
    loose = [str(rank) for rank, prefix in enumerate(job.spec.prefixes) if not prefix]
    if not loose:
        return ""
    return f"{numa.BY_GPU}: local ranks {','.join(loose)} are not bound; --dry-run on this node says why"
