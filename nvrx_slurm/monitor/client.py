"""RankMonitorClient: the rank's connection to its rank monitor."""

from __future__ import annotations

import os
import weakref
from collections import namedtuple
from collections.abc import Iterable, Mapping
from time import monotonic_ns, sleep
from typing import Any

from nvrx_slurm.core.checkpoint.interval import SAVE_S, best_interval_s, mtbf_s
from nvrx_slurm.core.rank import learn
from nvrx_slurm.core.rank.sections import SectionError, Sections, kind_of
from nvrx_slurm.core.rank.watch import STEP_SECTION, slots_of
from nvrx_slurm.monitor import distributed, transport, wire
from nvrx_slurm.monitor.distributed import RankInfo, env_int, megatron_iteration
from nvrx_slurm.monitor.page import (
    BEATS,
    BEFORE,
    BEFORE_SAVED,
    ENDED,
    FINISHED,
    FIRST_BEAT,
    HEARTBEAT,
    JUDGED,
    LEAVES,
    OUTSIDE,
    REPORT_SLOTS,
    REPORT_WORDS,
    REPORTED,
    REPORTS,
    SAVED,
    SECOND_BEAT,
    SECTIONS,
    SPENT,
    TIMES,
    TURN,
    WARNED,
    PageError,
    RankPage,
)
from nvrx_slurm.monitor.timeouts import Timeouts
from nvrx_slurm.monitor.transport import RankMonitorClientError
from nvrx_slurm.monitor.workload_control import WorkloadControlRequest

FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR = wire.SOCKET_ENV
_JUDGEMENT_NS = 2_000_000_000  # how long a report waits to be judged; an idle agent needs 0.3 s


class RankMonitorClient:
    """Connects this rank to its rank monitor. One per rank; not for processes forked from the rank.

    Attributes: `is_initialized`; `rank_info` (RankInfo) and `cfg` (the launcher's settings, read-only; both None before
    init); `hb_timeouts` (HeartbeatTimeouts) and `section_timeouts` (SectionTimeouts): the limits in force, before init
    only limits that were loaded.

    Heartbeats and sections are stores into memory shared with the monitor: no system call, no lock, no wait. In a child
    made by os.fork(), for example a data loader's worker, the client is uninitialised and its methods raise: a living
    child cannot keep a hung rank alive.

    Without a rank monitor (plain python, torchrun) and with NVRX_DISABLE_RANK_MONITORS=true in the environment, the
    client does nothing: `cfg` has the defaults, every section name is taken, calculations return False, should_stop()
    is False.
    """

    def __init__(self) -> None:
        self.rank_info: RankInfo | None = None
        self.cfg: Any = None
        self._timeouts = Timeouts()
        self._page: RankPage | None = None
        self._words: Any = None  # the page's memoryview while initialised
        self._floats: Any = None  # the same of doubles
        self._reports = 0  # of this process
        self._sections: Any = None  # Sections while initialised
        self._beats = 0  # beats of this process, also by earlier clients
        _clients.add(self)

    @property
    def is_initialized(self) -> bool:
        """Whether heartbeats and sections of this client reach the rank monitor."""
        return self._words is not None

    @property
    def hb_timeouts(self) -> learn.HeartbeatTimeouts:
        """The heartbeat limits in force."""
        return self._timeouts.heartbeats

    @property
    def section_timeouts(self) -> learn.SectionTimeouts:
        """The section limits in force."""
        return self._timeouts.sections

    def init_workload_monitoring(self, num_warmup_iters: int | None = None) -> None:
        """Start monitoring: all limits run from now on. Timeouts that were loaded or calculated before apply again.

        `num_warmup_iters` (>= 0, None = the launcher's num_warmup_iterations): this many first sections "step" have the
        timeout of section "warmup", if rank_section_timeouts has one. Waits for the rank monitor's answer: usually
        < 1 ms, at most 30 s. Raises RankMonitorClientError if already initialised, not started by nvrx-run, the rank is
        not known, or the monitor refuses or does not answer.
        """
        if self.is_initialized:
            raise RankMonitorClientError("init_workload_monitoring() was already called by this client")
        if num_warmup_iters is not None and (type(num_warmup_iters) is not int or num_warmup_iters < 0):
            raise RankMonitorClientError(f"num_warmup_iters must be an integer >= 0 or None, not {num_warmup_iters!r}")
        path = os.environ.get(FT_RANK_MONITOR_IPC_SOCKET_ENV_VAR, "")
        if not path:
            from nvrx_slurm.monitor import unmonitored

            rank_info, cfg, words = unmonitored.begin()
            self._floats = words
        else:
            rank_info = RankInfo.get_for_current_rank()
            reply, fds = transport.request(path, "init", rank=rank_info.global_rank, local_rank=rank_info.local_rank)
            self._page = _map(fds[0] if fds else None)
            _answer_inspections(fds[1:])
            cfg, words, self._floats = reply["cfg"], self._page.words, self._page.floats
        self.rank_info, self.cfg = rank_info, namedtuple("cfg", cfg)(**cfg)
        try:
            self._timeouts.configure(path, self.cfg)
        except RankMonitorClientError:
            self._detach()
            raise
        warmup = getattr(self.cfg, "num_warmup_iterations", 0) if num_warmup_iters is None else num_warmup_iters
        self._heartbeat_ns = now_ns = monotonic_ns()  # the last heartbeat, or the init before the first
        # from init to the first heartbeat, 0 = there was none; longest time between two
        self._first_ns = self._longest_ns = 0
        self._together, self._agreed = 0, False  # calls of should_stop_together() since init; one returned True
        self._dues, self._due_ns = 0, now_ns  # calls of checkpoint_due_together(); when one of both last returned True
        self._beats, names, self._reports = words[BEATS], list(self.section_timeouts.section), words[REPORTED]
        acts = self._timeouts.path and getattr(self.cfg, "loss_action", "warn") != "warn"
        # sections that save, where a wrong loss has consequences
        self._gated = frozenset(name for name in names if acts and kind_of(name) == "checkpoint")
        counted_ns = list(words[SPENT : SPENT + len(slots_of(names))])
        self._sections = Sections(names, warmup, now_ns, megatron_iteration, counted_ns)
        words[OUTSIDE] = self._sections.outside_ns
        self._words = words
        if getattr(self.cfg, "install_exception_hook", False):
            from nvrx_slurm.monitor import exception_hook

            exception_hook.install()

    def send_heartbeat(self) -> None:
        """Report progress of this rank; restarts `rank_heartbeat_timeout`. About 0.3 us, never blocks.

        Raises RankMonitorClientError if not initialised in this process.
        """
        now_ns = monotonic_ns()
        self._beats = beats = self._beats + 1
        try:
            self._words[HEARTBEAT] = now_ns
            self._words[BEATS] = beats
        except (TypeError, ValueError):
            raise _uninitialized("send_heartbeat") from None
        if beats < 3:
            self._begin(FIRST_BEAT if beats == 1 else SECOND_BEAT, now_ns)
        if self._first_ns:
            took_ns = now_ns - self._heartbeat_ns
            if took_ns > self._longest_ns:
                self._longest_ns = took_ns
        else:
            self._first_ns = now_ns - self._heartbeat_ns
        self._heartbeat_ns = now_ns

    def report(self, iteration: int, loss: float | None = None, grad_norm: float | None = None) -> None:
        """Report the loss and the norm of the gradients of an iteration; see `--ft-loss-action`. About 0.5 us.

        Numbers of Python: a tensor would wait for its GPU. A loss that is reduced over all ranks is compared, bit by
        bit. Raises RankMonitorClientError if not initialised in this process.
        """
        number = self._reports = self._reports + 1
        slot = REPORTS + number % REPORT_SLOTS * REPORT_WORDS
        try:
            floats, words = self._floats, self._words
            kinds = 0
            if loss is not None:
                floats[slot], kinds = loss, 1
            if grad_norm is not None:
                floats[slot + 1] = grad_norm
                kinds += 2
            words[slot + 2] = iteration * 4 + kinds
            words[REPORTED] = number
        except (TypeError, ValueError):
            if self._words is None:
                raise _uninitialized("report") from None
            raise

    def start_section(self, section: str) -> None:
        """Begin section `section`; its timeout runs until end_section(). Sections may nest and overlap.

        A name that is not in rank_section_timeouts has no effect. About 0.5 us, never blocks. Raises
        RankMonitorClientError if this section is open already, or if not initialised in this process.
        """
        sections, words = self._sections, self._words
        if words is None:
            raise _uninitialized("start_section")
        if section in self._gated:
            self._await_judgement()
        if section in sections.slots:
            now_ns = monotonic_ns()
            try:
                slot = sections.start(section, now_ns)
            except SectionError as error:
                raise RankMonitorClientError(str(error)) from None
            # The section first: a rank that is stopped between the two stores is still watched.
            words[SECTIONS + slot] = now_ns
            words[OUTSIDE] = 0
            words[SPENT + sections.turn] = sections.spent_ns[sections.turn]
            words[TURN] = now_ns
            if section == STEP_SECTION and not words[FIRST_BEAT]:
                self._begin(FIRST_BEAT, now_ns)

    def end_section(self, section: str) -> None:
        """End section `section`; if no other section is open, rank_out_of_section_timeout runs from now on.

        A name that is not in rank_section_timeouts has no effect. Raises RankMonitorClientError if this section is not
        open, or if not initialised in this process.
        """
        sections, words = self._sections, self._words
        if words is None:
            raise _uninitialized("end_section")
        if section in sections.slots:
            now_ns = monotonic_ns()
            try:
                slot = sections.end(section, now_ns)
            except SectionError as error:
                raise RankMonitorClientError(str(error)) from None
            words[OUTSIDE] = sections.outside_ns
            words[SECTIONS + slot] = 0
            words[SPENT + sections.turn] = sections.spent_ns[sections.turn]
            words[TURN] = now_ns
            words[TIMES + slot] += 1
            words[ENDED + slot] = now_ns
            if slot in sections.saves:
                words[BEFORE_SAVED] = sections.in_all_ns(now_ns)
                words[SAVED] = now_ns

    def end_all_sections(self) -> None:
        """End all open sections. Raises RankMonitorClientError if not initialised."""
        self._need_cfg("end_all_sections")
        for section in self._sections.open:
            self.end_section(section)

    def should_stop(self) -> bool:
        """Whether the job was warned (time limit, preemption): save your work and end with exit code 0. About 0.1 us.

        True stays True until the process ends. Ranks may learn of it some steps apart; use should_stop_together() where
        all ranks must save the same step. After a True on any rank, nvrx-run ends with 128 + the signal (138) instead
        of 0 once all ranks have ended well, so that the batch script can requeue the job. Raises RankMonitorClientError
        if not initialised in this process.
        """
        try:
            return self._words[WARNED] != 0 and self._leave()
        except (TypeError, ValueError):
            raise _uninitialized("should_stop") from None

    def should_stop_together(self, every: int = 1, group: Any = None) -> bool:
        """should_stop() with the same result on all ranks: True in the same call, once one rank was warned.

        A collective call: all ranks of `group` (a torch.distributed process group, None = the default one) call it
        equally often. Each `every`-th call (>= 1) costs one all_reduce of 8 bytes; the others return False. Without a
        process group it equals should_stop(), for a job of one rank. Raises RankMonitorClientError for several ranks
        without a group, a group without gloo and nccl, a bad `every`, or if not initialised.
        """
        self._need_cfg("should_stop_together")
        self._together += 1
        if not self._agreed and _is_turn("should_stop_together", self._together, every) and self._timeouts.path:
            self._agreed = distributed.any_of(self._words[WARNED] != 0, group)
        return self._agreed and self._leave()

    def checkpoint_due(self) -> bool:
        """Whether the best interval since the last save is over: save now, in a section such as "checkpointing".

        The interval is that of Young and Daly: from the mean time of the sections that save (60 s before the first),
        and NVRX_MTBF (seconds). It begins at the end of such a section, at a True, or at init. Ranks may learn of it
        some steps apart; see checkpoint_due_together(). Some us. Raises RankMonitorClientError if not initialised.
        """
        self._need_cfg("checkpoint_due")
        return self._is_due() and self._begin_interval()

    def checkpoint_due_together(self, every: int = 1, group: Any = None) -> bool:
        """checkpoint_due() with the same result on all ranks: True in the same call, once it is on one rank.

        A collective call, with the parameters, costs and errors of should_stop_together().
        """
        self._need_cfg("checkpoint_due_together")
        self._dues += 1
        turn = _is_turn("checkpoint_due_together", self._dues, every)
        return turn and distributed.any_of(self._is_due(), group) and self._begin_interval()

    def calculate_and_set_hb_timeouts(self, skip_if_not_ready: bool = False) -> bool:
        """Replace the heartbeat timeouts by safety_factor times the longest time that any rank has needed.

        A collective call: all ranks, in the same place. Timeouts that were calculated (or loaded) before count for one
        half. Returns True. If no rank has sent two heartbeats: raises RankMonitorClientError, or with
        `skip_if_not_ready` returns False, on all ranks. Also raises RankMonitorClientError if not initialised, without
        torch.distributed's default group on gloo or nccl, or if the rank monitor does not answer within 30 s.
        """
        cfg = self._need_cfg("calculate_and_set_hb_timeouts")
        return self._timeouts.learn_heartbeats(self._first_ns, self._longest_ns, cfg.safety_factor, skip_if_not_ready)

    def calculate_and_set_section_timeouts(
        self,
        selected_sections: Iterable[str] | None = None,
        calc_out_of_section: bool = True,
        skip_if_not_ready: bool = False,
    ) -> bool:
        """The same for the timeouts of the selected sections (None = all) and of the time in no section.

        Other sections keep their timeout. Not ready: a selected section was never ended on any rank. Raises like
        calculate_and_set_hb_timeouts(), and for a section that is not in rank_section_timeouts.
        """
        cfg = self._need_cfg("calculate_and_set_section_timeouts")
        if not self._timeouts.path:
            return False
        selected = list(self._sections.slots if selected_sections is None else selected_sections)
        for section in selected:
            if section not in self._sections.slots:
                raise RankMonitorClientError(f"section {section!r} is not in rank_section_timeouts")
        longest = self._sections.longest_ns(monotonic_ns())
        return self._timeouts.learn_sections(
            longest, cfg.safety_factor, selected, calc_out_of_section, skip_if_not_ready
        )

    def send_workload_control_request(self, req: WorkloadControlRequest) -> None:
        """Ask for an action that concerns more than this rank: see WorkloadAction.

        Returns when the launcher of this node has the request, usually within 1 ms; the launcher decides. Workers that
        are to end get SIGTERM. The first 4000 characters of the description are kept. Raises TypeError unless `req` is
        a WorkloadControlRequest, RankMonitorClientError if not initialised, or if the rank monitor does not answer
        within 30 s or cannot pass it on.
        """
        self._need_cfg("send_workload_control_request")
        if not isinstance(req, WorkloadControlRequest):
            raise TypeError(f"a WorkloadControlRequest is needed, not {type(req).__name__}")
        if self._timeouts.path:
            description = req.description[: wire.MAX_DESCRIPTION_CHARS]
            transport.request(self._timeouts.path, "control", action=req.action.name, description=description)

    def state_dict(self) -> dict[str, Any]:
        """The calculated timeouts, for the checkpoint: JSON-safe, the same on all ranks, empty if there are none."""
        return learn.to_state(self.hb_timeouts, self.section_timeouts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Use the timeouts of a former state_dict(): at once if initialised, else from init on.

        Sections that are not configured are ignored. Raises RankMonitorClientError if `state` is not such a state
        (nothing has changed then), or if the rank monitor does not answer within 30 s.
        """
        self._timeouts.load(state)

    def shutdown_workload_monitoring(self) -> None:
        """End monitoring: no timeout fires until the next init. Does nothing if not initialised."""
        if self._words is not None:
            self._words[FINISHED] = monotonic_ns()
        self._detach()

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin(self, word: int, now_ns: int) -> None:
        """This is the first or second heartbeat of the process, or its first "step"."""
        if word == FIRST_BEAT and not self._words[word]:
            self._words[BEFORE] = self._sections.in_all_ns(now_ns)
        self._words[word] = self._words[word] or now_ns

    def _await_judgement(self) -> None:
        """Wait until the last report is judged: a checkpoint of a training that went wrong should not be the newest."""
        until_ns = monotonic_ns() + _JUDGEMENT_NS
        while self._words[JUDGED] < self._reports and monotonic_ns() < until_ns:
            sleep(0.005)

    def _is_due(self) -> bool:
        words, saves = self._words, self._sections.saves
        times = sum(words[TIMES + slot] for slot in saves)
        save_s = sum(words[SPENT + slot] for slot in saves) / 1e9 / times if times else SAVE_S
        interval_s = best_interval_s(save_s, env_int("NVRX_MTBF", int(mtbf_s(1, 0.0, 0))))
        return bool(monotonic_ns() - max(self._due_ns, words[SAVED]) >= interval_s * 1e9)

    def _begin_interval(self) -> bool:
        self._due_ns = monotonic_ns()
        return True

    def _leave(self) -> bool:
        """Tell the agent that the end of this process is not the end of the training."""
        if not self._words[LEAVES]:
            self._words[LEAVES] = monotonic_ns()
        return True

    def _need_cfg(self, what: str) -> Any:
        if self._words is None:
            raise _uninitialized(what)
        return self.cfg

    def _detach(self) -> None:
        self._words = self._floats = self._sections = None
        self._timeouts.path = ""
        if self._page is not None:
            self._page.close()
            self._page = None


def current_client() -> RankMonitorClient | None:
    """A client of this process that is initialised; None: there is none."""
    return next((client for client in _clients if client.is_initialized), None)


def _uninitialized(what: str) -> RankMonitorClientError:
    return RankMonitorClientError(
        f"{what}() needs init_workload_monitoring() first, in the rank's own process "
        "(not in one forked from it) and before shutdown_workload_monitoring()"
    )


def _is_turn(what: str, calls: int, every: int) -> bool:
    if type(every) is not int or every < 1:
        raise RankMonitorClientError(f"{what}(every=...) must be an integer >= 1, not {every!r}")
    return calls % every == 0


def _map(fd: int | None) -> RankPage:
    if fd is None:
        raise RankMonitorClientError("the rank monitor's answer came without its memory page")
    try:
        return RankPage(fd)
    except (PageError, OSError) as error:
        raise RankMonitorClientError(f"the rank monitor's memory page cannot be used: {error}") from None
    finally:
        os.close(fd)


def _answer_inspections(fds: list[int]) -> None:
    """The monitor may want to know what this process does. A process has one monitor, also with several clients."""
    if not _answers and fds:
        from nvrx_slurm.monitor.inspected import Answers

        _answers.append(Answers(fds[0]))
    else:
        for fd in fds:
            os.close(fd)


_answers: list[Any] = []  # of this process
_clients: weakref.WeakSet[RankMonitorClient] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._detach()


os.register_at_fork(after_in_child=_after_fork_in_child)
