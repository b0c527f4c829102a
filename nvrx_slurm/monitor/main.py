"""The rank monitor: one tiny process per rank that ends it when it hangs, or when the agent is gone.

Started by the agent as `python -I -S -c ... FD` with one end of a SOCK_SEQPACKET pair. Everything that belongs to one
life of the worker comes with the agent's `watch` message, as file descriptors: the worker's pidfd, the shared page, and
the socket its rank talks to. A monitor that is killed therefore loses nothing: its successor gets the same `watch`.

It sleeps in poll(2) exactly until the rank's next deadline, and for ever when there is none. It ends on `quit`, or on
the end of the control socket, which means that the agent is dead: then it kills the worker's process group first.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
from time import monotonic, monotonic_ns

from nvrx_slurm.core.rank import watch as core
from nvrx_slurm.monitor import kill, wire
from nvrx_slurm.monitor.forwarding import Forwarding, widen
from nvrx_slurm.monitor.page import (
    FINISHED,
    HEARTBEAT,
    INIT,
    LIMITS,
    LIMITS_AT,
    OUTSIDE,
    RANK_PID,
    SECTIONS,
    Page,
)
from nvrx_slurm.monitor.requests import Requests

WATCH_FDS = 3  # pidfd, page, listening socket

# Slurm, timeouts and terminals signal every process of a step; this one ends with its agent and not before.
_IGNORED = ("TERM", "INT", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU", "TSTP", "TTIN", "TTOU", "PIPE")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class _Loop:
    """Waits for file descriptors and calls their handlers, which must not block and must stand a spurious call."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def add(self, fd: int, handler: Callable[[], None]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def remove(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def wait(self, deadline_s: float | None) -> float:
        """Run what is ready, or return at `deadline_s` (monotonic; None = wait for ever).

        Returns when this wait was due to end: any later than that is time in which this process did not run.
        """
        timeout_ms = None if deadline_s is None else max(0.0, (deadline_s - monotonic()) * 1000)
        ready = self._poll.poll(timeout_ms)
        woken_s = monotonic()
        for fd, _ in ready:
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()
        return woken_s if deadline_s is None else min(woken_s, deadline_s)


class _Watched:
    """One life of one worker: what the agent said of it, and what its page said so far."""

    def __init__(self, message: dict[str, Any], pidfd: int, page_fd: int) -> None:
        self.cycle: int = message["cycle"]
        self.rank: int = message["rank"]
        self.local_rank: int = message["local_rank"]
        self.pid: int = message["pid"]
        self.signum: int = message["signal"]
        self.cfg: dict[str, Any] = message["cfg"]
        self._configured = self.limits = core.Limits(**message["limits"])
        self.pidfd = self._rank_pidfd = pidfd
        self._rank_pid = self.pid
        self.page_fd = page_fd
        self.page = Page(page_fd)
        self.forwarding = Forwarding()
        self.ladder: list[tuple[str, float]] | None = None  # not None: it is hung and being ended
        self.step_until_s = 0.0
        self._started_ns = int(message["started_s"] * 1e9)
        self._resumed_s = 0.0
        # Only here is the monitor's own word read back, after a restart; later the rank cannot change it under us.
        init_ns = self.page.words[INIT]
        self._init_ns = init_ns if self._started_ns <= init_ns <= monotonic_ns() else 0
        self._heartbeat_ns = 0  # the last plausible one
        self._limits_ns = 0  # since when the limits are other than the agent's
        self._recall_limits()

    def _recall_limits(self) -> None:
        """What the rank told a monitor of this life before us; what is not plausible was not told."""
        since_ns = self.page.words[LIMITS_AT]
        if not self._init_ns or not self._init_ns <= since_ns <= monotonic_ns():
            return
        values_ns = self._limit_words().tolist()
        try:
            self.limits = self._configured.with_values([value / 1e9 if value else None for value in values_ns])
            self._limits_ns = since_ns
        except ValueError:
            pass

    def _limit_words(self) -> memoryview:
        return self.page.words[LIMITS : LIMITS + len(self._configured.values())]

    def change_limits(self, told: dict[str, Any]) -> None:
        """The rank has learned limits; every limit begins anew. Raises ValueError and changes nothing for bad ones."""
        if not self._init_ns:
            raise ValueError("limits can be changed after init_workload_monitoring() only")
        limits = self._configured.changed(told)
        self.page.words[LIMITS_AT] = 0  # killed from here on, we have a successor that the rank tells again
        words = self._limit_words()
        for position, limit_s in enumerate(limits.values()):
            words[position] = round(limit_s * 1e9) if limit_s else 0
        self._limits_ns = self.page.words[LIMITS_AT] = monotonic_ns()
        self.limits = limits

    def initialize(self, pid: int) -> None:
        """Process `pid` called init_workload_monitoring(): what happened or was told before no longer counts."""
        self.page.words[LIMITS_AT] = self._limits_ns = 0
        self.limits = self._configured
        self._init_ns = self.page.words[INIT] = monotonic_ns()
        self.page.words[RANK_PID] = pid
        self._heartbeat_ns = 0

    def judge(self, due_s: float) -> core.Verdict:
        """The verdict now, which should have been asked for at `due_s` (monotonic)."""
        words = self.page.words
        heartbeat_ns, finished_ns, outside_ns = words[HEARTBEAT], words[FINISHED], words[OUTSIDE]
        opened_ns = words[SECTIONS : SECTIONS + len(self.limits.slots)].tolist()
        now_ns = monotonic_ns()  # after the words: a heartbeat of this very moment is not "in the future"
        if now_ns / 1e9 > due_s + core.LATE_S:
            self._resumed_s = now_ns / 1e9  # we were stopped, and so was the rank: `scontrol suspend`, a frozen machine
        init_ns = self._init_ns
        if max(init_ns, self._heartbeat_ns) <= heartbeat_ns <= now_ns:
            self._heartbeat_ns = heartbeat_ns
        view = core.View(
            self._started_ns / 1e9,
            init_ns / 1e9 if init_ns else None,
            self._heartbeat_ns / 1e9 if self._heartbeat_ns and init_ns else None,
            bool(init_ns) and init_ns <= finished_ns <= now_ns,
            max(self._resumed_s, self._limits_ns / 1e9),
            tuple(since_ns / 1e9 if 0 < init_ns <= since_ns <= now_ns else None for since_ns in opened_ns),
            outside_ns / 1e9 if 0 < init_ns <= outside_ns <= now_ns else None,
        )
        return core.judge(self.limits, view, now_ns / 1e9)

    def begin_end(self) -> None:
        """It is hung: choose the ladder that ends it."""
        pid = self.page.words[RANK_PID]
        pidfd = kill.open_member(pid, self.pid)
        if pidfd is not None:  # the worker is a wrapper, the stacks are in the process that called init
            self._rank_pid, self._rank_pidfd = pid, pidfd
        self.ladder = list(core.stop_ladder(self.signum, kill.prints_stacks(self._rank_pidfd, self._rank_pid)))

    def take_step(self, step: str) -> None:
        """One step of the ladder."""
        if step == core.STACKS:
            kill.ask_for_stacks(self._rank_pidfd, self._rank_pid)
        elif step == core.SIGNAL:
            kill.send(self.pidfd, signal.SIGCONT)
            kill.send(self.pidfd, self.signum)
        else:
            kill.kill_group(self.pidfd, self.pid)

    def close(self) -> None:
        self.page.close()
        os.close(self.page_fd)
        if self._rank_pidfd != self.pidfd:
            os.close(self._rank_pidfd)
        os.close(self.pidfd)


class Monitor:
    """The program. `run()` returns the exit status when the agent said `quit` or is gone."""

    def __init__(self, control: socket.socket, directory: str, prefix: str) -> None:
        self._control = control
        self._directory, self._prefix = directory, prefix
        self._loop = _Loop()
        self._running = True
        self._watched: _Watched | None = None
        self._requests: Requests | None = None

    def run(self) -> int:
        self._loop.add(self._control.fileno(), self._on_control)
        self._tell("ready", pid=os.getpid())
        due_s = monotonic()
        while self._running:
            slow_s = self._requests.expire() if self._requests else None
            hang_s = self._look(due_s)
            deadlines = [deadline_s for deadline_s in (slow_s, hang_s) if deadline_s is not None]
            due_s = self._loop.wait(min(deadlines, default=None))
        return 0

    # --- the rank ---------------------------------------------------------------------------------

    def _look(self, due_s: float) -> float | None:
        """Judge the rank and do what follows from it; returns when to look again."""
        watched = self._watched
        if watched is None or self._requests is None:
            return None
        if watched.ladder is None:
            verdict = watched.judge(due_s)
            if not verdict.hung:
                return verdict.deadline_s
            self._report_hang(watched, verdict)
            watched.begin_end()
        while watched.ladder and monotonic() >= watched.step_until_s:
            step, grace_s = watched.ladder.pop(0)
            watched.take_step(step)
            watched.step_until_s = monotonic() + grace_s
        return watched.step_until_s if watched.ladder else None

    def _report_hang(self, watched: _Watched, verdict: core.Verdict) -> None:
        self._tell(
            "hang",
            cycle=watched.cycle,
            rank=watched.rank,
            local_rank=watched.local_rank,
            pid=watched.pid,
            sentence=verdict.sentence,
            deadline_s=verdict.deadline_s,
            at_s=monotonic(),
        )

    def _on_worker_exit(self) -> None:
        watched = self._watched
        if watched is None or not kill.is_dead(watched.pidfd):
            return
        if watched.ladder is not None:
            kill.kill_group(watched.pidfd, watched.pid)  # a hung rank's helpers go with it
        self._stop_serving()

    def _answer(self, message: dict[str, object], pid: int) -> tuple[bytes, list[int]]:
        watched = self._watched
        if watched is not None and message["type"] == "limits":
            return self._change_limits(watched, message), []
        if watched is not None and message["type"] == "control":
            return self._pass_on(watched, message), []
        if message["type"] != "init" or watched is None:
            raise wire.WireError(f"this monitor does not know the request {str(message['type'])[:40]!r}")
        watched.initialize(pid)
        reply = wire.encode(
            "ok", cycle=watched.cycle, rank=watched.rank, local_rank=watched.local_rank, cfg=watched.cfg
        )
        return reply, [watched.page_fd]

    def _change_limits(self, watched: _Watched, message: dict[str, object]) -> bytes:
        told = {name: value for name, value in message.items() if name not in ("v", "type")}
        try:
            watched.change_limits(told)
        except ValueError as error:
            raise wire.WireError(str(error)) from None
        return wire.encode("ok")

    def _pass_on(self, watched: _Watched, message: dict[str, object]) -> bytes:
        """A workload control request is the agent's business; `ok`: it is on its way there, or would change nothing."""
        action, description = message.get("action"), message.get("description")
        if action not in wire.ACTIONS:
            raise wire.WireError(f"there is no workload action {str(action)[:40]!r}")
        if not isinstance(description, str) or len(description) > wire.MAX_DESCRIPTION_CHARS:
            raise wire.WireError(f"a description must be a string of up to {wire.MAX_DESCRIPTION_CHARS} characters")
        if watched.forwarding.wants(action, self._control):
            if self._tell("control", cycle=watched.cycle, pid=watched.pid, action=action, description=description):
                watched.forwarding.passed_on(action)
            elif action != "Continue":  # which is for the log only, and no reason to end a training
                raise wire.WireError("the launcher cannot be told: it is gone, or this node is out of memory")
        return wire.encode("ok")

    # --- the agent --------------------------------------------------------------------------------

    def _tell(self, kind: str, **fields: object) -> bool:
        """Say it to the agent; False if its channel does not take it."""
        try:
            self._control.send(wire.encode(kind, **fields), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False  # above all: the agent is gone, which is seen as the end of the control socket
        return True

    def _on_control(self) -> None:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            line, fds, _, _ = socket.recv_fds(self._control, wire.MAX_LINE_BYTES, WATCH_FDS, flags)
        except BlockingIOError:
            return
        except ConnectionError:
            line, fds = b"", []
        if not line:
            self._on_agent_gone()
            return
        message = wire.decode(line)
        if message["type"] == "watch":
            self._watch(message, *fds)
        elif message["type"] == "unwatch":
            self._forget()
        elif message["type"] == "quit":
            self._running = False
        else:
            raise wire.WireError(f"the agent sent an unknown {message['type']!r}")

    def _on_agent_gone(self) -> None:
        if self._watched is not None:
            kill.kill_group(self._watched.pidfd, self._watched.pid)
        _remove_sockets(self._directory, self._prefix)
        self._running = False

    def _watch(self, message: dict[str, object], pidfd: int, page_fd: int, listener_fd: int) -> None:
        self._forget()
        self._watched = _Watched(message, pidfd, page_fd)
        listener = socket.socket(fileno=listener_fd)
        self._requests = Requests(listener, self._answer, self._loop.add, self._loop.remove)
        self._loop.add(pidfd, self._on_worker_exit)

    def _forget(self) -> None:
        self._stop_serving()
        if self._watched is not None:
            self._watched.close()
            self._watched = None

    def _stop_serving(self) -> None:
        """The worker is dead or dropped: no more requests, no more verdicts. Its pidfd is kept for the group's sake."""
        if self._requests is not None and self._watched is not None:
            self._requests.close()
            self._requests = None
            self._loop.remove(self._watched.pidfd)


def _remove_sockets(directory: str, prefix: str) -> None:
    """What the dead agent cannot remove itself; the last of its monitors removes the directory."""
    try:
        for name in os.listdir(directory):
            if name.startswith(prefix) or name == "board":  # system.files.BOARD_NAME, not imported: too heavy
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError:
        pass  # not empty yet, or another monitor was faster


def main(argv: list[str]) -> int:
    """`argv`: [fd of the control socket, name for ps, directory of the sockets, prefix of this monitor's there]."""
    for name in _IGNORED:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
    with open("/proc/self/comm", "w") as comm:
        comm.write(argv[1][:15])
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    widen(control)
    # Whatever happens to the control socket, its end above all, continues a stopped monitor: no stopped orphan stays.
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    return Monitor(control, argv[2], argv[3]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
