"""A store as the wrapper uses it.

`StoreView` holds a store instead of being one: torch adds methods to its stores (2.13: `barrier`), and none of them may
ever replace ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from nvrx_slurm.inprocess.exception import InternalError
from nvrx_slurm.system import connections

CLOSED = "nvrx_inprocess_closed"  # without a prefix: a server that is about to end accepts no new call
_CHUNK = 8192  # keys in one request: torch's TCPStore takes 131072 keys and 8 MiB
_SHORTEST_WAIT_S = 0.5  # a FileStore needs a second for any wait that times out
_LAST_WAIT_S = 0.01  # torch truncates the timeout to whole milliseconds
_WAITS = 4  # in one wait; torch prints two lines on stderr after each that times out


class StoreLost(InternalError):
    """The store cannot be reached any more; without it no fault can be handled."""


class StoreView:
    """A store seen through a prefix: torch's methods.

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

    def _keys(self, keys: Sequence[str]) -> list[str]:
        return [self.prefix + key for key in keys]

    @property
    def place(self) -> str:
        """The store's address or path, for messages."""
        store = _innermost(self.store)
        host, port, path = (getattr(store, name, None) for name in ("host", "port", "path"))
        return f"{host}:{port}" if port else str(path or type(store).__name__)

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
        values: list[bytes] = []
        for start in range(0, len(keys), _CHUNK):
            values += map(bytes, self._ask("multi_get", self._keys(keys[start : start + _CHUNK])))
        return values

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        return bool(self._ask("delete_key", self.prefix + key))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist. Raises the built-in TimeoutError after `timeout`."""
        if not self.came(keys, timeout.total_seconds()):
            raise TimeoutError(f"no {', '.join(keys)[:200]} within {timeout.total_seconds():g} s")

    def came(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Whether all keys exist before `timeout_s` seconds are over."""
        deadline_s, wait_s = time.monotonic() + timeout_s, max(timeout_s / _WAITS, min(timeout_s, _SHORTEST_WAIT_S))
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
            if time.monotonic() - began_s < 0.9 * timeout_s:  # no timeout, so the connection is broken
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
