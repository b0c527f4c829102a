"""A store within one process, with the part of torch.distributed's API that rank assignment needs, that counts bytes.

For tests and benchmarks of rank assignments, a user's own included, with threads as ranks or one rank after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Condition


@dataclass
class _Shared:
    values: dict[str, bytes] = field(default_factory=dict)
    changed: Condition = field(default_factory=Condition)
    moved: int = 0  # bytes


class MemoryStore:
    """What one would be on a server: all views of it share values and the count."""

    def __init__(self, prefix: str = "", shared: _Shared | None = None) -> None:
        self._prefix = prefix
        self._shared = shared or _Shared()

    def iteration(self, number: int) -> MemoryStore:
        """The view that a rank assignment gets in this iteration."""
        return MemoryStore(f"{number}/", self._shared)

    @property
    def stable(self) -> MemoryStore:
        """The view that is the same in all iterations."""
        return MemoryStore("stable/", self._shared)

    @property
    def moved_bytes(self) -> int:
        """Length of all keys and values that went in or out."""
        return self._shared.moved

    def __len__(self) -> int:
        return len(self._shared.values)

    def _name(self, key: str, *more: bytes) -> str:
        name = self._prefix + key
        self._shared.moved += len(name) + sum(map(len, more))
        return name

    def set(self, key: str, value: bytes | str) -> None:
        """Set one value."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set several."""
        with self._shared.changed:
            names = [self._prefix + key for key in keys]
            data = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
            self._shared.values.update(zip(names, data, strict=True))
            self._shared.moved += sum(map(len, names)) + sum(map(len, data))
            self._shared.changed.notify_all()

    def get(self, key: str) -> bytes:
        """The value; raises RuntimeError if there is none."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Several values; raises RuntimeError if one is missing."""
        names = [self._prefix + key for key in keys]
        with self._shared.changed:
            try:
                found = [self._shared.values[name] for name in names]
            except KeyError as error:
                raise RuntimeError(f"the store has no {error}") from None
            self._shared.moved += sum(map(len, names)) + sum(map(len, found))
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins with 0 and return the sum."""
        with self._shared.changed:
            name = self._name(key, b"12345678")
            total = int(self._shared.values.get(name, b"0")) + amount
            self._shared.values[name] = str(total).encode()
            self._shared.changed.notify_all()
        return total

    def compare_set(self, key: str, expected: str, desired: bytes | str) -> bytes:
        """Set if the value is `expected`, or if that is empty and there is none; the value afterwards."""
        data = desired.encode() if isinstance(desired, str) else bytes(desired)
        with self._shared.changed:
            name = self._name(key, data)
            if self._shared.values.get(name, b"") == expected.encode():
                self._shared.values[name] = data
                self._shared.changed.notify_all()
            return self._shared.values.get(name, expected.encode())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        with self._shared.changed:
            return all(self._name(key) in self._shared.values for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Until all are there; raises RuntimeError after `timeout`."""
        with self._shared.changed:
            names = [self._name(key) for key in keys]
            if not self._shared.changed.wait_for(
                lambda: all(name in self._shared.values for name in names), timeout.total_seconds()
            ):
                missing = [name for name in names if name not in self._shared.values]
                raise RuntimeError(f"no {', '.join(missing[:3])} within {timeout.total_seconds():g} s")
