"""Settings of fault tolerance: every `--ft-...` flag and every key of the `fault_tolerance:` section."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import other_launchers
from nvrx_slurm.config import values as v
from nvrx_slurm.config.files import read_section, write_section
from nvrx_slurm.config.ft_logs import LogSettings
from nvrx_slurm.config.settings import MONITORING, Layer, Origin, ignored, maybe, parsed, setting, settings_of
from nvrx_slurm.core.rank.sections import is_wait
from nvrx_slurm.core.rank.watch import MAX_SECTIONS
from nvrx_slurm.errors import UsageError
from nvrx_slurm.types import FaultKind


@dataclass
class FaultToleranceConfig(LogSettings):
    """Fault tolerance settings, with the names and defaults of NVRx. Times in seconds, None = no limit.

    Values may be given as in YAML or flags (`rank_termination_signal="SIGUSR1"`). Raises UsageError for a bad one.
    """

    section: ClassVar[str] = "ft"

    rdzv_impl: str = ignored(k.choice("barrier"), "barrier", "there is one way to meet", begins="Rendezvous")
    keepalive_interval: float = setting(
        k.POSITIVE_SECONDS, 5.0, "A quiet connection between a node and the coordinator is probed this often."
    )
    keepalive_timeout: float = setting(
        k.POSITIVE_SECONDS, 5.0, "A probe without an answer for this long means that the node is lost."
    )

    warning_signal: signal.Signals | None = setting(
        v.USER_SIGNAL, signal.SIGUSR1, begins="Restarts and stopping",
        help="This signal means that the job is about to end: should_stop() is true in every rank, and no worker dies "
        "of it. A second one, 3 s later, ends the job. none: it is only passed on.",
    )  # fmt: skip
    warn_before_end: float = setting(
        k.SECONDS, 0.0,
        help="Warn all ranks this long before the time limit of the Slurm job, too; 0: only when a signal comes.",
    )  # fmt: skip
    stop_before_end: float = setting(
        k.SECONDS, 0.0,
        help="End the job as by SIGTERM this long before Slurm's time limit; 0: never, but with --until-done 30 s.",
    )  # fmt: skip
    restart_policy: str = setting(
        k.choice("any-failed", "min-healthy"), "any-failed", aliases=("--restart-policy",),
        help="any-failed: a fault of any worker restarts all. min-healthy: all nodes train, and faults restart all "
        "only when fewer than MIN of --nnodes run without one (for the in-process wrapper).",
    )  # fmt: skip
    max_restarts_by_fault: Mapping[FaultKind, int] = setting(
        v.RESTARTS_BY_FAULT, {},
        help="How many of --max-restarts may be spent on these kinds of first cause: hang:2,node-lost:5.",
    )  # fmt: skip
    crash_loop_window: float = setting(
        k.SECONDS, 5.0, "A cycle that ends in a fault sooner than this has died at its start."
    )
    crash_loop_backoff: float = setting(
        k.SECONDS, 1.0,
        help="Pause after ranks died at their start in two cycles in a row; doubles each time, up to 60. 0: none.",
    )  # fmt: skip
    stop_idle_timeout: float = setting(
        k.SECONDS, 0.8,
        help="SIGTERM to SIGKILL at a restart where all workers of the node wait in C. 0: --workers-stop-timeout.",
    )  # fmt: skip
    restart_check_interval: float = ignored(k.POSITIVE_SECONDS, 60.0, "restarts follow from events, nothing is polled")
    segment: int | None = maybe(
        k.integer(1, v.MAX_NODES),
        help="Give group ranks in segments of N nodes of one NVLink domain; MIN of --nnodes is a multiple of N.",
    )  # fmt: skip
    preload: tuple[str, ...] = setting(
        v.PRELOAD, (),
        help="Modules that a template process of each node imports once, for the workers that it forks: "
        "torch,torch._dynamo. auto: torch where the script seems to import it, then what ranks have imported out of a "
        "short list (numpy, pandas, ...).",
    )  # fmt: skip
    warm: str = setting(
        k.choice("auto", "off"), "auto",
        help="auto: fork workers from a template where each import gives them what it gives an executed worker. "
        "off: execute each worker.",
    )  # fmt: skip
    step_hook: str = setting(
        k.choice("auto", "off"), "auto",
        help="auto: count the steps of torch's optimizers, for scripts that send no heartbeats. off: do not.",
    )  # fmt: skip
    step_timeout_factor: float = setting(
        k.real(1.0, metavar="X"), 10.0,
        help="Inspect all ranks when one that sends no heartbeats makes no step for X times its longest pause so far.",
    )  # fmt: skip
    step_timeout_min: float = setting(
        k.SECONDS, 600.0, "The least time without a step after which all ranks are inspected. 0: never."
    )
    checkpoint_iteration_file: str | None = maybe(
        k.PATH,
        help="File with the iteration of the last checkpoint, that the coordinator's node can read: what counts as "
        "progress.",
    )  # fmt: skip
    checkpoint_dir: str | None = maybe(
        k.PATH,
        help="Directory of the checkpoints, that the coordinator's node can read: it is watched, and workers get the "
        "newest complete checkpoint as NVRX_RESUME_FROM.",
    )  # fmt: skip
    checkpoint_pattern: str | None = maybe(
        v.PATTERN, help="Regular expression for names in --ft-checkpoint-dir; its first group is the iteration."
    )
    checkpoint_memory: int | None = maybe(
        k.SIZE,
        help="Most memory of each node for what checkpoint.save() keeps, as 64G; its keeper starts with the job. "
        "Without: with the first save, and as much as cgroup and node leave.",
    )  # fmt: skip
    checkpoint_interface: str | None = maybe(
        k.TEXT, help="Keep copies of what checkpoint.save() keeps on another node, sent over this network interface."
    )
    max_no_progress_cycles: int = setting(
        k.integer(-1),
        3,
        "With a checkpoint iteration file or directory: so many cycles without progress end the job; <= 0: never.",
    )
    min_progress_iterations: int = setting(
        k.integer(1), 1, "A cycle makes progress if it ends at least this many iterations later than the cycle before."
    )
    poisoned_checkpoint_iterations: int = setting(
        k.integer(0), 100,
        help="With a checkpoint iteration file or directory: the same failure twice, so soon after one checkpoint, "
        "makes ranks take an older one (NVRX_RESUME_BEFORE). 0: never.",
    )  # fmt: skip
    max_failed_starts: int = setting(
        k.integer(0), 2,
        help="End the job when all ranks have ended with the same exception before the first step, so many times in a "
        "row. 0: never.",
    )  # fmt: skip
    no_restart_exit_code: int = setting(k.integer(1, 255), 93, "Exit code of a job that should not be started again.")
    check_remaining_processes: bool = ignored(k.BOOL, False, "what workers leave behind is killed in any case")

    initial_rank_heartbeat_timeout: float | None = setting(
        k.TIMEOUT, None, begins=MONITORING,
        help="Kill a rank without a first heartbeat this long after it began to be monitored.",
    )  # fmt: skip
    rank_heartbeat_timeout: float | None = setting(
        k.TIMEOUT, None, "Kill a rank when this long passed since its last heartbeat."
    )
    rank_init_timeout: float | None = setting(
        k.TIMEOUT, None, "Kill a rank that was started this long ago and never called init_workload_monitoring."
    )
    rank_exit_timeout: float | None = setting(
        k.TIMEOUT, None,
        help="Kill a rank that has not ended this long after shutdown_workload_monitoring(), or after most other ranks"
        " of its node. The console names a rank that takes longer than 60 s, in any case.",
    )  # fmt: skip
    rank_termination_signal: signal.Signals = setting(
        v.SIGNAL, signal.SIGKILL, "Sent, after SIGCONT, to a rank that hangs."
    )
    workload_check_interval: float = setting(
        k.POSITIVE_SECONDS, 5.0,
        help="A timeout that a rank calculates is at least this, unless a shorter one is configured. Nothing is "
        "polled.",
    )  # fmt: skip
    rank_section_timeouts: Mapping[str, float | None] = setting(
        v.SECTION_TIMEOUTS, {}, "Kill a rank that stays longer in one of these sections; none: only time it."
    )
    rank_out_of_section_timeout: float | None = setting(
        k.TIMEOUT, None,
        help="Kill a rank that was in no section for this long. With a section step and none named warmup, the time "
        "before the first step does not count.",
    )  # fmt: skip
    safety_factor: float = setting(
        k.real(1.0, high=1000.0), 5.0, "A timeout that a rank calculates is this many times the longest time seen."
    )
    loss_action: str = setting(
        k.choice("warn", "restart", "stop"), "warn",
        help="When report() tells of a loss that is not finite, stays far above its median, or is not the same on the "
        "ranks of a node: say so, restart before the next section that saves, or end the job with 93.",
    )  # fmt: skip
    num_warmup_iterations: int = setting(
        k.integer(0), 5, "This many first sections step have the timeout of the section warmup, if there is one."
    )
    skip_section_response: bool = ignored(
        k.BOOL, True, "heartbeats and sections go through shared memory, without an answer"
    )
    install_exception_hook: bool = setting(
        k.BOOL, False,
        help="An uncaught exception ends a rank at once after its traceback; nothing waits for threads or collectives.",
    )  # fmt: skip
    hang_collect: float = setting(
        k.real(0.0, high=30.0, unit="seconds", metavar="SECONDS"), 1.5,
        help="When a rank hangs, inspect all ranks for at most this long, and name the one that the others wait for; "
        "0: do not. Without effect under min-healthy.",
    )  # fmt: skip
    hang_exclude: bool = setting(
        k.BOOL, False,
        help="Leave out the node of the rank that the others wait for, where the evidence is clear and a spare is "
        "there; at most 5 % of the nodes.",
    )  # fmt: skip

    waiting_sections: tuple[str, ...] = setting(
        v.NAMES, (), begins="Slow ranks",
        help="Sections in which ranks wait for each other. Default: those whose name has wait, barrier, allreduce or "
        "sync in it.",
    )  # fmt: skip
    straggler_window: float = setting(
        k.SECONDS, 30.0, "Look for ranks that are slower than the others in windows of this length; 0: do not."
    )
    straggler_exclude: bool = setting(
        k.BOOL, False,
        help="Leave the node of a slow rank out at the next restart, or at once where it has cost more than a restart; "
        "needs a spare, and at most 5 % of the nodes.",
    )  # fmt: skip

    node_health_checks: bool = setting(
        k.BOOL,
        True,
        "Check this node before every cycle; one that fails is left out.",
        begins="Health checks",
    )
    node_health_check_interval: float = setting(
        k.POSITIVE_SECONDS, 5.0, "Time between two GPU (and NIC) checks while the node works or waits."
    )
    node_health_check_endpoint: str | None = maybe(
        k.UNIX_SOCKET, "Unix socket of an nvhcd-compatible service that is asked before every cycle."
    )
    enable_nic_healthcheck: bool = setting(k.BOOL, True, "Check the links of the NICs before every cycle.")
    enable_nic_monitor: bool = setting(
        k.BOOL, False, "Watch the error counters of the NICs (link_downed and others) all the time."
    )
    pci_topo_file: str | None = ignored(k.optional(k.PATH), None, "the ports of all NICs are checked")
    link_down_path_template: str | None = maybe(k.PATH, "Path of a NIC's link_downed counter, with {nic}.")
    link_state_path_template: str | None = maybe(k.PATH, "Path of a NIC's port state, with {nic}.")
    enable_dist_storage_healthcheck: bool = setting(
        k.BOOL, False, "Check Lustre's health and all Lustre and NFS mounts before every cycle."
    )
    storage_healthcheck_path: str | None = maybe(
        k.ABSOLUTE_PATHS, flag="--ft-storage-health-check-path", aliases=("--ft-storage-healthcheck-path",),
        help="Absolute paths, separated by commas, that must be readable before every cycle.",
    )  # fmt: skip
    storage_hang_is_failure: bool = setting(
        k.BOOL, False,
        help="A storage path that does not answer fails its check: a slow server can cost the job all its nodes.",
    )  # fmt: skip

    gpu_memory_reclaim_timeout: float = setting(
        k.SECONDS, 50.0, "Longest wait for GPU memory to be free before a restart; 0: no wait.", begins="GPUs and NUMA"
    )
    gpu_memory_tolerance_mb: float = setting(
        k.real(0.0, high=1e9, unit="megabytes", metavar="MB"), 512.0, "Used GPU memory that counts as free."
    )
    gpu_memory_poll_interval: float = setting(k.POSITIVE_SECONDS, 2.0, "Time between two readings of used GPU memory.")
    numa_bind_strict: bool = setting(k.BOOL, True, "With NUMA binding: numactl --membind; false: --localalloc.")

    log_level: int = setting(
        v.LOG_LEVEL, logging.INFO, "Level of our own messages: DEBUG, INFO, WARNING, ERROR, CRITICAL.", begins="Logs"
    )

    @property
    def is_progress_tracking_enabled(self) -> bool:
        """Whether cycles without checkpoint progress are counted."""
        return self.checkpoint_iteration_file is not None and self.max_no_progress_cycles > 0

    @property
    def hang_collect_s(self) -> float:
        """How long all ranks are inspected when one hangs; 0 under min-healthy, where the other ranks go on."""
        return 0.0 if self.restart_policy == "min-healthy" else self.hang_collect

    def check(self) -> None:
        """Raises UsageError where settings contradict each other."""
        warn_s, stop_s = self.warn_before_end, self.stop_before_end
        if 0.0 < warn_s <= stop_s:
            raise UsageError(f"--ft-warn-before-end {warn_s:g} comes no sooner than --ft-stop-before-end {stop_s:g}")
        if warn_s > 0.0 and self.warning_signal is None:
            raise UsageError("--ft-warn-before-end warns by --ft-warning-signal, which is none; give SIGUSR1")
        if self.segment is not None and self.restart_policy == "min-healthy":
            raise UsageError("--ft-segment contradicts min-healthy, which goes on with broken segments; leave one out")
        if len({*self.rank_section_timeouts, *self.waiting_sections}) > MAX_SECTIONS:
            raise UsageError(f"--ft-waiting-sections and --ft-rank-section-timeouts have over {MAX_SECTIONS} names")
        self.check_logs()
        self.check_attribution()

    def rank_limits(self) -> dict[str, Any]:
        """What a rank monitor enforces, by the names of `core.rank.watch.RankLimits`; plain JSON."""
        names = "rank_init_timeout initial_rank_heartbeat_timeout rank_heartbeat_timeout rank_out_of_section_timeout"
        names += " rank_exit_timeout workload_check_interval rank_section_timeouts"
        waiting = dict.fromkeys(self.waiting_sections)  # they are timed, also without a limit
        found = {name: getattr(self, name) for name in names.split()}
        return found | {"rank_section_timeouts": {**waiting, **self.rank_section_timeouts}}

    def is_wait(self, section: str) -> bool:
        """Whether ranks wait for each other in this section."""
        return section in self.waiting_sections if self.waiting_sections else is_wait(section)

    def rank_settings(self) -> dict[str, Any]:
        """What a rank finds in `RankMonitorClient.cfg`: all that is about monitoring; plain JSON."""
        shown = (item for item in settings_of(type(self)) if item.group == MONITORING)
        return {item.name: getattr(self, item.name) for item in shown} | self.rank_limits()

    @classmethod
    def from_kwargs(cls, ignore_not_recognized: bool = False, **kwargs: Any) -> FaultToleranceConfig:
        """Build from keywords; an unknown one raises UsageError with the nearest name, unless it shall be ignored."""
        known = {f.name for f in fields(cls)}
        for name in kwargs:
            if name not in known and not ignore_not_recognized:
                near = k.did_you_mean(name, known) or "; remove it"
                raise UsageError(f"{name} is not a field of FaultToleranceConfig{near}")
        return cls(**{name: value for name, value in kwargs.items() if name in known})

    @classmethod
    def from_yaml_file(
        cls, cfg_path: str | os.PathLike[str], ignore_not_recognized: bool = False
    ) -> FaultToleranceConfig:
        """Read the `fault_tolerance:` section (at any depth) of a YAML file of at most 256 KiB.

        Raises UsageError: no file, not UTF-8, not YAML, no section or two, unknown key, wrong value.
        """
        layer = yaml_layer(os.fspath(cfg_path), strict=not ignore_not_recognized)
        known = {item.name: item for item in settings_of(cls)}
        return cls(**{name: parsed(known[name], raw, origin) for name, (raw, origin) in layer.items()})

    def to_yaml_file(self, cfg_path: str | os.PathLike[str]) -> None:
        """Write all fields so that `from_yaml_file` gives an equal object. Raises OSError."""
        plain = {item.name: item.kind.show(getattr(self, item.name)) for item in settings_of(type(self))}
        write_section(os.fspath(cfg_path), plain)


def yaml_layer(path: str, strict: bool = True) -> Layer:
    """Raw values of the file's section by field name. Raises UsageError; for unknown keys only if `strict`."""
    where, section = read_section(path)
    known = {item.name for item in settings_of(FaultToleranceConfig)}
    layer: Layer = {}
    for name, raw in section.items():
        if name in known:
            layer[str(name)] = (raw, Origin("yaml", f"{path}: {where}.{name}"))
        elif strict:
            near = other_launchers.instead(f"ft_{name}") or k.did_you_mean(str(name), sorted(known))
            hint = near or "; remove it, or use the flag"
            raise UsageError(f"{path}: {where}.{name} is not a known key{hint}")
    return layer
