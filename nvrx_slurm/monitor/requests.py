"""The rank's requests to its monitor: one packet in, one out, on a Unix socket for packets.

At most MAX_CONNECTIONS are open; a new one replaces the oldest, because a client sends its request at once. Only
processes of the same user and root get an answer.
"""

from __future__ import annotations

import os
import select
import socket
import struct

from nvrx_slurm.monitor import wire

MAX_CONNECTIONS = 32
_SENTENCE_CHARS = 500  # of a refusal, which may quote the peer: it must fit into one message

_PEERCRED = struct.Struct("=iII")  # pid, uid, gid: struct ucred

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing itself is too heavy for this process
    from collections.abc import Callable

    Answer = Callable[[dict[str, object], int], tuple[bytes, list[int]]]


class Requests:
    """Serves a listening socket. `answer(message, pid)` returns the reply line and the fds to send with it.

    It may raise WireError; `pid` is the sender's, 0 if it is of another pid namespace. The caller waits with `poll` and
    calls serve(fd). Nothing here blocks.
    """

    def __init__(self, listener: socket.socket, answer: Answer, poll: select.poll) -> None:
        self._listener, self._answer, self._poll = listener, answer, poll
        self._connections: dict[int, socket.socket] = {}  # by fd, oldest first
        listener.setblocking(False)
        poll.register(listener, select.POLLIN)

    def serve(self, fd: int) -> None:
        """`fd` may be ready, and may be another's by now."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._connections:
            self._read(fd)

    def close(self) -> None:
        """Close all connections and this process's copy of the listener; the agent keeps its own."""
        self._poll.unregister(self._listener)
        self._listener.close()
        for fd in list(self._connections):
            self._drop(fd)

    def _accept(self) -> None:
        for _ in range(MAX_CONNECTIONS):  # not until empty: the rank's deadline is checked in between
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                self._drop(next(iter(self._connections)))
            sock.setblocking(False)
            fd = sock.fileno()
            self._connections[fd] = sock
            self._poll.register(sock, select.POLLIN)

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        self._connections.pop(fd).close()

    def _read(self, fd: int) -> None:
        sock = self._connections[fd]
        try:
            request = sock.recv(wire.MAX_LINE_BYTES + 1)
        except BlockingIOError:
            return
        except OSError:
            request = b""
        if request:
            self._reply(sock, request)
        self._drop(fd)

    def _reply(self, sock: socket.socket, request: bytes) -> None:
        pid, uid, _ = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))
        if uid not in (0, os.geteuid()):
            return
        try:
            reply, fds = self._answer(wire.decode(request), pid)
        except wire.WireError as error:
            reply, fds = wire.encode("error", error=str(error)[:_SENTENCE_CHARS]), []
        try:
            socket.send_fds(sock, [reply], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the peer does not read its answer
