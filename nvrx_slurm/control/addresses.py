"""Names to addresses, bounded: where to listen, and where to connect to."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from typing import Any

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import bounded

_RESOLVE_TIMEOUT_S = 5.0
Found = list[tuple[Any, ...]]  # as socket.getaddrinfo gives them


async def find(host: str, port: int) -> Found:
    """The addresses of `host`. Raises OSError, also after 5 s without an answer."""
    with contextlib.suppress(OSError):  # a number needs no resolver, and no thread
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    try:
        return await bounded.call_async(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM),
            _RESOLVE_TIMEOUT_S,
            "the resolver",
        )
    except bounded.Overrun as error:
        raise OSError(str(error)) from None


ANY_ADDRESS = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 - callers without the token get nothing


async def resolve(host: str) -> str:
    """The IP address to listen on so that `host` reaches it. Raises UsageError if it does not resolve.

    A name that this machine resolves to loopback only (Debian's /etc/hosts has its name at 127.0.1.1) has another
    address on the other nodes: then it is 0.0.0.0 or ::. "localhost" and IP addresses are taken as they are.
    """
    try:
        addresses = [str(entry[4][0]) for entry in await find(host, 0)]
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"the coordinator's host name {host} does not resolve: {why}") from None
    if host == "localhost" or host in addresses:
        return addresses[0]
    reachable = [
        address
        for address in addresses
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback
    ]
    return reachable[0] if reachable else "::" if ":" in addresses[0] else "0.0.0.0"
