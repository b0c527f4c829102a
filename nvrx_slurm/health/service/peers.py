"""Who talks to the daemon of docs/nvhcd.md: the service gets no byte of a peer before its credentials were looked at.

gRPC for Python neither tells a peer's uid nor takes over a connection that somebody else has accepted (C++ can:
passive listeners, channels from file descriptors). So the socket at `socket_path` is ours: `Door` accepts, looks, and
passes the bytes on to gRPC's own socket, which has no name any more. The service learns from the name that our end of
that connection is bound to whose call it is (`uid_of`).
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import secrets
import socket
import struct
import time
from collections import Counter
from contextlib import suppress
from typing import NamedTuple

MAX_CONNECTIONS = 256  # of all who are not privileged; three file descriptors each, one of them gRPC's
MAX_CONNECTIONS_PER_USER = 32
BACKLOG = 128
_CHUNK_BYTES = 65536
_LINGER_S = 5.0  # for the other way of a connection after one has ended
_CLOSING_S = 0.5  # for last answers on their way
_PAUSE_S = 0.1  # before the next try when no connection can be taken (no file descriptors)
_QUIET_S = 10.0  # between lines of the log about refusals
_SO_PEERGROUPS = 59  # Linux 4.13, asm-generic; Python has no name for it
_MAX_GROUPS = 65536  # NGROUPS_MAX

log = logging.getLogger(__name__)


class Peer(NamedTuple):
    """A process as it was when it called connect(2)."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Raises OSError."""
        shape = struct.Struct("iII")
        return cls(*shape.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, shape.size)))


class Allowed(NamedTuple):
    """Who may ask. `uids`: None = everybody; `gid`: of a group whose members may, too."""

    uids: frozenset[int] | None = None
    gid: int | None = None

    def admits(self, connection: socket.socket, peer: Peer) -> bool:
        """Raises OSError."""
        if self.uids is None or peer.uid in self.uids or _privileged(peer.uid):
            return True
        return self.gid is not None and (self.gid == peer.gid or self.gid in _groups(connection))


def uid_of(name: str) -> int:
    """Whose call it is, of what gRPC says of the peer: the name that `Door` gave to the connection."""
    return int(name.rpartition("-")[2])


def _privileged(uid: int) -> bool:
    """Root and ourselves: they could stop us as well."""
    return uid in (0, os.geteuid())


def _groups(connection: socket.socket) -> list[int]:
    """Supplementary groups of the peer at connect(2). Raises OSError.

    By ctypes, since Python's getsockopt takes 1024 bytes at most: somebody with more than 256 groups is no stranger.
    """
    found = (ctypes.c_uint32 * _MAX_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(found))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, found, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return list(found[: size.value // 4])


class Door:
    """The listening socket, and all connections that came in by it.

    `listener`: listens, not blocking; `inner`: gRPC's socket, opened with O_PATH. Both are closed by `close`.
    """

    def __init__(self, listener: socket.socket, inner: int, allowed: Allowed) -> None:
        self._listener = listener
        self._inner = f"/proc/self/fd/{inner}"
        self._inner_fd = inner
        self._allowed = allowed
        self._open: dict[asyncio.Task[None], int] = {}  # whose
        self._count = Counter[int]()  # by uid
        self._quiet_until_s = 0.0
        self._unsaid = 0
        self.refused = 0

    async def serve(self) -> None:
        """Take connections until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._say(f"no connection can be taken: {error.strerror}")
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                self._take(connection)
            except OSError as error:
                self._refuse(connection, f"its credentials cannot be read: {error.strerror}")
            await asyncio.sleep(0)  # whoever connects without end shall not have the loop for himself

    async def close(self) -> None:
        """End all connections, those that still get an answer a moment later."""
        self._listener.close()
        os.close(self._inner_fd)
        if self._open:
            await asyncio.wait(self._open, timeout=_CLOSING_S)
        for passing in self._open:
            passing.cancel()
        if self._open:
            await asyncio.wait(self._open)

    def _take(self, connection: socket.socket) -> None:
        """Raises OSError; the connection is still open then."""
        peer = Peer.of(connection)
        whose = f"uid {peer.uid} (pid {peer.pid})"
        if not self._allowed.admits(connection, peer):
            return self._refuse(connection, f"{whose} may not ask: neither in `users` nor in `group`")
        if self._count[peer.uid] >= MAX_CONNECTIONS_PER_USER:
            return self._refuse(connection, f"{whose} has {MAX_CONNECTIONS_PER_USER} connections already")
        strangers = sum(count for uid, count in self._count.items() if not _privileged(uid))
        if strangers >= MAX_CONNECTIONS and not _privileged(peer.uid):
            return self._refuse(connection, f"{whose} is one too many: {MAX_CONNECTIONS} connections are open")
        self._count[peer.uid] += 1
        passing = asyncio.ensure_future(self._pass(connection, peer.uid))
        self._open[passing] = peer.uid
        passing.add_done_callback(self._gone)

    def _gone(self, passing: asyncio.Task[None]) -> None:
        uid = self._open.pop(passing)
        self._count[uid] -= 1
        if not self._count[uid]:
            del self._count[uid]

    def _refuse(self, connection: socket.socket, why: str) -> None:
        connection.close()
        self.refused += 1
        self._say(f"refused a connection: {why}")

    def _say(self, text: str) -> None:
        """One line in a while: nobody shall fill the log."""
        now_s = time.monotonic()
        if now_s < self._quiet_until_s:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more of the kind since the last such line)" if self._unsaid else ""
        log.warning("%s%s", text, more)
        self._quiet_until_s, self._unsaid = now_s + _QUIET_S, 0

    async def _pass(self, outer: socket.socket, uid: int) -> None:
        """One connection, to gRPC's socket and back."""
        with outer:
            try:
                with socket.socket(socket.AF_UNIX) as inner:
                    inner.setblocking(False)
                    inner.bind(f"\0nvhcd-{secrets.token_hex(8)}-{uid}")  # nobody can guess it and be there first
                    await asyncio.get_running_loop().sock_connect(inner, self._inner)
                    await _both_ways(outer, inner)
            except OSError as error:
                self._say(f"a connection of uid {uid} cannot be passed on: {error.strerror}")


async def _both_ways(one: socket.socket, other: socket.socket) -> None:
    """Pass bytes on until both have ended, or a moment after one has."""
    ways = [asyncio.ensure_future(_copy(*way)) for way in ((one, other), (other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(ways, timeout=_LINGER_S)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.wait(ways)  # before the sockets are closed


async def _copy(source: socket.socket, sink: socket.socket) -> None:
    """All bytes, and then the end. A peer that does not read is not read from."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):  # one of the two is gone
        try:
            while data := await loop.sock_recv(source, _CHUNK_BYTES):
                await loop.sock_sendall(sink, data)
                await asyncio.sleep(0)  # others' turn, however fast these two are
        finally:
            sink.shutdown(socket.SHUT_WR)  # also after a reset: whoever closes with something unread sends one
