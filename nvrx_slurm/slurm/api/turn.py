"""One call to Slurm at a time per process, and fewer while slurmctld is slow or away."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from nvrx_slurm.slurm.api.facts import NoAnswer, SlurmError

_FIRST_S, _LONGEST_S = 1.0, 60.0


class Turn:
    """A lock with a back-off: after each NoAnswer in a row, calls fail at once for 1, 2, 4 ... 60 seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = 0.0

    @contextmanager
    def take(self, timeout_s: float) -> Iterator[None]:
        """Wait for the turn, at most `timeout_s` seconds. Raises NoAnswer if it does not come, or too early."""
        if not self._lock.acquire(timeout=timeout_s):
            raise NoAnswer(f"another question to Slurm takes longer than {timeout_s:g} s")
        try:
            left_s = self._until_s - time.monotonic()
            if left_s > 0.0:
                raise NoAnswer(f"Slurm did not answer; it is asked again in {left_s:.1f} s")
            try:
                yield
            except NoAnswer:
                self._pause_s = min(_LONGEST_S, 2 * self._pause_s or _FIRST_S)
                self._until_s = time.monotonic() + self._pause_s
                raise
            except SlurmError:  # a refusal is an answer
                self._pause_s = 0.0
                raise
            self._pause_s = 0.0
        finally:
            self._lock.release()
