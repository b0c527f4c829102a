"""Connections whose other end may vanish."""

from __future__ import annotations

import socket

_IDLE_S, _EVERY_S, _PROBES, _UNACKED_MS = 15, 5, 3, 20_000


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection whose other end is gone, within 30 s. Raises OSError on other sockets."""
    tcp = socket.IPPROTO_TCP
    connection.setsockopt(tcp, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(tcp, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(tcp, socket.TCP_KEEPINTVL, _EVERY_S)
    connection.setsockopt(tcp, socket.TCP_KEEPCNT, _PROBES)
    connection.setsockopt(tcp, socket.TCP_USER_TIMEOUT, _UNACKED_MS)
