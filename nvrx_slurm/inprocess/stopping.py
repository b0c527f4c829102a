"""Stopping the wrapped function from another thread, without ever hitting anybody else's code."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

NUDGE_SIGNAL = signal.SIGURG  # ignored by default: harmless where nobody handles it
_NUDGES_S = (0.02, 0.2, 1.0)  # pauses between signals; the last one repeats
_MIN_PERIOD_S = 1.0


class RankShouldRestart(BaseException):
    """Raised asynchronously inside the wrapped function to stop it; the function must let it pass.

    If it is dropped instead, its destructor runs at the very place that dropped it, and says so at level DEBUG.
    """

    received = False  # by the wrapper

    def __del__(self) -> None:
        if not self.received and logger.isEnabledFor(logging.DEBUG):
            stack = traceback.extract_stack()[:-1]
            if stack:
                where = f"{stack[-1].filename}:{stack[-1].lineno} in {stack[-1].name}"
                logger.debug("RankShouldRestart was suppressed at %s\n%s", where, "".join(traceback.format_list(stack)))


def _raise_in(thread_id: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(RankShouldRestart))


def _take_what_is_pending() -> None:
    """An asynchronous exception that has been sent is raised at the next jump or call, so here at the latest.

    Taking it back instead (PyThreadState_SetAsyncExc with NULL) would leave the interpreter of Python < 3.13 looking
    for it for ever: every call and jump of the user's program would be slower from then on.
    """
    for _ in range(100):
        pass


class Stopper:
    """Ends what the main thread runs under `armed`, in one iteration.

    The exception is only ever sent while armed, under a lock that disarming takes too, and disarming waits for it if
    it has not been delivered yet. It is sent again, at the earliest after a second, if it was swallowed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid, self._thread_id = os.getpid(), threading.get_ident()
        self._armed = self._sent = False
        self._depth = 0  # of atomic blocks
        self._free = threading.Event()
        self._disarmed = threading.Event()
        self.stopping = False  # abort has begun, or is about to

    # --- main thread --------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """From here on the main thread can be stopped; raises RankShouldRestart if it is to stop already."""
        with self._lock:
            if self.stopping:
                raise RankShouldRestart
            self._disarmed.clear()
            self._armed = True

    def disarm(self) -> None:
        """From here on it cannot; the exception may come until this returns, so call it again if it does."""
        with self._lock:
            self._armed = False
        if self._sent:
            _take_what_is_pending()
        self._disarmed.set()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """A block that is not stopped in the middle, and not entered any more once stopping has begun."""
        with self._lock:
            if self.stopping:
                raise RankShouldRestart
            self._depth += 1
            self._free.clear()
        try:
            yield
        finally:
            if os.getpid() == self._pid:  # else forked in the block: the lock may have been held at that moment
                self._leave_block()

    def _leave_block(self) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._free.set()

    # --- monitor thread -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until no atomic block is open; none is entered from here on."""
        while True:
            with self._lock:
                if not self._depth:
                    self.stopping = True
                    return
            self._free.wait(_MIN_PERIOD_S)

    def stop(self, period_s: float, unwind_s: float = 0.0) -> None:
        """Raise in the main thread until it is disarmed; again every `period_s` seconds, should it be swallowed.

        Not before `unwind_s`: who is leaving the function already, since its collective raised, is in its clean-up.
        """
        if self._armed:
            self._disarmed.wait(unwind_s)
        period_s = max(period_s, _MIN_PERIOD_S)
        sent_s, pauses = 0.0, iter(_NUDGES_S)
        while True:
            with self._lock:
                if not self._armed:
                    return
                if not sent_s or time.monotonic() >= sent_s + period_s:
                    if sent_s:
                        self._tell_where()
                    self._sent = True
                    _raise_in(self._thread_id)
                    sent_s, pauses = time.monotonic(), iter(_NUDGES_S)
            if self._disarmed.wait(min(next(pauses, _NUDGES_S[-1]), period_s)):
                return
            self._nudge()

    def _nudge(self) -> None:
        """A blocking call of Python itself (sleep, lock, socket) ends with EINTR, and the exception is seen."""
        with self._lock:
            if self._armed and signal.getsignal(NUDGE_SIGNAL) is on_nudge:
                signal.pthread_kill(self._thread_id, NUDGE_SIGNAL)

    def _tell_where(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        stack = "".join(traceback.format_stack(frame)) if frame else "(the main thread has ended)"
        logger.debug("RankShouldRestart was suppressed, or cannot be delivered; the main thread is at\n%s", stack)


def on_nudge(signum: int, frame: FrameType | None) -> None:
    """Does nothing: that Python runs it in the main thread is what it is for."""


@contextlib.contextmanager
def nudges() -> Iterator[None]:
    """Have the signal handled, unless the user handles it; main thread only."""
    before: Any = signal.getsignal(NUDGE_SIGNAL)
    ours = before in (signal.SIG_DFL, signal.SIG_IGN)
    if ours:
        signal.signal(NUDGE_SIGNAL, on_nudge)
    try:
        yield
    finally:
        if ours and signal.getsignal(NUDGE_SIGNAL) is on_nudge:
            signal.signal(NUDGE_SIGNAL, before)
