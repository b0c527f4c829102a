"""One worker, as its rank monitor sees it: its progress from the shared page, and the ladder that ends it."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections import namedtuple
from time import monotonic, monotonic_ns

from nvrx_slurm.core.rank import watch as core
from nvrx_slurm.monitor import kill
from nvrx_slurm.monitor.inspect import RankInspection
from nvrx_slurm.monitor.page import (
    FINISHED,
    FIRST_INIT,
    HEARTBEAT,
    INIT,
    LIMITS_AT,
    NOTE_BYTES,
    OUTSIDE,
    RANK_PID,
    SECTIONS,
    STEP,
    SUSPENDED,
    RankPage,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What comes with the agent's `watch`: the worker, the shared page, the rank's socket, both ends of that for
# inspections, and the file to which a rank without a client prints its stacks
Descriptors = namedtuple("Descriptors", "pidfd page listener inspector inspected stacks")


class Watched:
    """One worker of one cycle. `message`: the agent's `watch`; it owns the descriptors but that of the listener.

    `mark`: an entry of the rank's environment that only this life of the rank has. `ids`: the worker, for messages.
    `doomed`: it is killed, and what it left behind, until nothing is left. `ladder`: the steps that are left and their
    grace; not None: the rank is hung. `limits`: those in force.
    """

    def __init__(self, message: dict[str, Any], mark: bytes, fds: Descriptors) -> None:
        self.ids = {name: message[name] for name in ("cycle", "rank", "local_rank", "pid")}
        self.cfg: dict[str, Any] = message["cfg"]
        self.fds, self.pid, self.doomed = fds, int(message["pid"]), False
        self._page = RankPage(fds.page, check=False)
        self._words = self._page.words
        self._configured = self.limits = core.RankLimits(**message["limits"])
        self.inspection: RankInspection | None = None  # the inspection under way
        self.ladder: list[tuple[str, float]] | None = None
        self.passed_on: list[object] = []  # requests of the rank for the agent
        self.late_said = False  # whether its late end was said
        self._mark, self._signum = mark, int(message["signal"])
        self._channel = socket.socket(fileno=fds.inspector)
        self._rank = self.pid, fds.pidfd  # behind a wrapper another process
        # what an inspection of all ranks may take, before a hung one is ended
        self._hold_s: float = message["hold_s"]
        self._hold_until_s = self._step_until_s = 0.0
        self._exits: tuple[float, str] | None = None  # see core.View
        self._started_ns = int(message["started_s"] * 1e9)
        self._resumed_s, self._suspended_ns = 0.0, 0
        # Read once, for a restarted monitor; afterwards the rank cannot change this monitor's own facts.
        init_ns = self._words[INIT]
        self._init_ns = init_ns if self._started_ns <= init_ns <= monotonic_ns() else 0
        self._heartbeat_ns = 0  # the last plausible one
        self._limits_ns = 0  # since when learned limits are in force
        self._recall_limits()

    # --- what the shared page says of the rank ------------------------------------------------------------------------

    def _recall_limits(self) -> None:
        """Apply the limits that the rank told an earlier monitor of this worker, if they are plausible."""
        since_ns = self._words[LIMITS_AT]
        if self._init_ns and self._init_ns <= since_ns <= monotonic_ns():
            try:
                self.limits = self._configured.changed(json.loads(self._page.note))
                self._limits_ns = since_ns
            except (ValueError, AttributeError):
                pass

    def change_limits(self, told: dict[str, Any]) -> None:
        """Apply limits that the rank has learned; every limit begins anew. Raises ValueError and changes nothing."""
        if not self._init_ns:
            raise ValueError("limits can be changed after init_workload_monitoring() only")
        limits, note = (
            self._configured.changed(told),
            json.dumps(told, separators=(",", ":")).encode(),
        )
        if len(note) > NOTE_BYTES:
            raise ValueError(
                f"these limits take {len(note)} bytes, at most {NOTE_BYTES}: shorten the sections' names"
            )
        # if this monitor is killed from here on, the rank tells its successor again
        self._words[LIMITS_AT] = 0
        self._page.note = note
        self._limits_ns = self._words[LIMITS_AT] = monotonic_ns()
        self.limits = limits

    def initialize(self, pid: int) -> None:
        """Process `pid` called init_workload_monitoring(): earlier heartbeats, sections and limits no longer count."""
        self._words[LIMITS_AT] = self._limits_ns = 0
        self.limits = self._configured
        self._init_ns = self._words[INIT] = monotonic_ns()
        self._words[FIRST_INIT] = self._words[FIRST_INIT] or self._init_ns
        self._words[RANK_PID] = pid
        self._heartbeat_ns = 0

    def judge(self, due_s: float) -> core.Judgement:
        """Whether the rank is hung. `due_s` (monotonic): when this call was due; if it is late, both were stopped."""
        words = self._words
        heartbeat_ns = words[HEARTBEAT]
        finished_ns = words[FINISHED]
        outside_ns = words[OUTSIDE]
        opened_ns = words[SECTIONS : SECTIONS + len(self.limits.slots)].tolist()
        now_ns = monotonic_ns()  # after the words: a heartbeat of this moment is not in the future
        if now_ns / 1e9 > due_s + core.LATE_S:
            self._suspended_ns += now_ns - int(due_s * 1e9)
            words[SUSPENDED] = self._suspended_ns  # the rank can write to the page, too
            # for example `scontrol suspend`, or a virtual machine that was paused
            self._resumed_s = now_ns / 1e9
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
            tuple(
                since_ns / 1e9 if 0 < init_ns <= since_ns <= now_ns else None
                for since_ns in opened_ns
            ),
            outside_ns / 1e9 if 0 < init_ns <= outside_ns <= now_ns else None,
            (finished_ns / 1e9, "shutdown_workload_monitoring()") if finished else self._exits,
        )
        return core.judge(self.limits, view, now_ns / 1e9)

    def signs(self) -> dict[str, object]:
        """Seconds since the last sign of life, and the names of the open sections."""
        words, now_ns = self._words, monotonic_ns()
        opened = words[SECTIONS : SECTIONS + len(self.limits.slots)].tolist()
        signs_ns = self._started_ns, self._init_ns, words[HEARTBEAT], words[STEP], *opened
        last_ns = max(ns for ns in signs_ns if ns <= now_ns)
        names = [name for (name, _), since in zip(self.limits.slots, opened, strict=True) if since]
        return {"silent_s": (now_ns - last_ns) / 1e9, "section": ", ".join(names)}

    # --- its end ------------------------------------------------------------------------------------------------------

    def begin_end(self) -> None:
        """The rank is hung: choose the ladder that ends it."""
        pid, pidfd = self._find_rank()
        self.ladder = [*core.stop_ladder(self._signum, kill.stacks_signal(pidfd, pid) != 0)]
        self._hold_until_s = monotonic() + self._hold_s

    def _find_rank(self) -> tuple[int, int]:
        """Where the worker is a wrapper, the stacks are in the process that called init."""
        pid = int(self._words[RANK_PID])  # 0: none
        pidfd = kill.open_member(pid, self.pid) if pid != self._rank[0] else None
        if pidfd is not None:
            self._rank = pid, pidfd
        return self._rank

    def inspect(self, within_s: float) -> None:
        """Find out what the rank does, within `within_s` seconds."""
        self.inspection = RankInspection(
            *self._find_rank(), self._channel, self.fds.stacks, within_s
        )

    def release(self) -> None:
        """All ranks have been inspected, so that a hung one can be ended."""
        self._hold_s = self._hold_until_s = 0.0

    def expect_exit(self) -> None:
        """Most ranks of the node have ended well; this one should, too."""
        self._exits = monotonic(), "most other ranks of its node have ended"

    def climb(self) -> float | None:
        """Take the steps of the ladder that are due; returns the time of the next one (monotonic s), None: no more."""
        while self.ladder and monotonic() >= max(self._hold_until_s, self._step_until_s):
            step, grace_s = self.ladder.pop(0)
            if step == core.STACKS:
                pid, pidfd = self._rank
                kill.ask_for_stacks(pidfd, pid)
            elif step == core.SIGNAL:
                kill.send(self.fds.pidfd, signal.SIGCONT)
                kill.send(self.fds.pidfd, self._signum)
            elif step == core.KILL:
                kill.send(self.fds.pidfd, signal.SIGKILL)  # its agent lives, and kills the rest
            self._step_until_s = monotonic() + grace_s
        return max(self._hold_until_s, self._step_until_s) if self.ladder else None

    def kill(self, agent: int | None = None) -> bool:
        """Kill the rank and its descendants; whether any lived, so that another call is needed.

        `agent`: the process id of an agent that has died or is about to.
        """
        parent = os.getppid()
        self.doomed = kill.kill_rank(
            self.fds.pidfd, self.pid, self._mark, (parent, agent or parent)
        )
        return self.doomed

    def close(self) -> None:
        """Close the page and all file descriptors but that of the listener."""
        self._page.close()
        self._channel.close()
        for fd in {
            self.fds.page,
            self.fds.inspected,
            self.fds.stacks,
            self._rank[1],
            self.fds.pidfd,
        }:
            os.close(fd)
