"""What the cores are told, from the configuration. No record of a core repeats a default of the configuration."""

from __future__ import annotations

from nvrx_slurm.config.ft import FaultToleranceConfig
from nvrx_slurm.config.layers import Config
from nvrx_slurm.core.agent.events import AgentSettings
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.core.coordinator.states import CoordinatorSettings
from nvrx_slurm.types import KindCount, RestartPolicy

KILL_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 1.0, 30.0  # the least and the most


def agent_settings(config: Config, term_timeout_s: float | None = None) -> AgentSettings:
    """The settings of the agent's core. `term_timeout_s`: what Slurm leaves between SIGTERM and SIGKILL; None = all."""
    launch = config.launch
    ft = config.ft
    return AgentSettings(
        stop_timeout_s=launch.workers_stop_timeout,
        idle_s=ft.stop_idle_timeout,
        term_timeout_s=launch.term_timeout if term_timeout_s is None else term_timeout_s,
        kill_timeout_s=KILL_TIMEOUT_S,
        join_timeout_s=launch.rdzv_conf.join_timeout,
        policy=RestartPolicy(ft.restart_policy),
        hang_collect_s=ft.hang_collect_s,
        warning_signum=ft.warning_signal or 0,
    )


def coordinator_settings(
    config: Config, agent: AgentSettings, preflight_s: float
) -> CoordinatorSettings:
    """The settings of the coordinator's core, in a job with one node. `preflight_s`: the longest that a preflight
    takes."""
    launch = config.launch
    ft = config.ft
    return CoordinatorSettings(
        segment=ft.segment,
        max_restarts=launch.max_restarts,
        policy=agent.policy,
        limits=restart_limits(ft),
        max_active=launch.nnodes.max if launch.nnodes is not None else 0,
        hang_collect_s=agent.hang_collect_s,
        look_again_s=min(max(_LOOK_AGAIN_S[0], ft.step_timeout_min / 20), _LOOK_AGAIN_S[1]),
        hang_exclude=ft.hang_exclude,
        straggler_window_s=ft.straggler_window,
        straggler_exclude=ft.straggler_exclude,
        tells_of_cycles=bool(ft.attribution_service or ft.cycle_info_dir),
        stops_on_advice=ft.attribution_stop_action == "no-restart",
        tracks_progress=ft.is_progress_tracking_enabled or ft.checkpoint_dir is not None,
        finds_checkpoints=ft.checkpoint_dir is not None,
        join_timeout_s=launch.rdzv_conf.join_timeout,
        last_call_s=launch.rdzv_conf.last_call_timeout,
        stop_timeout_s=agent.stop_timeout_s + 2 * agent.kill_timeout_s + preflight_s,
        drain_timeout_s=max(agent.stop_timeout_s, agent.term_timeout_s) + agent.kill_timeout_s,
        warn_before_end_s=ft.warn_before_end,
        stop_before_end_s=config.stop_before_end_s,
        warning_signum=agent.warning_signum,
    )


def restart_limits(ft: FaultToleranceConfig) -> RestartLimits:
    """What bounds the restarts of a job besides their sum."""
    return RestartLimits(
        by_kind=tuple(KindCount(kind, count) for kind, count in ft.max_restarts_by_fault.items()),
        crash_loop_s=ft.crash_loop_window,
        crash_loop_pause_s=ft.crash_loop_backoff,
        max_no_progress_cycles=max(0, ft.max_no_progress_cycles),
        min_progress_iterations=ft.min_progress_iterations,
        poison_iterations=ft.poisoned_checkpoint_iterations,
        no_restart_code=ft.no_restart_exit_code,
        max_failed_starts=ft.max_failed_starts,
        stops_on_repeats=ft.attribution_stop_action == "no-restart",
    )
