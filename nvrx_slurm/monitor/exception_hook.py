"""End the rank at once after an uncaught exception (--ft-install-exception-hook).

Without it, Python waits for non-daemon threads, atexit functions and destructors. One of these may be in a collective
whose peers wait for this rank.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

EXIT_CODE = 1  # Python's own after an uncaught exception


def install() -> None:
    """Have sys.excepthook end this process after the hook before it, but not a process forked from this one."""
    before, pid = sys.excepthook, os.getpid()

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        try:
            before(kind, error, traceback)
        finally:
            if os.getpid() == pid:
                _flush()
                os._exit(EXIT_CODE)

    sys.excepthook = hook


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # the stream is None or closed, or its disk is full
