"""Stopping the wrapped function from another thread, and never any other code.

The monitor thread wants the stop (`Stopper.stop`). The main thread raises RankShouldRestart itself, in a signal handler
(`on_stop_signal`). It does so only while it holds the lock of `Stopper.run`, and only where `Deferral` allows it. A
stop in the middle of taking a lock, of `__exit__` or of a fork would leave something half done for good.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import multiprocessing.popen_fork
import multiprocessing.process
import multiprocessing.util
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, ClassVar

from nvrx_slurm.inprocess.exception import RestartAbort

logger = logging.getLogger(__name__)

_PAUSES_S = (0.02, 0.002, 0.02, 0.2, 1.0)  # between signals; the last one repeats
_SOON_S = 0.001  # between two questions
# Both call `on_stop_signal` in the main thread, and in no other. The first is sent: it ends blocking calls, and is
# harmless without a handler. The second is never sent: `interrupt_main` simulates it at the main thread's next step in
# Python. An asynchronous exception (PyThreadState_SetAsyncExc) is no alternative: a thread that is just being started
# has the id of the thread that starts it, and would be killed instead; and the exception can be raised too late. A
# pending call (Py_AddPendingCall) is none either: a call that is added during another one runs at the same step (up to
# 3.12), is lost (3.13), or, under a tracer, hangs the interpreter (3.11).
_INTERRUPT, _STEP = signal.SIGURG, signal.SIGRTMAX
_MIN_PERIOD_S = 1.0
_LONGEST_S = 1.0  # longest time for which a stop is deferred
_MODULES = (
    threading,
    logging,
    weakref,
    sys.modules["_weakrefset"],
    subprocess,
    multiprocessing.popen_fork,
    multiprocessing.util,  # for its Finalize, which is a destructor, too
)
_LIBRARY = frozenset(module.__file__ for module in _MODULES)
# Functions of the library that block; an exception while they block does no harm.
_WAITS = frozenset(
    {"wait", "join", "_wait_for_tstate_lock", "poll", "_try_wait", "communicate", "_communicate"}
)
_NAMES = ("__del__", "__enter__", "__exit__")
_STARTS = frozenset(
    start.__code__
    for start in (multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__)
)


class Defer(enum.Enum):
    """How long a stop is deferred."""

    NOT = enum.auto()
    # of the interpreter: lock-heavy code may be at the same line at every question
    A_STEP = enum.auto()
    A_WHILE = enum.auto()


class Deferral:
    """Defers one stop, for `_LONGEST_S` at most, where a half-done step would remain so for good.

    - An exception between the acquisition of a lock and the `try` behind it leaves the lock held.
    - An exception between `waitpid` and the line that stores its result loses the exit code of the child.
    - An exception in a destructor is dropped. In `__enter__` or `__exit__` it leaves a lock held, or autocast on.
    - An exception between a fork and the line that stores its result leaves a child that no object refers to.

    The main thread calls it, and raises the exception when it is told NOT to defer:

        monitor thread:  wanted | question (interrupt_main) | signal (SIGURG) | signal | ...
        main thread:     steps in Python, or blocked in a call  |  asks here  |  asks here
        answer:          a lock is being taken: A_STEP ... in `__exit__`: A_WHILE ... elsewhere, or after 1 s: NOT

    Two signals in a row at the same frame and instruction mean that the thread is blocked in a library call; then the
    stop is not deferred.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None  # the first deferral
        self._place: tuple[FrameType, int] | None = None  # at the last signal
        self._step: tuple[FrameType, int] | None = None

    def check(self, frame: FrameType | None, by_signal: bool) -> Defer:
        """Whether to defer the stop in the middle of `frame`, which may be ours."""
        now_s = time.monotonic()
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s > _LONGEST_S:
            return Defer.NOT
        if (
            self._step is not None
            and not by_signal
            and self._step == (frame, frame and frame.f_lasti)
        ):
            return Defer.A_STEP  # asked again before the step was made
        users = list(_users(frame))
        if not users:
            return Defer.NOT
        blocked = by_signal and self._is_blocked(users[0])
        codes = [one.f_code for one in users]
        changes = any(code.co_name in _NAMES or code in _STARTS for code in codes)
        if codes[0].co_filename in _LIBRARY and (
            changes or not blocked or codes[0].co_name not in _WAITS
        ):
            self._step = frame and (frame, frame.f_lasti)
            return Defer.A_STEP
        return Defer.A_WHILE if changes else Defer.NOT

    def _is_blocked(self, frame: FrameType) -> bool:
        here = (frame, frame.f_lasti)
        before = self._place
        self._place = here
        return here == before


def _users(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of the function's calls, innermost first."""
    while frame is not None:
        if frame.f_globals.get("__name__") != __name__:
            yield frame
        elif frame.f_code.co_name == "run":
            return
        frame = frame.f_back


class RankShouldRestart(BaseException):
    """Raised inside the wrapped function, between any two of its steps, to stop it; the function must not catch it."""


class Stopper:
    """Stops the function that the main thread calls by `run`, in one iteration.

    The main thread holds a lock while the function runs. No exception of a signal can come between the function's end
    and the release, and the thread that stops it can wait for that. The main thread itself raises the exception, after
    a check of that lock, so it is raised nowhere else. If the function swallows the exception, it is raised again:
    at once when it was freed, else after a delay.
    """

    # the stopper of the wrapped function that the main thread may execute
    asking: ClassVar[Stopper | None] = None

    def __init__(self) -> None:
        self._pid, self._thread_id = os.getpid(), threading.get_ident()
        self._running = threading.RLock()
        self._block = threading.RLock()  # held in atomic blocks
        self._wanted = self._deferred = self._answering = self._told = False
        self._raised: Callable[[], RankShouldRestart | None] = lambda: None
        self._deferral = Deferral()
        self.stopping = False  # abort has begun, or is about to

    # --- main thread --------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[], Any]) -> Any:
        """Call the function and return its result; raises its exceptions, and RankShouldRestart, at any of its steps,
        if it is to stop."""
        with self._running:
            if self.stopping:
                raise self._made()
            return function()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """A block that is not stopped in the middle, and cannot be entered once stopping has begun."""
        with self._block:
            if self.stopping:
                raise self._made()
            yield

    @property
    def runs_here(self) -> bool:
        """Whether the caller is called by `run`; False in a child that was forked in there."""
        return os.getpid() == self._pid and bool(self._running._is_owned())  # type: ignore[attr-defined]

    def answer(self, frame: FrameType | None, by_signal: bool) -> Defer:
        """Stop here, in the middle of `frame`, if that is wanted."""
        if self._answering or not self.runs_here:
            return Defer.NOT  # two signals that come together are one question
        if not self._wanted:
            return Defer.NOT
        self._answering = True
        try:
            deferred = self._deferral.check(frame, by_signal)
        finally:
            self._answering = False
        if deferred is Defer.NOT:
            raise self._made()
        self._deferred = True
        return deferred

    def _made(self) -> RankShouldRestart:
        made = RankShouldRestart()
        self._raised = weakref.ref(made)
        self._wanted = False
        return made

    # --- monitor thread -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until no atomic block is open; none can be entered from here on."""
        with self._block:
            self.stopping = True

    def stop(
        self, period_s: float, unwind_s: float = 0.0, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Raise in the main thread until `run` has ended; again every `period_s` seconds if a reference is kept.

        Not before `unwind_s` seconds: a function whose collective raised may be in its clean-up. `meanwhile` is called
        with every signal, which a call that blocks in C does not see.
        """
        if self._ended(unwind_s):
            return
        period_s, pauses = max(period_s, _MIN_PERIOD_S), iter(_PAUSES_S)
        pause_s = next(pauses)
        wanted_s, self._deferral = time.monotonic(), Deferral()
        self._wanted = self._raised() is None  # else it is on its way already, by `atomic`
        while True:
            if not self._wanted and (
                self._raised() is None or time.monotonic() >= wanted_s + period_s
            ):
                if self._ended(0.0):  # the exception has done its work
                    break
                self._tell_where()
                wanted_s, self._wanted, self._deferral = time.monotonic(), True, Deferral()
            self._deferred = False
            if self._wanted:
                self._ask()
            if self._ended(_SOON_S) or self._ended_or_deferred(pause_s):
                break
            if not self._deferred:  # deferred code runs, and the next question reaches it
                self._interrupt()
                meanwhile()
                pause_s = next(pauses, _PAUSES_S[-1])
        self._deferral = Deferral()  # the last one keeps a frame

    def _ended_or_deferred(self, timeout_s: float) -> bool:
        """Whether it has ended, after so many seconds or as soon as the stop was deferred."""
        deadline_s = time.monotonic() + timeout_s
        while not self._deferred and (left_s := deadline_s - time.monotonic()) > 0:
            if self._ended(min(left_s, _SOON_S)):
                return True
        return False

    def _ended(self, timeout_s: float) -> bool:
        """Whether the main thread has left `run`, or has not entered it and cannot once `stopping` is set."""
        if not self._running.acquire(timeout=timeout_s):
            return False
        self._running.release()
        return True

    def _ask(self) -> None:
        """Let the main thread call `on_stop_signal` at its next step in Python."""
        Stopper.asking = self
        for signum in _ours(_STEP):
            interrupt_main(signum)

    def _interrupt(self) -> None:
        """A blocking call of Python itself (sleep, lock, socket) ends with EINTR, and the exception is raised there."""
        for signum in _ours(_INTERRUPT):
            signal.pthread_kill(self._thread_id, signum)

    def _tell_where(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is not None and not self._told:
            self._told = True
            logger.warning(
                "RankShouldRestart was suppressed (`except:`, `except BaseException`?) and is raised again; the main"
                " thread is at\n%s",
                "".join(traceback.format_stack(frame)),
            )


def on_stop_signal(signum: int, frame: FrameType | None) -> None:
    """The signal handler; Python calls it in the main thread."""
    stopper = Stopper.asking
    if stopper is not None and stopper.answer(frame, signum == _INTERRUPT) is Defer.A_STEP:
        # Have this called at the next step, which must not be one of this function itself. The interpreter looks for
        # signals after each call that stands in the code. The calls of `map`, during the unpacking, are none of these,
        # and it does not look at the return.
        [*_] = map(interrupt_main, _ours(_STEP))


def _ours(signum: signal.Signals) -> tuple[signal.Signals, ...]:
    """The signal, if it calls `on_stop_signal`: the user may have a handler of their own."""
    return (signum,) if signal.getsignal(signum) is on_stop_signal else ()


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Handle the signals, unless the user does; main thread only."""
    before: dict[signal.Signals, Any] = {
        signum: signal.getsignal(signum) for signum in (_INTERRUPT, _STEP)
    }
    for signum, handler in before.items():
        if handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signum, on_stop_signal)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if handler is not on_stop_signal and signal.getsignal(signum) is on_stop_signal:
                signal.signal(signum, handler)


def way_out(error: BaseException) -> BaseException | None:
    """The exit exception whose clean-up was running when the function was stopped, if any."""
    one: BaseException | None = error
    while one is not None and not isinstance(one, (SystemExit, KeyboardInterrupt, RestartAbort)):
        one = one.__context__
    return one
