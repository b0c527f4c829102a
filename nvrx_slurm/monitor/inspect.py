"""Inspects a rank at the moment of a hang: the state of its process, its stacks, and torch's flight recorder.

The rank's process answers on a socket that it got with init_workload_monitoring(): a thread of it sends one line with
the flight recorder's facts, then faulthandler prints the stacks. Without a client it has no such thread, and prints the
stacks to a file, see `warm.steps`. A rank that does not answer is known by its state.
"""

from __future__ import annotations

import os
import socket
from time import monotonic

from nvrx_slurm.child import descendants, traffic
from nvrx_slurm.monitor import kill

RECORD = b"FR "  # begins the line of the flight recorder
ASK = b"?"
# the signal may end a system call of foreign code, so the flight recorder comes first
_STACKS_AFTER_S = 0.1
_LEAST_S = 0.25  # between the two readings of the processor time
_AGAIN_S = 0.05
_MARGIN_S = 0.3  # for the way of the answer
_CANNOT_RUN = ("T", "t", "D", "Z")  # a signal handler: stopped, traced, blocked in the kernel, dead
_MOVES_TICKS = 5  # ticks of 10 ms: a process that used more CPU in between moves
_MOST_BYTES = 1 << 18
_STACK_CHARS = 24_000  # the main thread comes last


class RankInspection:
    """One inspection. `channel`: the monitor's end of the socket; `stacks`: descriptor of the file.

    Call result() at `due_s` (monotonic seconds).
    """

    def __init__(
        self, pid: int, pidfd: int, channel: socket.socket, stacks: int, within_s: float
    ) -> None:
        self._pid = pid
        self._pidfd = pidfd
        self._channel = channel
        self._stacks = stacks
        self._began_s = monotonic()
        self._until_s = self._began_s + max(0.0, within_s - _MARGIN_S)
        self._signalled: bool | None = None
        self.due_s = self._began_s + _STACKS_AFTER_S
        _, self._ticks = _stat(pid)
        self._work = _work(pid)
        self._text = b""
        self._read()  # what an earlier inspection has left
        self._text = b""
        self._printed = 0
        os.ftruncate(stacks, 0)
        try:
            channel.send(ASK, socket.MSG_DONTWAIT)
        except OSError:
            pass

    def result(self) -> dict[str, object] | None:
        """What was seen, as JSON can hold it; None: not yet."""
        now_s = monotonic()
        if now_s < self.due_s:
            return None
        if self._signalled is None:
            can_run = _stat(self._pid)[0] not in _CANNOT_RUN
            self._signalled = can_run and kill.handles(self._pidfd, self._pid, kill.INSPECT_SIGNAL)
            if self._signalled:
                kill.send(self._pidfd, kill.INSPECT_SIGNAL)
            self.due_s = self._began_s + _LEAST_S
            return None
        known = len(self._text)
        self._read()
        printed = os.pread(self._stacks, _MOST_BYTES, self._printed)
        self._printed += len(printed)
        self._text += printed
        lines = self._text.decode("utf-8", "replace").splitlines(keepends=True)
        record = [line for line in lines if line.startswith(RECORD.decode())]
        stack = "".join(line for line in lines if not line.startswith(RECORD.decode()))
        # more may come
        if self._signalled and (not stack or len(self._text) > known) and now_s < self._until_s:
            self.due_s = now_s + _AGAIN_S
            return None
        state, ticks = _stat(self._pid)
        return {
            "state": state,
            # on a loaded node it may wait for a core
            "moves": state == "R" or ticks - self._ticks >= _MOVES_TICKS,
            "stack": stack[-_STACK_CHARS:],
            "work": [*self._work, *_work(self._pid)],
            "record": record[-1].removeprefix(RECORD.decode()) if record else "",
        }

    def _read(self) -> None:
        try:
            while len(self._text) < _MOST_BYTES and (
                data := self._channel.recv(1 << 16, socket.MSG_DONTWAIT)
            ):
                self._text += data
        except OSError:
            pass


def _work(root: int) -> tuple[int, int, int]:
    """Processor time in ticks, bytes that were read and written, and bytes over TCP, by a process and all below it."""
    pids, ticks, moved = [root], 0, 0
    for pid in pids:  # it grows
        pids += descendants.children(pid)
        ticks += _stat(pid)[1]
        moved += sum(int(line.split()[1]) for line in descendants.read(pid, "io").splitlines()[:2])
    return ticks, moved, traffic.moved(pids)


def _stat(pid: int) -> tuple[str, int]:
    """State of the process, and its processor time in ticks with that of its children that ended; "Z" if it is gone."""
    fields = descendants.read(pid, "stat").rpartition(b")")[2].split()
    return (fields[0].decode(), sum(map(int, fields[11:15]))) if fields else ("Z", 0)
