"""End the rank at once after an uncaught exception (--ft-install-exception-hook).

Without it, Python waits for non-daemon threads, atexit functions and destructors. One of these may be in a collective
whose peers wait for this rank.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

EXIT_CODE = 1  # Python's own after an uncaught exception


class _Hook:
    """Calls the hook that was installed before, then ends the process, unless it was forked after `install()`."""

    def __init__(self) -> None:
        self._before = sys.excepthook
        self._pid = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        try:
            self._before(kind, error, traceback)
        finally:
            if os.getpid() == self._pid:
                _flush()
                os._exit(EXIT_CODE)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the stream is None or closed, or its disk is full


def install() -> None:
    """Replace sys.excepthook for this process; a second call does nothing."""
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook()
