"""Where the server of a TCPStore listens, and how a client waits for it."""

from __future__ import annotations

import encodings.idna  # noqa: F401 - the first look-up of a host would import it: 10 ms at the start of every rank
import errno
import os
import socket
import time

from nvrx_slurm.errors import UsageError

_BACKOFF_S = (0.001, 0.05)  # first and longest pause between two tries to reach a server that is not up yet
_PROBE_S = 5.0  # longest wait for a connection to be accepted


def variable(name: str) -> str:
    """The environment variable; raises UsageError if it is missing or empty."""
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"{name} is not set; start the ranks with nvrx-run (or torchrun), or set it yourself")
    return value


def master_port() -> int:
    """MASTER_PORT; raises UsageError if it is missing or not a port."""
    text = variable("MASTER_PORT")
    if not (text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536):
        raise UsageError(f"MASTER_PORT={text!r} is not a port (1..65535)")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether an address, as written, belongs to this host only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(host: str, port: int) -> socket.socket | None:
    """A listening socket for the server, or None if the port is taken. Raises UsageError for any other failure."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"MASTER_ADDR={host!r} cannot be resolved: {error}") from error
    try:
        if is_loopback(host):  # as written: a host's own name may resolve to loopback on that host only
            return socket.create_server(address[:2], family=family, backlog=4096)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(f"rank 0 cannot listen on port {port} for MASTER_ADDR={host}: {error.strerror}") from error


def await_server(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server accepts connections within `timeout_s` seconds.

    torch's own retries are seconds apart, and each prints a warning.
    """
    deadline_s, pause_s = time.monotonic() + timeout_s, _BACKOFF_S[0]
    while _refused(host, port, min(_PROBE_S, timeout_s)):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _BACKOFF_S[1])
    return True


def _refused(host: str, port: int, timeout_s: float) -> bool:
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            return bool(probe.getsockname()[:2] == probe.getpeername()[:2])  # TCP can connect to itself
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # torch's own attempt reports any other failure better
