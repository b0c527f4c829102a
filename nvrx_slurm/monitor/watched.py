"""One worker, as its rank monitor sees it: settings from the agent, state from the shared page, and the kill ladder."""

from __future__ import annotations

import os
import signal
import socket
from time import monotonic, monotonic_ns

from nvrx_slurm.core.rank import watch as core
from nvrx_slurm.monitor import kill
from nvrx_slurm.monitor.look import Look
from nvrx_slurm.monitor.page import FINISHED, HEARTBEAT, INIT, LIMITS, LIMITS_AT, OUTSIDE, RANK_PID, SECTIONS, Page

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Watched:
    """One worker of one cycle. Takes ownership of the file descriptors; `message` is the agent's `watch`.

    `look_fd`, `rank_fd`: both ends of the socket for `monitor.look`.

    `mark`: an entry of the rank's environment that only this life of the rank has. `doomed`: it is killed, and what it
    left behind, until nothing is left.

    `requests_passed`: number of Continue requests passed on to the agent; `strongest`: the strongest other request.
    """

    def __init__(
        self, message: dict[str, Any], mark: bytes, pidfd: int, page_fd: int, look_fd: int, rank_fd: int
    ) -> None:
        self.cycle: int = message["cycle"]
        self.rank: int = message["rank"]
        self.local_rank: int = message["local_rank"]
        self.pid: int = message["pid"]
        self.cfg: dict[str, Any] = message["cfg"]
        self.page_fd, self.rank_fd = page_fd, rank_fd
        self._mark, self.doomed = mark, False
        self.look: Look | None = None  # that is going on
        self._channel = socket.socket(fileno=look_fd)
        self._hold_s: float = message["hold_s"]  # what a look at all ranks may take, before a hung rank is ended
        self._holds = False
        self.pidfd = self._rank_pidfd = pidfd
        self.page = Page(page_fd, check=False)
        self.requests_passed = self.strongest = 0
        self.ladder: list[tuple[str, float]] | None = None  # steps left; not None: the rank is hung
        self._signum: int = message["signal"]
        self._configured = self.limits = core.Limits(**message["limits"])
        self._rank_pid = self.pid
        self._step_until_s = 0.0
        self._exits: tuple[float, str] | None = None  # see core.View
        self.late_said = False
        self._started_ns = int(message["started_s"] * 1e9)
        self._resumed_s = 0.0
        # Read once, for a restarted monitor; afterwards the rank cannot change this monitor's own facts.
        init_ns = self.page.words[INIT]
        self._init_ns = init_ns if self._started_ns <= init_ns <= monotonic_ns() else 0
        self._heartbeat_ns = 0  # the last plausible one
        self._limits_ns = 0  # since when learned limits are in force
        self._recall_limits()

    def _recall_limits(self) -> None:
        """Apply the limits that the rank told an earlier monitor of this worker, if they are plausible."""
        since_ns = self.page.words[LIMITS_AT]
        if self._init_ns and self._init_ns <= since_ns <= monotonic_ns():
            values_ns = self._limit_words().tolist()
            try:
                self.limits = self._configured.with_values([value / 1e9 if value else None for value in values_ns])
                self._limits_ns = since_ns
            except ValueError:
                pass

    def _limit_words(self) -> memoryview:
        return self.page.words[LIMITS : LIMITS + len(self._configured.values())]

    def change_limits(self, told: dict[str, Any]) -> None:
        """Apply limits that the rank has learned; every limit begins anew. Raises ValueError and changes nothing."""
        if not self._init_ns:
            raise ValueError("limits can be changed after init_workload_monitoring() only")
        limits = self._configured.changed(told)
        self.page.words[LIMITS_AT] = 0  # if this monitor is killed from here on, the rank tells its successor again
        words = self._limit_words()
        for position, limit_s in enumerate(limits.values()):
            words[position] = round(limit_s * 1e9) if limit_s else 0
        self._limits_ns = self.page.words[LIMITS_AT] = monotonic_ns()
        self.limits = limits

    def initialize(self, pid: int) -> None:
        """Process `pid` called init_workload_monitoring(): earlier heartbeats, sections and limits no longer count."""
        self.page.words[LIMITS_AT] = self._limits_ns = 0
        self.limits = self._configured
        self._init_ns = self.page.words[INIT] = monotonic_ns()
        self.page.words[RANK_PID] = pid
        self._heartbeat_ns = 0

    def judge(self, due_s: float) -> core.Judgement:
        """Whether the rank is hung. `due_s` (monotonic): when this call was due; if it is late, both were stopped."""
        words = self.page.words
        heartbeat_ns, finished_ns, outside_ns = words[HEARTBEAT], words[FINISHED], words[OUTSIDE]
        opened_ns = words[SECTIONS : SECTIONS + len(self.limits.slots)].tolist()
        now_ns = monotonic_ns()  # after the words: a heartbeat of this moment is not in the future
        if now_ns / 1e9 > due_s + core.LATE_S:
            self._resumed_s = now_ns / 1e9  # for example `scontrol suspend`, or a virtual machine that was paused
        init_ns = self._init_ns
        if max(init_ns, self._heartbeat_ns) <= heartbeat_ns <= now_ns:
            self._heartbeat_ns = heartbeat_ns
        finished = bool(init_ns) and init_ns <= finished_ns <= now_ns
        view = core.View(
            self._started_ns / 1e9,
            init_ns / 1e9 if init_ns else None,
            self._heartbeat_ns / 1e9 if self._heartbeat_ns and init_ns else None,
            finished,
            max(self._resumed_s, self._limits_ns / 1e9),
            tuple(since_ns / 1e9 if 0 < init_ns <= since_ns <= now_ns else None for since_ns in opened_ns),
            outside_ns / 1e9 if 0 < init_ns <= outside_ns <= now_ns else None,
            (finished_ns / 1e9, "shutdown_workload_monitoring()") if finished else self._exits,
        )
        return core.judge(self.limits, view, now_ns / 1e9)

    def begin_end(self) -> None:
        """The rank is hung: choose the ladder that ends it."""
        self._find_rank()
        prints_stacks = kill.stacks_signal(self._rank_pidfd, self._rank_pid) != 0
        hold = [(core.HOLD, self._hold_s)] if self._hold_s else []
        self.ladder = [*hold, *core.stop_ladder(self._signum, prints_stacks)]

    def _find_rank(self) -> None:
        """Where the worker is a wrapper, the stacks are in the process that called init."""
        pid = self.page.words[RANK_PID]
        pidfd = kill.open_member(pid, self.pid) if pid != self._rank_pid else None
        if pidfd is not None:
            self._rank_pid, self._rank_pidfd = pid, pidfd

    def told(self, message: dict[str, Any]) -> None:
        """`look`: find out what the rank does, within `within_s` seconds. `end`: that is over for all ranks, so that
        a hung one can be ended. `exit`: most ranks of the node have ended well, this one should, too."""
        if message["type"] == "look":
            self._find_rank()
            self.look = Look(self._rank_pid, self._rank_pidfd, self._channel, message["within_s"])
            return
        if message["type"] == "exit":
            self._exits = monotonic(), "most other ranks of its node have ended"
            return
        self._hold_s = 0.0
        if self._holds:
            self._step_until_s = 0.0

    def signs(self) -> dict[str, object]:
        """Seconds since the last sign of life, and the names of the open sections."""
        words, now_ns = self.page.words, monotonic_ns()
        opened = words[SECTIONS : SECTIONS + len(self.limits.slots)].tolist()
        last_ns = max(ns for ns in (self._started_ns, self._init_ns, words[HEARTBEAT], *opened) if ns <= now_ns)
        names = [name for (name, _), since in zip(self.limits.slots, opened, strict=True) if since]
        return {"silent_s": (now_ns - last_ns) / 1e9, "section": ", ".join(names)}

    def climb(self) -> float | None:
        """Take the steps of the ladder that are due; returns the time of the next one (monotonic s), None: no more."""
        while self.ladder and monotonic() >= self._step_until_s:
            step, grace_s = self.ladder.pop(0)
            self._holds = step == core.HOLD
            if step == core.STACKS:
                kill.ask_for_stacks(self._rank_pidfd, self._rank_pid)
            elif step == core.SIGNAL:
                kill.send(self.pidfd, signal.SIGCONT)
                kill.send(self.pidfd, self._signum)
            elif step == core.KILL:
                kill.kill_group(self.pidfd, self.pid)  # its agent lives, and kills the rest when the cycle ends
            self._step_until_s = monotonic() + grace_s
        return self._step_until_s if self.ladder else None

    def kill(self, agent: int | None = None) -> bool:
        """Kill the rank and its descendants; whether any lived, so that another call is needed.

        `agent`: the process id of an agent that has died or is about to.
        """
        parent = os.getppid()
        self.doomed = kill.kill_rank(self.pidfd, self.pid, self._mark, (parent, agent or parent))
        return self.doomed

    def close(self) -> None:
        """Close the page and all file descriptors."""
        self.page.close()
        self._channel.close()
        for fd in {self.page_fd, self.rank_fd, self._rank_pidfd, self.pidfd}:
            os.close(fd)
