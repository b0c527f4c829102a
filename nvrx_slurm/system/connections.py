"""Cutting TCP connections of this process, so that whatever waits for the peer gets an error instead.

`ProcessGroupGloo.abort()` does nothing for a collective that waits for a peer (torch 2.5 to 2.13, pytorch#130345), and
a wait for a key of a TCPStore cannot be interrupted. A connection that ends does end both. It is ended by
`shutdown(2)`, not `close(2)`: the file descriptors stay their owner's.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

_SELF = Path("/proc/self")
_EPOLL_ENTRY = re.compile(r"tfd:\s*(\d+) events:\s*(\w+) data:\s*(\w+)")  # proc(5)
_INPUT = "19"  # EPOLLIN, and EPOLLERR and EPOLLHUP, which the kernel adds
_MAX_FD = 1 << 26  # below any pointer


class Socket(NamedTuple):
    """An open socket: a number that may be reused for another, and the inode that tells them apart."""

    fd: int
    inode: int


def open_sockets() -> set[Socket]:
    """All sockets of this process (empty where there is no /proc)."""
    targets = {fd: _target(fd) for fd in _descriptors()}
    return {
        Socket(fd, int(target[8:-1]))
        for fd, target in targets.items()
        if target.startswith("socket:[")
    }


def gloo_sockets() -> set[Socket]:
    """Connections and listeners of all gloo process groups: what gloo's event loops wait on."""
    watched = {fd for epoll in _descriptors() for fd in _watched_by_gloo(epoll)}
    return {found for found in open_sockets() if found.fd in watched}


def to_port(port: int) -> set[Socket]:
    """TCP connections of this process whose other end has this port."""
    return {found for found in open_sockets() if _peer_port(found) == port}


def cut(sockets: Iterable[Socket]) -> int:
    """Shut these down, both ways, as if the peer had closed them; returns how many were still open connections."""
    return sum(map(_cut, sockets))


def await_end(sockets: Iterable[Socket], timeout_s: float) -> bool:
    """Wait until the peers have closed all of these; False if one has not after `timeout_s` seconds."""
    deadline_s = time.monotonic() + timeout_s
    for one in sockets:
        with _duplicate(one) as connection:
            if connection is None:
                continue
            ended = select.poll()
            ended.register(connection, select.POLLRDHUP)
            if not ended.poll(1000.0 * max(0.0, deadline_s - time.monotonic())):
                return False
    return True


def _cut(one: Socket) -> bool:
    with _duplicate(one) as connection:
        # A listener must stay one: gloo ends the process when it cannot accept any more.
        if connection is None or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # has ended by itself
            return False
    return True


def _peer_port(one: Socket) -> int | None:
    with _duplicate(one) as connection:
        if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            return int(connection.getpeername()[1])
        except OSError:
            return None


@contextlib.contextmanager
def _duplicate(one: Socket) -> Iterator[socket.socket | None]:
    """A second handle on that very socket; None if its number belongs to something else by now."""
    try:
        fd = os.dup(one.fd)
    except OSError:
        yield None
        return
    if os.fstat(fd).st_ino != one.inode:
        os.close(fd)
        yield None
        return
    with socket.socket(fileno=fd) as connection:
        yield connection


def _watched_by_gloo(epoll: int) -> set[int]:
    """File descriptors in this epoll set if it is that of a gloo loop, else none.

    gloo (transport/tcp/loop.cc) registers pointers, for input without EPOLLET, and a pipe to be woken by. libuv,
    asyncio and libevent register the number itself, gRPC, asio and mio EPOLLET, ZeroMQ an eventfd.
    """
    if _target(epoll) != "anon_inode:[eventpoll]":
        return set()
    try:
        lines = (_SELF / "fdinfo" / str(epoll)).read_text().splitlines()
    except OSError:
        return set()
    entries = [_EPOLL_ENTRY.match(line) for line in lines if line.startswith("tfd:")]
    fds = [
        int(entry[1])
        for entry in entries
        if entry and entry[2] == _INPUT and int(entry[3], 16) > _MAX_FD
    ]
    return (
        set(fds)
        if len(fds) == len(entries) and any(_target(fd).startswith("pipe:[") for fd in fds)
        else set()
    )


def _target(fd: int) -> str:
    """The object behind a descriptor, as "socket:[1234]"; "" if it was closed meanwhile or is not ours to look at."""
    try:
        return os.readlink(_SELF / "fd" / str(fd))
    except OSError:
        return ""


def _descriptors() -> list[int]:
    with contextlib.suppress(OSError):
        return list(map(int, os.listdir(_SELF / "fd")))
    return []
