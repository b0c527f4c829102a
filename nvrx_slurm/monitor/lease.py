"""The lease of a node: until when its ranks may run without word from the coordinator.

One word of memory that the agent writes and its rank monitors read; ranks never see it. A monitor kills its rank when
the lease is over, also where the agent is stopped or blocked. Then another node may start the same rank.
"""

from __future__ import annotations

import mmap
import os
from time import monotonic_ns

_BYTES = 4096


class Lease:
    """The word. `fd`: to be passed to the monitors; -1 = make a new one, which has no end yet. Raises OSError.

    `listener`: the socket at which the agent listens (-1 = none). The monitors keep it open until the processes of a
    dead agent's ranks are gone. The host refuses connections only then, and that proves to other nodes that all are.
    """

    def __init__(self, fd: int = -1, listener: int = -1) -> None:
        self.fd = fd
        self.listener = listener
        if fd < 0:
            self.fd = os.memfd_create("nvrx-lease", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, _BYTES)
        self._map = mmap.mmap(self.fd, _BYTES)
        self._word = memoryview(self._map).cast("q")

    @property
    def until_s(self) -> float | None:
        """When it ends (monotonic seconds); None: it has no end."""
        until_ns = self._word[0]
        return until_ns / 1e9 if until_ns else None

    @until_s.setter
    def until_s(self, until_s: float | None) -> None:
        self._word[0] = 0 if until_s is None else max(1, int(until_s * 1e9))

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return 0 < self._word[0] <= monotonic_ns()

    def close(self) -> None:
        """Unmap and close."""
        self._word.release()
        self._map.close()
        os.close(self.fd)
