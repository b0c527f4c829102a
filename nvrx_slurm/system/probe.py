"""Does a TCP port refuse connections? Only then it is certain that no process listens there."""

from __future__ import annotations

import errno
import socket


def is_refused(host: str, port: int, timeout_s: float) -> bool | None:
    """True: the host answers that nothing listens at `port`. False: something does. None: no answer, or no route.

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
