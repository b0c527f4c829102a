"""The rank monitor: one small process per rank. It ends the rank when it hangs, or when the agent is gone.

The monitors of a node are forked from one interpreter, so that they share its memory; a replacement is started alone.
Each has one end of a SOCK_SEQPACKET pair. The agent's `watch` message brings file descriptors: the worker's pidfd, the
shared page, and the rank's socket. A killed monitor therefore loses nothing: its successor gets the same message.

The monitor sleeps in poll(2) until the rank's next deadline. It ends on `quit`, or at the end of the control socket:
then the agent is dead, and the monitor first kills the worker and its descendants.
"""

from __future__ import annotations

import fcntl
import gc
import os
import select
import signal
import socket
import sys
from time import monotonic, sleep

from nvrx_slurm.monitor import kill, requests, wire
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.monitor.watched import Descriptors, Watched

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Requests must never fill the channel to an agent that does not read, or the message `hang` would be lost. It takes
# 200 KB by default, and per worker at most this many Continues, and as many
# notes of loads, and one each of the two others and `hang` (50 KB each).
MAX_CONTINUES = 20
MAX_CONTINUE_CHARS = 600
CHANNEL_BYTES = 1 << 18

# Slurm, timeouts and terminals signal every process of a step; this one ends with its agent, not before.
_IGNORED = (
    "TERM",
    "INT",
    "HUP",
    "QUIT",
    "USR1",
    "USR2",
    "ALRM",
    "XCPU",
    "TSTP",
    "TTIN",
    "TTOU",
    "PIPE",
)
_CONTINUE, *_ = wire.ACTIONS
_NOTED = (_CONTINUE, wire.LOADED)
_AGAIN_S = 0.1  # a process that forks while its rank is killed needs another kill
_SOON_S = 0.005  # the same where the agent is dead: other nodes start its ranks at once
_END_S = 10.0  # for killed processes to end; one that is blocked in the kernel is left to die


class MonitorProgram:
    """The program. `run()` returns the exit status after `quit` or the agent's death."""

    def __init__(
        self, control: socket.socket, directory: str, prefix: str, lease: Lease | None = None
    ) -> None:
        self._control = control
        self._lease = lease
        self._directory = directory
        self._prefix = prefix
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._running = True
        self._watched: Watched | None = None
        self._listener: socket.socket | None = None  # for requests of the rank, while it is served

    def run(self) -> int:
        due_s = monotonic()
        while self._running:
            times_s = self._mind_lease(), self._judge(due_s), self._go_on_inspecting()
            due_s = self._wait(min((one for one in times_s if one is not None), default=None))
        return 0

    def _wait(self, deadline_s: float | None) -> float:
        """Handle what arrives, or return at `deadline_s` (monotonic; None = wait without a limit).

        Returns the time at which this wait was due to end. Any later time means that this process was stopped.
        """
        ready = self._poll.poll(
            None if deadline_s is None else max(0.0, (deadline_s - monotonic()) * 1000)
        )
        woken_s = monotonic()
        for fd, _ in ready:  # one handler may make the next event spurious; none of them blocks
            if fd == self._control.fileno():
                self._on_control()
            elif self._watched is not None and fd == self._watched.fds.pidfd:
                if kill.is_dead(fd):
                    self._stop_serving()
            elif self._listener is not None:
                requests.serve(self._listener, self._answer)
        return woken_s if deadline_s is None else min(woken_s, deadline_s)

    # --- the rank ---------------------------------------------------------------------------------

    def _mind_lease(self) -> float | None:
        """Kill the rank once the lease of this node is over; returns when to ask again, as `_judge`."""
        watched = self._watched
        lease = self._lease
        if watched is None or lease is None:
            return None
        if not (watched.doomed or lease.over):
            return lease.until_s
        return monotonic() + _AGAIN_S if watched.kill() else None

    def _judge(self, due_s: float) -> float | None:
        """Judge the rank and act on it; returns when to judge again (monotonic s; None = no limit runs)."""
        watched = self._watched
        if watched is None or self._listener is None:
            return None
        if watched.ladder is None:
            judgement = watched.judge(due_s)
            if judgement.late and not watched.late_said:
                watched.late_said = True
                self._tell(watched, _CONTINUE, judgement.late)
            if not judgement.hung:
                return judgement.deadline_s
            facts = {
                "sentence": judgement.sentence,
                "deadline_s": judgement.deadline_s,
                "at_s": monotonic(),
            }
            _send(self._control, "hang", **watched.ids, **facts)
            watched.begin_end()
        return watched.climb()

    def _go_on_inspecting(self) -> float | None:
        """Tell the agent what the rank does as soon as that is known; returns the time of the next step."""
        watched = self._watched
        if watched is None or watched.inspection is None:
            return None
        seen = watched.inspection.result()
        if seen is None:
            return watched.inspection.due_s
        watched.inspection = None
        answer = {**watched.ids, **seen, **watched.signs()}
        try:
            _send(self._control, "inspected", **answer)
        except wire.WireError:  # JSON writes some characters as six
            _send(self._control, "inspected", **{**answer, "stack": "", "record": ""})
        return None

    def _answer(self, message: dict[str, object], pid: int) -> tuple[bytes, list[int]]:
        watched = self._watched
        kind = message["type"]
        if watched is None or kind not in ("init", "page", "limits", "control"):
            raise wire.WireError(f"this monitor does not know the request {str(kind)[:40]!r}")
        if kind == "control":
            return self._pass_on(watched, message), []
        if kind == "limits":
            told = {name: value for name, value in message.items() if name not in ("v", "type")}
            try:
                watched.change_limits(told)
            except ValueError as error:
                raise wire.WireError(str(error)) from None
            return wire.encode("ok"), []
        if kind == "init":
            watched.initialize(pid)
        return wire.encode("ok", **watched.ids, cfg=watched.cfg), [
            watched.fds.page,
            watched.fds.inspected,
        ]

    def _pass_on(self, watched: Watched, message: dict[str, object]) -> bytes:
        """Send a workload control request to the agent, unless it would change nothing there; returns `ok`."""
        action, description = message.get("action"), message.get("description")
        if action not in (*wire.ACTIONS, wire.LOADED):
            raise wire.WireError(f"there is no workload action {str(action)[:40]!r}")
        if not isinstance(description, str) or len(description) > wire.MAX_DESCRIPTION_CHARS:
            raise wire.WireError(
                f"a description must be a string of up to {wire.MAX_DESCRIPTION_CHARS} characters"
            )
        most, most_chars = (1, len(description))
        if action in _NOTED:
            most, most_chars = (MAX_CONTINUES, MAX_CONTINUE_CHARS)
        if watched.passed_on.count(action) < most:
            if self._tell(watched, action, description[:most_chars]):
                watched.passed_on.append(action)
            elif action not in _NOTED:  # that is for the log only: never an error
                raise wire.WireError(
                    "the launcher cannot be told: it is gone, or reads nothing; ask again later"
                )
        return wire.encode("ok")

    def _tell(self, watched: Watched, action: str, description: str) -> bool:
        return _send(
            self._control, "control", **watched.ids, action=action, description=description
        )

    # --- the agent --------------------------------------------------------------------------------

    def _on_control(self) -> None:
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        try:
            line, fds, _, _ = socket.recv_fds(
                self._control, wire.MAX_LINE_BYTES, len(Descriptors._fields), flags
            )
        except BlockingIOError:
            return
        except ConnectionError:
            line = b""
            fds = []
        if not line:
            self._on_agent_gone()
            return
        message: dict[str, Any] = wire.decode(line)
        kind = message["type"]
        watched = self._watched
        if kind == "watch":
            self._watch(message, Descriptors(*fds))
        elif kind == "unwatch":
            self._forget()
        elif kind == "quit":
            self._running = False
        elif kind not in ("inspect", "end", "exit"):
            raise wire.WireError(f"the agent sent an unknown {kind!r}")
        elif watched is None:
            return  # the worker has just ended
        elif kind == "inspect":
            watched.inspect(message["within_s"])
        elif kind == "end":
            watched.release()
        else:
            watched.expect_exit()

    def _on_agent_gone(self) -> None:
        """Kill what is left of the rank, and end.

        The threads of a killed agent end one after the other. With the first one the kernel kills the worker, with the
        last one this process gets another parent, and the worker's children may get theirs before or after that.
        """
        agent = int.from_bytes(
            self._control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder
        )
        until_s = monotonic() + _END_S
        while self._watched is not None and monotonic() < until_s:
            # before: a process that gets its parent meanwhile may be missed
            was_adopted = os.getppid() != agent
            if not self._watched.kill(agent) and was_adopted:
                break
            sleep(_SOON_S)
        _remove_sockets(self._directory, self._prefix)
        self._running = False

    def _watch(self, message: dict[str, object], fds: Descriptors) -> None:
        self._forget()
        self._listener = listener = socket.socket(fileno=fds.listener)
        mark = f"{wire.SOCKET_ENV}={listener.getsockname()}".encode()
        self._watched = Watched(message, mark, fds)
        for fd in (listener.fileno(), fds.pidfd):
            self._poll.register(fd, select.POLLIN)

    def _forget(self) -> None:
        self._stop_serving()
        if self._watched is not None:
            self._watched.close()
            self._watched = None

    def _stop_serving(self) -> None:
        """No more requests and judgements: the worker is dead or dropped. Its pidfd stays open for its group."""
        if self._listener is not None and self._watched is not None:
            for fd in (self._listener.fileno(), self._watched.fds.pidfd):
                self._poll.unregister(fd)
            self._listener.close()
            self._listener = None


def _remove_sockets(directory: str, prefix: str) -> None:
    """Clean up for the dead agent; the last of its monitors removes the directory."""
    try:
        for name in os.listdir(directory):
            # system.files.BOARD_NAME, not imported: too heavy
            if name.startswith(prefix) or name == "board":
                os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
    except OSError:
        pass  # not empty yet, or another monitor was faster


def _fork(which: dict[int, socket.socket]) -> bool:
    """Fork a process for each monitor. In that, return True and leave only its own in `which`."""
    gc.freeze()  # garbage collection in the children would copy the pages of this process
    reader, writer = os.pipe()
    for local_rank, control in list(which.items()):
        try:
            forked = os.fork()
        except OSError:
            continue  # the agent finds its socket closed, and tries again
        if forked == 0:
            os.setsid()
            _send(control, "forked", pid=os.getpid())
            which.clear()  # closes the sockets of the others
            which[local_rank] = control
            os.close(reader)
            os.close(writer)
            return True
    os.close(writer)
    # the end, once all have left this process group: the agent kills what is left of it
    os.read(reader, 1)
    return False


def _send(control: socket.socket, kind: str, **fields: object) -> bool:
    """Tell the agent; False if its channel is full or closed."""
    try:
        control.send(wire.encode(kind, **fields), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True


def main(argv: list[str]) -> int:
    """`argv`: directory of the sockets, fd of the lease (-1: none), and per monitor: local rank, fd of its control
    socket. One monitor is this process. Several are forked, and the pid of each is told on its control socket."""
    for name in _IGNORED:
        signal.signal(getattr(signal, "SIG" + name), signal.SIG_IGN)
    lease = None if argv[1] == "-1" else Lease(int(argv[1]))
    which = {
        int(rank): socket.socket(fileno=int(fd))
        for rank, fd in zip(argv[2::2], argv[3::2], strict=True)
    }
    if len(which) > 1 and not _fork(which):
        return 0
    ((local_rank, control),) = which.items()
    with open("/proc/self/comm", "w") as comm:
        comm.write(f"nvrx-monitor-{local_rank}"[:15])
    control.set_inheritable(False)
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, CHANNEL_BYTES)
    # Events on the control socket send SIGCONT, its end above all: a stopped monitor continues when its agent dies.
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(control, fcntl.F_SETFL, fcntl.fcntl(control, fcntl.F_GETFL) | os.O_ASYNC)
    return MonitorProgram(control, argv[0], wire.socket_prefix(local_rank), lease).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
