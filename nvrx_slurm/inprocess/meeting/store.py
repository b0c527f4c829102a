"""The store that the ranks of one call of a wrapped function meet in.

A store is any `torch.distributed.Store`. What the wrapper adds is in `StoreView`, which holds a store instead of being
one: torch adds methods to its stores (2.13: `barrier`), and none of them may ever take the place of ours.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - the first look-up of a host would import it: 10 ms at the start of every rank
import errno
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.exception import BarrierError as BarrierError  # NVRx has it here, too
from nvrx_slurm.inprocess.exception import BarrierOverflow, BarrierTimeout, InternalError
from nvrx_slurm.inprocess.watch.progress import OwnTime
from nvrx_slurm.system import bounded, connections

_BACKOFF_S = (0.001, 0.05)  # first and longest pause between two tries to reach a server that is not up yet
_PROBE_S = 5.0  # longest wait for a connection to be taken
_NAMES, _NAMES_S = 8, (1.0, 120.0)  # lookups of a connection; shortest and longest time for all of them
_answer_s = ContextVar("answer_s", default=60.0)  # longest wait for the first answer of a server that listens
_CHUNK = 8192  # keys in one request: torch's TCPStore takes 131072 keys and 8 MiB
_SHORTEST_LOOK_S = 0.5  # a FileStore needs a second for any that is in vain
_LAST_LOOK_S = 0.01  # torch cuts off what is less than a millisecond: not much of any
_LOOKS = 4  # in one wait for others; torch says two lines on stderr after each that was in vain


class StoreLost(InternalError):
    """The store cannot be reached any more; without it no fault can be handled."""


@contextlib.contextmanager
def answering_within(seconds: float) -> Iterator[None]:
    """A TCPStore that is made in this block takes a server that gives no first answer for so long as lost."""
    token = _answer_s.set(seconds)
    try:
        yield
    finally:
        _answer_s.reset(token)


class StoreMixin:
    """Base to list before a torch store in a store class of your own, for the wrapper's `store_factory`.

    An instance is made in several places of every rank: in its monitor process first (that of rank 0 has to start
    the server, if there is to be one: it lives longer than any rank), then twice in the rank itself. Whoever cannot
    be the server because there is one must become a client of it.
    """

    serves = False  # whether this instance runs the server

    def view(self, prefix: str = "") -> StoreView:
        """This store with the wrapper's methods."""
        return StoreView(self, prefix)


class TCPStore(StoreMixin, dist.TCPStore):
    """torch's TCPStore at MASTER_ADDR:MASTER_PORT. Where RANK is 0 it is the server, unless somebody else is already
    (torchrun's agent, or an earlier instance): then it is a client like all others.

    The server listens on loopback only if MASTER_ADDR is a loopback address. `host_name` and `port` default to
    MASTER_ADDR and MASTER_PORT (UsageError if they are missing). A client waits up to `timeout` for the server.
    Raises StoreLost if nobody listens there until then, or who does gives no answer.
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
        host = host_name if host_name is not None else _from_env("MASTER_ADDR")
        number = port if port is not None else _port_from_env()
        listening = _listen(host, number) if os.environ.get("RANK") == "0" else None
        self.serves = listening is not None
        if listening is None:
            _await_server(host, number, timeout.total_seconds())
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
        try:  # torch waits for the server's first answer without a bound
            bounded.call(lambda: self._connect(arguments), _answer_s.get(), "nvrx-store", lambda: _names_s(host))
        except bounded.Overrun:
            raise StoreLost(_no_answer(host, number)) from None

    def _connect(self, arguments: dict[str, Any]) -> None:
        try:
            dist.TCPStore.__init__(self, **arguments)
        except NotImplementedError:  # torch 2.5: its libuv server cannot be given a socket that listens
            dist.TCPStore.__init__(self, **{**arguments, "use_libuv": False})


def serve(host: str, port: int) -> dist.TCPStore | None:
    """torch's store with its server at a port of this host; None if somebody listens there. Raises UsageError where it
    cannot listen, RuntimeError if torch cannot serve."""
    listening = _listen(host, port)
    if listening is None:
        return None
    arguments: dict[str, Any] = dict(is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    try:
        return dist.TCPStore(host, port, **arguments)
    except NotImplementedError:  # as above
        return dist.TCPStore(host, port, **arguments, use_libuv=False)


class FileStore(StoreMixin, dist.FileStore):
    """torch's FileStore: a file that all ranks can reach, and no server. The file must be new for every job.

    Raises UsageError for a file that cannot be made.
    """

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        try:  # as torch opens it, which however tries again for its whole timeout
            os.close(os.open(file_name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
        except OSError as error:
            raise UsageError(
                f"the file {file_name!r} of a FileStore cannot be made ({error.strerror}); file_name must be a path in"
                " a directory that all ranks can write to"
            ) from error
        super().__init__(file_name, world_size)


class PrefixStore(StoreMixin, dist.PrefixStore):
    """torch's PrefixStore; `iteration` makes the prefix."""

    def __init__(self, iteration: int | str, store: dist.Store) -> None:
        super().__init__(f"_inprocess_{iteration}", store)


def _names_s(host: str) -> float:
    """How much longer a connection may take, since torch asks the name server for the name of each of its ends, some
    of them several times: a name server that is silent makes no store a lost one."""
    began_s = time.monotonic()
    with contextlib.suppress(OSError):
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        socket.getnameinfo((address if ":" in address else f"::ffff:{address}", 0), 0)  # as torch's sockets say it
    return max(_NAMES_S[0], min(_NAMES * (time.monotonic() - began_s), _NAMES_S[1]))


def _from_env(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise UsageError(f"{name} is not set; start the ranks with nvrx-run (or torchrun), or set it yourself")
    return value


def _port_from_env() -> int:
    text = _from_env("MASTER_PORT")
    if not (text.isdecimal() and len(text) < 6 and 0 < int(text) < 65536):
        raise UsageError(f"MASTER_PORT={text!r} is not a port (1..65535)")
    return int(text)


def is_loopback(host: str) -> bool:
    """Whether an address, as written, is one of this host only."""
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(host: str, port: int) -> socket.socket | None:
    """A listening socket for the server, or None if the port is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"MASTER_ADDR={host!r} cannot be resolved: {error}") from error
    family, *_, address = found[0]
    try:
        if is_loopback(host):  # as written: a host's own name may resolve to loopback there, and nowhere else
            return socket.create_server(address[:2], family=family, backlog=4096)
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=4096, dualstack_ipv6=True)
        return socket.create_server(("", port), backlog=4096)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise UsageError(f"rank 0 cannot listen on port {port} for MASTER_ADDR={host}: {error.strerror}") from error


def _await_server(host: str, port: int, timeout_s: float) -> None:
    """Until somebody listens. torch's own retries are seconds apart, and it complains about each."""
    waited, pause_s = OwnTime(_PROBE_S + _BACKOFF_S[1]), _BACKOFF_S[0]
    while waited.seconds() < timeout_s:
        if not refused(host, port):
            return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _BACKOFF_S[1])
    raise StoreLost(
        f"the store cannot be reached: nobody has listened on {host}:{port} (MASTER_ADDR, MASTER_PORT) for"
        f" {timeout_s:g} s; rank 0 should: see in its output whether it was started, and why it has failed"
    )


def _no_answer(host: str, port: int) -> str:
    """Why there was none, and what to do."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError as error:
        return (
            f"the store cannot be reached: {host}:{port} (MASTER_ADDR, MASTER_PORT) takes no connection ({error}),"
            f" and has not for {_answer_s.get():g} s; see whether rank 0's host is up, and no firewall is in between"
        )
    return (
        f"the store cannot be reached: who listens on {host}:{port} does not answer like a store (nothing for"
        f" {_answer_s.get():g} s); see whether rank 0 or its host is stopped; if that is another program, choose"
        " another MASTER_PORT"
    )


def refused(host: str, port: int) -> bool:
    """Whether nobody listens there."""
    try:
        with socket.create_connection((host, port), timeout=min(_PROBE_S, _answer_s.get())) as probe:
            return bool(probe.getsockname()[:2] == probe.getpeername()[:2])  # TCP can connect to itself
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # torch says what is wrong better


class StoreView:
    """A store seen through a prefix: torch's methods, and a barrier.

    Values are bytes. Every method raises StoreLost if the store cannot be reached. `stable` is the view that outlives
    iterations (see `leader`).
    """

    def __init__(self, store: Any, prefix: str = "", stable: StoreView | None = None) -> None:
        self.store = store
        self.prefix = prefix
        self.stable = stable or self

    def under(self, name: str, stable: StoreView | None = None) -> StoreView:
        """The keys below `name`."""
        return StoreView(self.store, f"{self.prefix}{name}/", stable or self.stable)

    def _key(self, key: str) -> str:
        return self.prefix + key

    @property
    def place(self) -> str:
        """Where it is, for a sentence."""
        store = _innermost(self.store)
        host, port, path = (getattr(store, name, None) for name in ("host", "port", "path"))
        return f"{host}:{port}" if port else str(path or type(store).__name__)

    def hang_up(self) -> bool:
        """End all connections of this process to the store's server, so that whoever waits for an answer gets an
        error; whether there were any."""
        port = getattr(_innermost(self.store), "port", None)
        return bool(port and connections.cut(connections.to_port(port)))

    def await_hang_up(self, timeout_s: float) -> bool:
        """Until the server has ended, to which this process still has connections; False if it has not in time."""
        port = getattr(_innermost(self.store), "port", None)
        return not port or connections.await_end(connections.to_port(port), timeout_s)

    def _sentence(self, what: str, error: BaseException) -> str:
        first = (str(error).splitlines() or [""])[0]
        return (
            f"the store cannot be reached any more ({self.place}, {what}: {first[:200]}); whoever serves it, which is"
            " rank 0's monitor process unless it was there before, has ended or does not answer: see what happened on"
            " its host, and start all ranks again"
        )

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key; its waiters wake up."""
        with _lost(self, "set"):
            self.store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """Value of a key that exists (or will within the store's own timeout)."""
        with _lost(self, "get"):
            return bytes(self.store.get(self._key(key)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 at first) and return it."""
        with _lost(self, "add"):
            return int(self.store.add(self._key(key), amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        with _lost(self, "check"):
            return bool(self.store.check([self._key(key) for key in keys]))

    def compare_set(self, key: str, expected: str, value: str | bytes) -> bytes:
        """Set a key that has the value `expected` ("": does not exist); returns what it has then.

        Before torch 2.9 waiters of the key do not wake up: set another key after it.
        """
        with _lost(self, "compare_set"):
            return bytes(self.store.compare_set(self._key(key), expected, value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values of keys that exist."""
        values: list[bytes] = []
        with _lost(self, "multi_get"):
            for start in range(0, len(keys), _CHUNK):
                some = [self._key(key) for key in keys[start : start + _CHUNK]]
                values += map(bytes, self.store.multi_get(some))
        return values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set all keys."""
        with _lost(self, "multi_set"):
            for start in range(0, len(keys), _CHUNK):
                some = [self._key(key) for key in keys[start : start + _CHUNK]]
                self.store.multi_set(some, values[start : start + _CHUNK])

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether there was one."""
        with _lost(self, "delete_key"):
            return bool(self.store.delete_key(self._key(key)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Until all keys exist. Raises TimeoutError (the built-in one) after `timeout`."""
        if not self.came(keys, timeout.total_seconds()):
            raise TimeoutError(f"no {', '.join(keys)[:200]} within {timeout.total_seconds():g} s")

    def came(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist before the time is over, of which only counts what this process has seen."""
        look_s = self.look_s(timeout_s)
        waited = OwnTime(look_s)
        while not self.look(keys, look_s):
            left_s = timeout_s - waited.seconds()
            if left_s <= 0.0:
                return False
            look_s = max(min(look_s, left_s), _LAST_LOOK_S)
        return True

    @staticmethod
    def look_s(timeout_s: float) -> float:
        """How long to look at a time, in a wait so long."""
        return max(timeout_s / _LOOKS, min(timeout_s, _SHORTEST_LOOK_S))

    def look(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist before the time is over, be this process stopped or not: a part of a longer wait."""
        began = time.monotonic()
        names = [self._key(key) for key in keys]
        try:
            self.store.wait(names, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            if time.monotonic() - began < 0.9 * timeout_s:  # not the time that ran out
                raise StoreLost(self._sentence("wait", error)) from error
            return self.check(keys)
        return True

    def barrier(
        self,
        ranks: Sequence[int],
        group_name: str,
        rendezvous_count: int,
        timeout: timedelta,
        timeout_chunk: timedelta | None = None,
    ) -> None:
        """Until `rendezvous_count` arrivals were counted; this one counts for each of `ranks`.

        One counter and one key for all. Raises BarrierTimeout, or BarrierOverflow if more came than were expected.
        `timeout_chunk` has no meaning any more: nothing is polled.
        """
        keys = self.under(f"barrier/{group_name}")
        count = keys.add("count", len(ranks))
        if count > rendezvous_count:
            raise BarrierOverflow(f"barrier {group_name!r}: {count} came, {rendezvous_count} were expected")
        if count == rendezvous_count:
            keys.set("all", "1")
        elif not keys.came(["all"], timeout.total_seconds()):
            raise BarrierTimeout(
                f"barrier {group_name!r}: {keys.add('count', 0)} of {rendezvous_count} came"
                f" within {timeout.total_seconds():g} s"
            )


def _innermost(store: Any) -> Any:
    """Without the prefixes around it."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


class _lost(contextlib.AbstractContextManager[None]):
    """Turns what torch raises for a broken connection into StoreLost."""

    def __init__(self, view: StoreView, what: str) -> None:
        self.view, self.what = view, what

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            raise StoreLost(self.view._sentence(self.what, error)) from error
