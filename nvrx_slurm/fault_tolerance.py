"""What a training script imports: tell the launcher that this rank is alive.

    from nvrx_slurm.fault_tolerance import RankMonitorClient

    monitor = RankMonitorClient()
    monitor.init_workload_monitoring()
    for batch in loader:
        train(batch)
        monitor.send_heartbeat()  # or: start_section("step") before, end_section("step") after the training
    monitor.shutdown_workload_monitoring()

Imports neither torch nor grpc; what is heavier than the client itself is imported when it is first used.
"""

from __future__ import annotations

import os
import socket
import sys
import weakref
from collections import namedtuple
from collections.abc import Iterable, Mapping
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from nvrx_slurm.core.rank.sections import SectionError, Sections
from nvrx_slurm.monitor import transport
from nvrx_slurm.monitor.page import FINISHED, HEARTBEAT, LEAVES, OUTSIDE, SECTIONS, WARNED, Page, PageError
from nvrx_slurm.monitor.transport import RankMonitorClientError

if TYPE_CHECKING:
    from nvrx_slurm.config.ft import FaultToleranceConfig
    from nvrx_slurm.core.rank.learn import HeartbeatTimeouts, SectionTimeouts
    from nvrx_slurm.monitor.workload_control import WorkloadControlRequest
    from nvrx_slurm.types import WorkloadAction

__all__ = [
    "FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR",
    "FaultToleranceConfig",
    "HeartbeatTimeouts",
    "RankInfo",
    "RankMonitorClient",
    "RankMonitorClientError",
    "SectionTimeouts",
    "WorkloadAction",
    "WorkloadControlRequest",
]

FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = "FT_RANK_MONITOR_IPC_SOCKET"

_LAZY = {
    "FaultToleranceConfig": "nvrx_slurm.config.ft",
    "HeartbeatTimeouts": "nvrx_slurm.core.rank.learn",
    "SectionTimeouts": "nvrx_slurm.core.rank.learn",
    "WorkloadAction": "nvrx_slurm.types",
    "WorkloadControlRequest": "nvrx_slurm.monitor.workload_control",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


class RankInfo(namedtuple("RankInfo", "global_rank local_rank host pid")):
    """Who this process is: its rank in the job, its rank on the node, the node's name, its process id."""

    __slots__ = ()

    @classmethod
    def get_for_current_rank(cls) -> RankInfo:
        """From torch.distributed if the script has initialised it, else from the launcher's environment.

        Raises RankMonitorClientError if neither knows the rank.
        """
        return cls(_global_rank(), _env_int("LOCAL_RANK", 0), socket.gethostname(), os.getpid())


def _global_rank() -> int:
    dist = sys.modules.get("torch.distributed")  # never imported for this: it costs a second
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    rank = _env_int("RANK", -1)
    if rank < 0:
        raise RankMonitorClientError(
            "the rank of this process is not known: RANK is not set and torch.distributed is not initialised; "
            "start the script with nvrx-run"
        )
    return rank


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise RankMonitorClientError(f"{name} in the environment must be an integer, not {text!r}") from None


class _Config:
    """The launcher's settings as read-only attributes, named as in FaultToleranceConfig."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "_values", values)

    def __getattr__(self, name: str) -> Any:
        if name in _Config.__slots__ or name not in self._values:
            raise AttributeError(f"the launcher sent no setting {name!r}")
        return self._values[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The setting, or `default` if the launcher sent none of that name."""
        return self._values.get(name, default)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("settings come from the launcher and are read-only in a rank")

    def __repr__(self) -> str:
        return f"cfg({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"


class RankMonitorClient:
    """Connects this rank to its rank monitor. One per rank; not for processes that the rank forks (see below).

    Attributes: `is_initialized`; `rank_info` (RankInfo) and `cfg` (the launcher's settings, read-only; both None before
    init); `hb_timeouts` (HeartbeatTimeouts) and `section_timeouts` (SectionTimeouts): the limits in force, before init
    only the ones that were loaded.

    Heartbeats and sections are stores into memory that is shared with the monitor: no syscall, no lock, no waiting,
    whatever state the monitor is in. In a child made by os.fork() (a data loader's worker) the client is uninitialised,
    so that a child that still lives can never be taken for its rank; using it there raises.
    """

    def __init__(self) -> None:
        from nvrx_slurm.core.rank import learn  # dataclasses: torch has them loaded, an import of this module need not

        self.rank_info: RankInfo | None = None
        self.cfg: _Config | None = None
        self.hb_timeouts: HeartbeatTimeouts = learn.HeartbeatTimeouts()
        self.section_timeouts: SectionTimeouts = learn.SectionTimeouts()
        self._learn = learn
        self._path = ""
        self._page: Page | None = None
        self._words: Any = None  # the page's memoryview while initialised
        self._sections: Any = None  # Sections while initialised
        self._heartbeat_ns = 0  # the last one, or the init before the first
        self._first_ns = 0  # from init to the first heartbeat, 0 = there was none
        self._longest_ns = 0  # between two heartbeats
        self._together, self._agreed = 0, False  # calls of should_stop_together() since init; one has said yes
        _clients.add(self)

    @property
    def is_initialized(self) -> bool:
        """Whether heartbeats and sections of this client reach the rank monitor."""
        return self._words is not None

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Start monitoring: from now on the limits run. Timeouts that were loaded or calculated before apply again.

        `num_warmup_iters` (>= 0, None = the launcher's num_warmup_iterations): that many sections "step" have the
        timeout of section "warmup", if rank_section_timeouts has one. Waits for the rank monitor's answer: usually
        < 1 ms, at most 30 s. Raises RankMonitorClientError if already initialised, not started by nvrx-run, the rank is
        not known, or the monitor refuses or does not answer.
        """
        if self.is_initialized:
            raise RankMonitorClientError("init_workload_monitoring() was already called by this client")
        if num_warmup_iters is not None and (type(num_warmup_iters) is not int or num_warmup_iters < 0):
            raise RankMonitorClientError(f"num_warmup_iters must be an integer >= 0 or None, not {num_warmup_iters!r}")
        path = os.environ.get(FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR)
        if not path:
            raise RankMonitorClientError(
                f"there is no rank monitor for this process ({FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR} is not set): "
                "start the script with nvrx-run, or try it within nvrx_slurm.testing.standalone_monitor()"
            )
        rank_info = RankInfo.get_for_current_rank()
        reply, fd = transport.request(path, "init", rank=rank_info.global_rank, local_rank=rank_info.local_rank)
        self._page = _map(fd)
        cfg = reply.get("cfg")
        self.cfg = _Config(cfg if isinstance(cfg, dict) else {})
        self.rank_info, self._path = rank_info, path
        try:
            self._apply(*self._configured())
        except RankMonitorClientError:
            self._detach()
            raise
        warmup = self.cfg.get("num_warmup_iterations", 0) if num_warmup_iters is None else num_warmup_iters
        self._heartbeat_ns = now_ns = monotonic_ns()
        self._first_ns = self._longest_ns = 0
        self._together, self._agreed = 0, False
        self._sections = Sections(list(self.section_timeouts.section), warmup, now_ns, _megatron_iteration)
        self._page.words[OUTSIDE] = self._sections.outside_ns
        self._words = self._page.words
        if self.cfg.get("install_exception_hook"):
            from nvrx_slurm.monitor import exception_hook

            exception_hook.install()

    def send_heartbeat(self) -> None:
        """Tell that this rank makes progress; restarts `rank_heartbeat_timeout`. About 0.2 us, never blocks.

        Raises RankMonitorClientError if not initialised in this process.
        """
        now_ns = monotonic_ns()
        try:
            self._words[HEARTBEAT] = now_ns
        except (TypeError, ValueError):
            raise self._uninitialized("send_heartbeat") from None
        if self._first_ns:
            took_ns = now_ns - self._heartbeat_ns
            if took_ns > self._longest_ns:
                self._longest_ns = took_ns
        else:
            self._first_ns = now_ns - self._heartbeat_ns
        self._heartbeat_ns = now_ns

    def start_section(self, section: str) -> None:
        """Section `section` begins; its timeout runs until end_section(). Sections may nest and overlap.

        A name that is not in rank_section_timeouts does nothing. About 0.5 us, never blocks. Raises
        RankMonitorClientError if this section is open already, or if not initialised in this process.
        """
        try:
            sections, words = self._sections, self._words
            if section not in sections.slots:
                return
            now_ns = monotonic_ns()
            slot = sections.start(section, now_ns)
            # The section first: a rank that is stopped between the two stores is not unwatched.
            words[SECTIONS + slot] = now_ns
            words[OUTSIDE] = 0
        except (AttributeError, TypeError, ValueError) as error:
            raise self._not_done("start_section", error) from None

    def end_section(self, section: str) -> None:
        """Section `section` is over; if no other is open, rank_out_of_section_timeout runs from now on.

        A name that is not in rank_section_timeouts does nothing. Raises RankMonitorClientError if this section is not
        open, or if not initialised in this process.
        """
        try:
            sections, words = self._sections, self._words
            if section not in sections.slots:
                return
            slot = sections.end(section, monotonic_ns())
            words[OUTSIDE] = sections.outside_ns
            words[SECTIONS + slot] = 0
        except (AttributeError, TypeError, ValueError) as error:
            raise self._not_done("end_section", error) from None

    def end_all_sections(self) -> None:
        """End every open section; nothing to do if none is. Raises RankMonitorClientError if not initialised."""
        if self._sections is None:
            raise self._uninitialized("end_all_sections")
        for section in self._sections.open:
            self.end_section(section)

    def should_stop(self) -> bool:
        """Whether the job was warned (time limit, preemption): save your work and end with exit code 0. About 0.1 us.

        It stays so until the process ends. Ranks may hear of it some steps apart: where all have to save the same step
        use should_stop_together(). After a yes to any rank nvrx-run ends with 128 + the signal (138) instead of 0 once
        all ranks have ended well, so that the batch script can requeue the job. Raises RankMonitorClientError if not
        initialised in this process.
        """
        try:
            return self._words[WARNED] != 0 and self._leave()
        except (TypeError, ValueError):
            raise self._uninitialized("should_stop") from None

    def should_stop_together(self, every: int = 1, group: Any = None) -> bool:
        """should_stop() that says yes on all ranks in the same call, as soon as one of them was warned.

        A collective call: all ranks of `group` (a torch.distributed process group, None = the default one), equally
        often. They only talk in each `every`-th call (>= 1), which costs one all_reduce of 8 bytes; in between the
        answer is no. Without a process group it is should_stop(), for a job of one rank. Raises RankMonitorClientError
        for several ranks without a group, a group without gloo and nccl, a bad `every`, or if not initialised.
        """
        self._need_cfg("should_stop_together")
        if type(every) is not int or every < 1:
            raise RankMonitorClientError(f"should_stop_together(every=...) must be an integer >= 1, not {every!r}")
        self._together += 1
        if not self._agreed and self._together % every == 0:
            self._agreed = _any_of_all(self._words[WARNED] != 0, group)
        return self._agreed and self._leave()

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Replace the heartbeat timeouts by safety_factor times the longest time that any rank has needed.

        A collective call: all ranks, in the same place. Timeouts that were calculated (or loaded) before count for one
        half. True if done; if no rank has sent two heartbeats, RankMonitorClientError, or False with
        `skip_if_not_ready`, the same on all ranks. Raises RankMonitorClientError as well if not initialised, without
        torch.distributed's default group on gloo or nccl, or if the rank monitor does not answer within 30 s.
        """
        cfg = self._need_cfg("calculate_and_set_hb_timeouts")
        first_s, longest_s = _longest_of_all_s([self._first_ns, self._longest_ns])
        try:
            new = self._learn.learn_heartbeats(first_s, longest_s, cfg.safety_factor, self.hb_timeouts)
        except self._learn.NotReady as error:
            return _not_ready(error, skip_if_not_ready)
        self._apply(new, self.section_timeouts)
        return True

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Iterable[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """The same for the timeouts of sections: of the selected ones (None = all), and of the time in none.

        Sections that are not selected keep their timeout. "Not ready" is when a selected section was never ended on any
        rank. Raises like calculate_and_set_hb_timeouts(), and for a section that is not in rank_section_timeouts.
        """
        cfg = self._need_cfg("calculate_and_set_section_timeouts")
        selected = list(self._sections.slots if selected_sections is None else selected_sections)
        for section in selected:
            if section not in self._sections.slots:
                raise RankMonitorClientError(f"section {section!r} is not in rank_section_timeouts")
        longest_ns, outside_ns = self._sections.longest_ns(monotonic_ns())
        *times_s, outside_s = _longest_of_all_s([*longest_ns.values(), outside_ns])
        longest_s = dict(zip(longest_ns, times_s, strict=True))
        try:
            new = self._learn.learn_sections(
                longest_s, outside_s, cfg.safety_factor, self.section_timeouts, selected, calc_out_of_section
            )
        except self._learn.NotReady as error:
            return _not_ready(error, skip_if_not_ready)
        self._apply(self.hb_timeouts, new)
        return True

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask for something that concerns more than this rank: see WorkloadAction.

        Returns when the launcher of this node has been told, usually within 1 ms. What follows is its decision; workers
        that are to end get SIGTERM. Of the description the first 4000 characters are kept. Raises TypeError for
        anything but a WorkloadControlRequest, RankMonitorClientError if not initialised, or if the rank monitor does
        not answer within 30 s or cannot pass it on.
        """
        self._need_cfg("send_workload_control_request")
        from nvrx_slurm.monitor import workload_control

        workload_control.send(self._path, req)

    def state_dict(self) -> dict[str, Any]:
        """The calculated timeouts, for the checkpoint: JSON-safe, the same on all ranks, empty if there are none."""
        return self._learn.to_state(self.hb_timeouts, self.section_timeouts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the timeouts of a former state_dict(): at once if initialised, else from init on.

        Those of sections that are not configured any more are ignored. Raises RankMonitorClientError if `state` is not
        such a state (nothing has changed then), or if the rank monitor does not answer within 30 s.
        """
        try:
            heartbeats, sections = self._learn.from_state(state)
        except ValueError as error:
            raise RankMonitorClientError(f"this is not the state of a RankMonitorClient: {error}") from None
        if not heartbeats.were_calculated:
            heartbeats = self.hb_timeouts
        if self.is_initialized:
            self._apply(heartbeats, self._learn.with_learned(self.section_timeouts, sections))
        else:
            self.hb_timeouts, self.section_timeouts = heartbeats, sections

    def shutdown_workload_monitoring(self) -> None:
        """End monitoring: no timeout fires after this, until the next init. Does nothing if not initialised."""
        if self._page is not None and self._words is not None:
            self._words[FINISHED] = monotonic_ns()
        self._detach()

    # --- inside -------------------------------------------------------------------------------------------------

    def _configured(self) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
        """The launcher's limits, with the ones that this client has learned or loaded before."""
        assert self.cfg is not None
        heartbeats = self.hb_timeouts
        if not heartbeats.were_calculated:
            heartbeats = self._learn.HeartbeatTimeouts(
                self.cfg.get("initial_rank_heartbeat_timeout"), self.cfg.get("rank_heartbeat_timeout"), False
            )
        configured = self._learn.SectionTimeouts(
            self.cfg.get("rank_section_timeouts") or {}, self.cfg.get("rank_out_of_section_timeout")
        )
        return heartbeats, self._learn.with_learned(configured, self.section_timeouts)

    def _leave(self) -> bool:
        """Let the agent know that the end of this process is not the end of the training."""
        if not self._words[LEAVES]:
            self._words[LEAVES] = monotonic_ns()
        return True

    def _apply(self, heartbeats: HeartbeatTimeouts, sections: SectionTimeouts) -> None:
        """Have the monitor use these limits; they are ours once it has said yes."""
        if told := self._learn.to_message(heartbeats, sections):
            transport.request(self._path, "limits", **told)
        self.hb_timeouts, self.section_timeouts = heartbeats, sections

    def _need_cfg(self, what: str) -> _Config:
        if self._words is None or self.cfg is None:
            raise self._uninitialized(what)
        return self.cfg

    def _not_done(self, what: str, error: Exception) -> RankMonitorClientError:
        if isinstance(error, SectionError):
            return RankMonitorClientError(str(error))
        if self._words is None:
            return self._uninitialized(what)
        return RankMonitorClientError(f"{what}() needs the name of a section ({error})")

    def _uninitialized(self, what: str) -> RankMonitorClientError:
        return RankMonitorClientError(
            f"{what}() needs init_workload_monitoring() first, in the rank's own process "
            "(not in one forked from it) and before shutdown_workload_monitoring()"
        )

    def _detach(self) -> None:
        self._words = self._sections = None
        if self._page is not None:
            self._page.close()
            self._page = None


def _longest_of_all_s(times_ns: list[int]) -> list[float]:
    from nvrx_slurm.monitor.collective import longest_of_all

    return [time_ns / 1e9 for time_ns in longest_of_all(times_ns)]


def _any_of_all(mine: bool, group: Any) -> bool:
    from nvrx_slurm.monitor import collective

    if group is not None or collective.is_initialized():
        return collective.any_of_all(mine, group)
    if _env_int("WORLD_SIZE", 1) > 1:
        raise RankMonitorClientError(
            "should_stop_together() is for all ranks: call torch.distributed.init_process_group() first"
        )
    return mine


def _not_ready(error: Exception, skip: bool) -> bool:
    if skip:
        return False
    raise RankMonitorClientError(str(error)) from None


def _megatron_iteration() -> int | None:
    """The iteration of Megatron's training loop, None where there is none."""
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    for name in ("curr_iteration", "iteration"):
        iteration = getattr(arguments, name, None)
        if type(iteration) is int:
            return iteration
    return None


def _map(fd: int | None) -> Page:
    if fd is None:
        raise RankMonitorClientError("the rank monitor's answer came without its memory page")
    try:
        return Page(fd)
    except (PageError, OSError) as error:
        raise RankMonitorClientError(f"the rank monitor's memory page cannot be used: {error}") from None
    finally:
        os.close(fd)


_clients: weakref.WeakSet[RankMonitorClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._detach()


os.register_at_fork(after_in_child=_after_fork_in_child)
