"""The stores that the ranks of one call of a wrapped function may meet in: any `torch.distributed.Store`.

`StoreView` holds a store instead of being one: torch adds methods to its stores (2.13: `barrier`), and none of them may
ever replace ours.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401 - the first look-up of a host would import it: 10 ms at the start of every rank
import errno
import logging
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.checks import variable

# NVRx has these names here, too
from nvrx_slurm.inprocess.exception import BarrierError as BarrierError
from nvrx_slurm.inprocess.exception import BarrierOverflow as BarrierOverflow
from nvrx_slurm.inprocess.exception import BarrierTimeout as BarrierTimeout
from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.system import bounded, connections

logger = logging.getLogger(__name__)

# first and longest pause between two tries to reach a server that is not up yet
_BACKOFF_S = (0.001, 0.05)
_PROBE_S = 5.0  # longest wait for a connection to be accepted
# without a prefix: a server that is about to end accepts no new call
CLOSED = "nvrx_inprocess_closed"
_SHORTEST_WAIT_S = 0.5  # a FileStore needs a second for any wait that times out
_LAST_WAIT_S = 0.01  # torch truncates the timeout to whole milliseconds
_WAITS = 4  # in one wait; torch prints two lines on stderr after each that times out


class StoreLost(InternalError):
    """The store cannot be reached any more; without it no fault can be handled."""


class StoreView:
    """A store seen through a prefix: torch's methods.

    Values are bytes. Every method raises StoreLost if the store cannot be reached.
    """

    def __init__(self, store: Any, prefix: str = "") -> None:
        self.store = store
        self.prefix = prefix

    def under(self, name: str) -> StoreView:
        """The keys below `name`."""
        return StoreView(self.store, f"{self.prefix}{name}/")

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self.prefix + key for key in keys]

    @property
    def place(self) -> str:
        """The store's address or path, for messages."""
        store = _innermost(self.store)
        host, port, path = (getattr(store, name, None) for name in ("host", "port", "path"))
        return f"{host}:{port}" if port else str(path or type(store).__name__)

    def closes(self) -> bool:
        """Whether the server is about to end."""
        return StoreView(self.store).check([CLOSED])

    def await_end_of_server(self, timeout_s: float) -> None:
        """Until it has closed all connections of this process, for `timeout_s` seconds at most."""
        port = getattr(_innermost(self.store), "port", None)
        if port and not connections.await_end(connections.to_port(port), timeout_s):
            logger.warning(
                "the store at %s, which ends with the call, has not ended in %g s",
                self.place,
                timeout_s,
            )

    def disconnect(self) -> bool:
        """Shut down all connections of this process to the store's server, so that waiting calls raise.

        False if the store has no server.
        """
        port = getattr(_innermost(self.store), "port", None)
        if port:
            connections.cut(connections.to_port(port))
        return bool(port)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; its waiters wake up."""
        self._ask("set", self.prefix + key, value)

    def get(self, key: str) -> bytes:
        """Value of a key that exists (or will within the store's own timeout)."""
        return bytes(self._ask("get", self.prefix + key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 at first) and return it."""
        return int(self._ask("add", self.prefix + key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._ask("check", self._keys(keys)))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> bytes:
        """Set a key whose value is `expected` ("": does not exist); returns its value afterwards.

        Before torch 2.9 waiters of the key do not wake up: set another key after it.
        """
        return bytes(self._ask("compare_set", self.prefix + key, expected, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys that exist."""
        return list(map(bytes, self._ask("multi_get", self._keys(keys))))

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        return bool(self._ask("delete_key", self.prefix + key))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist, for users' rank assignments. Raises the built-in TimeoutError after `timeout`."""
        if not self.came(keys, timeout.total_seconds()):
            raise TimeoutError(f"no {', '.join(keys)[:200]} within {timeout.total_seconds():g} s")

    def came(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist before `timeout_s` seconds are over."""
        deadline_s, wait_s = (
            time.monotonic() + timeout_s,
            max(timeout_s / _WAITS, min(timeout_s, _SHORTEST_WAIT_S)),
        )
        while not self.wait_once(keys, wait_s):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0.0:
                return False
            wait_s = max(min(wait_s, left_s), _LAST_WAIT_S)
        return True

    def wait_once(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist before `timeout_s` seconds are over: one request, a part of a longer wait."""
        began_s = time.monotonic()
        try:
            self.store.wait(self._keys(keys), timedelta(seconds=timeout_s))
        except RuntimeError as error:
            # no timeout, so the connection is broken
            if time.monotonic() - began_s < 0.9 * timeout_s:
                raise StoreLost(self._sentence("wait", error)) from error
            return self.check(keys)
        return True

    def _ask(self, what: str, *arguments: Any) -> Any:
        """torch raises RuntimeError for a broken connection."""
        try:
            return getattr(self.store, what)(*arguments)
        except RuntimeError as error:
            raise StoreLost(self._sentence(what, error)) from error

    def _sentence(self, what: str, error: BaseException) -> str:
        first = (str(error).splitlines() or [""])[0]
        return (
            f"the store cannot be reached any more ({self.place}, {what}: {first[:200]}); its server (the monitor"
            " process of rank 0, unless it was there before) has ended or does not answer: see what happened on its"
            " host, and start all ranks again"
        )


def _innermost(store: Any) -> Any:
    """The store without the prefixes around it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


# --- stores ----------------------------------------------------------------------------------------------------------


def _master_port() -> int:
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
        # as written: a host's own name may resolve to loopback on that host only
        on_all = not is_loopback(host)
        both = on_all and socket.has_dualstack_ipv6()
        if on_all:
            family, address = socket.AF_INET6 if both else socket.AF_INET, ("", port)
        return socket.create_server(address[:2], family=family, backlog=4096, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(
            f"rank 0 cannot listen on port {port} for MASTER_ADDR={host}: {error.strerror}"
        ) from error


def _await_server(host: str, port: int, timeout_s: float) -> bool:
    """Whether a server accepts connections within `timeout_s` seconds.

    torch's own retries are seconds apart, and each prints a warning.
    """
    deadline_s = time.monotonic() + timeout_s
    pause_s = _BACKOFF_S[0]
    while _refused(host, port, min(_PROBE_S, timeout_s)):
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _BACKOFF_S[1])
    return True


def _refused(host: str, port: int, timeout_s: float) -> bool:
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as probe:
            # TCP can connect to itself
            return bool(probe.getsockname()[:2] == probe.getpeername()[:2])
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # torch's own attempt reports any other failure better


class StoreMixin:
    """Base to list before a torch store in a store class of your own, for the wrapper's `store_factory`.

    An instance is made in several places of every rank: first in its monitor process (that of rank 0 has to start the
    server, if there is to be one: it lives longer than any rank), then twice in the rank itself. An instance that
    cannot be the server because there is one must become a client of it.
    """

    serves = False  # whether this instance runs the server


class TCPStore(StoreMixin, dist.TCPStore):
    """torch's TCPStore at MASTER_ADDR:MASTER_PORT. It is the server where RANK is 0 and the port is free.

    If the port is taken (by torchrun's agent, or an earlier instance) it is a client like all others. The server
    listens on loopback only if MASTER_ADDR is a loopback address. `host_name` and `port` default to MASTER_ADDR and
    MASTER_PORT (UsageError if they are missing). A client waits up to `timeout` for the server, and as long for its
    first answer; then it raises StoreLost.
    """

    def __init__(
        self,
        host_name: str | None = None,
        port: int | None = None,
        world_size: int | None = None,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        use_libuv: bool = True,
    ) -> None:
        host = host_name if host_name is not None else variable("MASTER_ADDR")
        number = port if port is not None else _master_port()
        listening = listen(host, number) if os.environ.get("RANK") == "0" else None
        self.serves = listening is not None
        timeout_s = timeout.total_seconds()
        if listening is None and not _await_server(host, number, timeout_s):
            raise StoreLost(
                f"the store cannot be reached: nothing has listened on {host}:{number} (MASTER_ADDR, MASTER_PORT) for"
                f" {timeout_s:g} s; see in rank 0's output whether it was started, and why it has failed"
            )
        arguments: dict[str, Any] = dict(
            host_name=host,
            port=number,
            world_size=world_size,
            is_master=self.serves,
            timeout=timeout,
            wait_for_workers=wait_for_workers,
            multi_tenant=multi_tenant,
            master_listen_fd=None if listening is None else listening.detach(),
            use_libuv=use_libuv,
        )
        # torch waits for the server's first answer without a bound, and for the connection as long as we do
        try:
            bounded.call(lambda: _connect(self, arguments), timeout_s, "nvrx-store")
        except (bounded.Overrun, dist.DistNetworkError):
            raise StoreLost(
                f"the store cannot be reached: {host}:{number} (MASTER_ADDR, MASTER_PORT) has not answered like a store"
                f" for {timeout_s:g} s; see whether rank 0 is stopped, its host is down, a firewall is in between or"
                " another program listens there"
            ) from None


def _connect(store: dist.TCPStore, arguments: dict[str, Any]) -> None:
    try:
        dist.TCPStore.__init__(store, **arguments)
    except NotImplementedError:  # torch 2.5: its libuv server cannot be given a socket that listens
        dist.TCPStore.__init__(store, **{**arguments, "use_libuv": False})


def serve(host: str, port: int) -> dist.TCPStore | None:
    """torch's store with its server at a port of this host; None if the port is taken.

    Raises UsageError where it cannot listen, RuntimeError if torch cannot serve.
    """
    listening = listen(host, port)
    if listening is None:
        return None
    store = dist.TCPStore.__new__(dist.TCPStore)
    fd = listening.detach()
    _connect(
        store,
        dict(
            host_name=host,
            port=port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=fd,
            use_libuv=True,
        ),
    )
    return store


class FileStore(StoreMixin, dist.FileStore):
    """torch's FileStore: a file that all ranks can reach, and no server. The file must be new for every job."""


class PrefixStore(StoreMixin, dist.PrefixStore):
    """torch's PrefixStore; `iteration` makes the prefix."""

    def __init__(self, iteration: int | str, store: dist.Store) -> None:
        super().__init__(f"_inprocess_{iteration}", store)
