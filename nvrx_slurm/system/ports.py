"""TCP ports: one that is reserved for MASTER_PORT until the worker listens on it; whether one refuses connections."""

from __future__ import annotations

import errno
import socket


class PortReservation:
    """A TCP port bound, but not listened on, by this process.

    While it is held, the kernel gives the port to no socket that asks for any free port. torch's TCPStore sets
    SO_REUSEADDR as this socket does, so it can bind the port and listen on it: only a *listening* socket excludes
    others (socket(7)). Another process on this host that sets SO_REUSEADDR and asks for this very port gets it, too.
    """

    def __init__(self) -> None:
        try:
            self._socket = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            self._bind("::")
        except OSError:  # no IPv6 here
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._bind("0.0.0.0")
        self.port: int = self._socket.getsockname()[1]

    def _bind(self, address: str) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, 0))

    def release(self) -> None:
        """Give the port back."""
        self._socket.close()


def is_refused(host: str, port: int, timeout_s: float) -> bool | None:
    """True: the host answers that nothing listens at `port`; only then that is certain. False: something does. None: no
    answer, or no route.

    Blocks up to `timeout_s` (> 0) per address of `host`, and for the resolver.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    answers = [_connect(family, address, timeout_s) for family, _, _, _, address in addresses]
    if False in answers:
        return False
    return True if answers and all(answers) else None


def _connect(family: int, address: tuple[object, ...], timeout_s: float) -> bool | None:
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(timeout_s)
        code = one.connect_ex(address)
    return {0: False, errno.ECONNREFUSED: True}.get(code)
