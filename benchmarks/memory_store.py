"""A store in memory with the methods that rank assignments use.

Ranks are threads, or calls in turn.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from threading import Condition


@dataclass
class _Shared:
    values: defaultdict[str, dict[str, bytes]] = field(default_factory=lambda: defaultdict(dict))  # by prefix
    changed: Condition = field(default_factory=Condition)


class MemoryStore:
    """What one would be on a server: all views of it share values."""

    def __init__(self, prefix="", shared=None):
        self._prefix = prefix
        self._shared = shared or _Shared()
        self._values = self._shared.values[prefix]

    def iteration(self, number):
        """The view that a rank assignment gets in this iteration."""
        return MemoryStore(f"{number}/", self._shared)

    @property
    def stable(self):
        """The view that is the same in all iterations."""
        return MemoryStore("stable/", self._shared)

    def __len__(self):
        return sum(map(len, self._shared.values.values()))

    def set(self, key, value):
        """Set one value."""
        self.multi_set([key], [value])

    def multi_set(self, keys, values):
        """Set several."""
        with self._shared.changed:
            data = [value.encode() if isinstance(value, str) else bytes(value) for value in values]
            self._values.update(zip(keys, data, strict=True))
            self._shared.changed.notify_all()

    def get(self, key):
        """The value; raises RuntimeError if there is none."""
        return self.multi_get([key])[0]

    def multi_get(self, keys):
        """Several values; raises RuntimeError if one is missing."""
        with self._shared.changed:
            try:
                found = list(map(self._values.__getitem__, keys))
            except KeyError as error:
                raise RuntimeError(f"the store has no {self._prefix}{error.args[0]}") from None
        return found

    def add(self, key, amount):
        """Add to a number that begins with 0 and return the sum."""
        with self._shared.changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._shared.changed.notify_all()
        return total

    def compare_set(self, key, expected, desired):
        """Set if the value is `expected`, or if that is empty and there is none; the value afterwards."""
        data = desired.encode() if isinstance(desired, str) else bytes(desired)
        with self._shared.changed:
            if self._values.get(key, b"") == expected.encode():
                self._values[key] = data
                self._shared.changed.notify_all()
            return self._values.get(key, expected.encode())

    def check(self, keys):
        """Whether all are there."""
        with self._shared.changed:
            return all(key in self._values for key in keys)

    def wait(self, keys, timeout):
        """Until all are there; raises RuntimeError after `timeout`."""
        with self._shared.changed:
            if not self._shared.changed.wait_for(
                lambda: all(key in self._values for key in keys), timeout.total_seconds()
            ):
                missing = [self._prefix + key for key in keys if key not in self._values]
                raise RuntimeError(f"no {', '.join(missing[:3])} within {timeout.total_seconds():g} s")
