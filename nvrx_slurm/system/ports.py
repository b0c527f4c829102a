"""TCP ports: one that is reserved for MASTER_PORT until the worker listens on it; whether one refuses connections."""

from __future__ import annotations

import contextlib
import errno
import secrets
import socket


class PortReservation:
    """A TCP port bound, but not listened on, by this process.

    While it is held, the kernel gives the port to no socket that asks for any free port. torch's TCPStore sets
    SO_REUSEADDR as this socket does, so it can bind the port and listen on it: only a *listening* socket excludes
    others (socket(7)). Another process on this host that sets SO_REUSEADDR and asks for this very port gets it, too.
    Where no socket can be made, the port is a guess: one that the kernel gives to nobody who asks for any.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.port = 61_000 + secrets.randbelow(4_000)  # above the usual ip_local_port_range
        for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
            with contextlib.suppress(OSError):  # no IPv6 here, or no descriptor is left
                self._socket = one = socket.socket(family, socket.SOCK_STREAM)
                if family is socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((address, 0))
                self.port = one.getsockname()[1]
                return

    def release(self) -> None:
        """Give the port back."""
        if self._socket is not None:
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
