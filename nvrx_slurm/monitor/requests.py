"""The rank's door to its monitor: one JSON line in, one out, on a Unix socket; strangers and slow peers cost nothing.

At most MAX_CONNECTIONS are open; the oldest gives way to the newest, because an honest client sends its line at once.
Each has REQUEST_S to send it. Only the same user and root are answered.
"""

from __future__ import annotations

import os
import socket
import struct
from time import monotonic

from nvrx_slurm.monitor import wire

MAX_CONNECTIONS = 32
REQUEST_S = 2.0
_SENTENCE_CHARS = 500  # of a refusal, which may quote the peer: it must fit into one message, whatever was asked

_PEERCRED = struct.Struct("=iII")  # pid, uid, gid: struct ucred

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is too heavy for this process
    from collections.abc import Callable

    Answer = Callable[[dict[str, object], int], tuple[bytes, list[int]]]
    AddReader = Callable[[int, Callable[[], None]], None]


class _Connection:
    __slots__ = ("deadline_s", "received", "sock")

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.received = b""
        self.deadline_s = monotonic() + REQUEST_S


class Requests:
    """Serves a listening socket. `answer(message, pid)` gives the reply line and the fds to send with it, or raises
    WireError; `pid` is the sender's, 0 if it is of another pid namespace.

    `add_reader(fd, callback)` and `remove_reader(fd)` belong to the caller's event loop; nothing here ever blocks.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Answer,
        add_reader: AddReader,
        remove_reader: Callable[[int], None],
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._add_reader = add_reader
        self._remove_reader = remove_reader
        self._connections: dict[int, _Connection] = {}  # by fd, oldest first
        listener.setblocking(False)
        add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Close the door: the listener of this process (the agent keeps its own) and all connections."""
        self._remove_reader(self._listener.fileno())
        self._listener.close()
        for fd in list(self._connections):
            self._drop(fd)

    def expire(self) -> float | None:
        """Drop those that were too slow; returns when the next one will be (monotonic s; None = there is none)."""
        now_s = monotonic()
        for fd, connection in list(self._connections.items()):
            if now_s < connection.deadline_s:
                return connection.deadline_s  # oldest first: the others have longer
            self._drop(fd)
        return None

    def _accept(self) -> None:
        for _ in range(MAX_CONNECTIONS):  # not until empty: the rank's deadline is looked at in between
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._drop(next(iter(self._connections)))
            sock.setblocking(False)
            fd = sock.fileno()
            self._connections[fd] = _Connection(sock)
            self._add_reader(fd, lambda fd=fd: self._read(fd))  # type: ignore[misc]
            self._read(fd)

    def _drop(self, fd: int) -> None:
        connection = self._connections.pop(fd, None)
        if connection is not None:
            self._remove_reader(fd)
            connection.sock.close()

    def _read(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is None:
            return
        try:
            data = connection.sock.recv(wire.MAX_LINE_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        connection.received += data
        line, newline, _ = connection.received.partition(b"\n")
        if newline or len(line) > wire.MAX_LINE_BYTES:
            self._reply(connection.sock, line)
        elif data:
            return  # the rest of the line is on its way
        self._drop(fd)

    def _reply(self, sock: socket.socket, line: bytes) -> None:
        pid, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid not in (0, os.geteuid()):
            return
        try:
            reply, fds = self._answer(wire.decode(line), pid)
        except wire.WireError as error:
            reply, fds = wire.encode("error", error=str(error)[:_SENTENCE_CHARS]), []
        try:
            socket.send_fds(sock, [reply], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # it does not read its answer: its own problem
