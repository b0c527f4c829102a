"""Stopping the wrapped function from another thread, without ever hitting anybody else's code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from nvrx_slurm.inprocess.exception import RestartAbort
from nvrx_slurm.inprocess.watch.sparing import PutOff, Sparing

logger = logging.getLogger(__name__)

_PAUSES_S = (0.02, 0.002, 0.02, 0.2, 1.0)  # between signals; the last one repeats
_SOON_S = 0.001  # between two looks
# Both call `on_nudge` in the main thread, and no other. The first is sent: it ends blocking calls, and is harmless
# where nobody handles it. The second never is: `interrupt_main` only has the interpreter behave as if it had come, at
# the main thread's next step in Python. An asynchronous exception would not do (PyThreadState_SetAsyncExc): a thread
# that is just being started has the id of the one that starts it, and would be killed instead; and it can be raised
# later than it is wanted. A pending call would not, either (Py_AddPendingCall): one that is added while another one is
# made is made at the same step (up to 3.12), forgotten (3.13), or, where a tracer is set, hangs the interpreter (3.11).
_NUDGE, _STEP = signal.SIGURG, signal.SIGRTMAX
_LOOK_S = 0.1
_ASIDE_S = 0.02
_MIN_PERIOD_S = 1.0


class _Asking:
    stopper: Stopper | None = None  # whose function the main thread may be in


_asking = _Asking()


class RankShouldRestart(BaseException):
    """Raised inside the wrapped function, between any two of its steps, to stop it; the function must let it pass."""


class _Traced(RankShouldRestart):
    """If it is dropped, its destructor runs at the very place that dropped it, and says so. Only at level DEBUG: what a
    signal's handler raises in a destructor is lost."""

    def __del__(self) -> None:
        frame = sys._getframe().f_back
        if frame is not None and _asking.stopper is not None and _asking.stopper.runs_here:
            stack = "".join(traceback.format_stack(frame))
            logger.debug("RankShouldRestart was suppressed at %s\n%s", _place(frame), stack)


def _place(frame: FrameType) -> str:
    code = frame.f_code  # what the compiler has put there, as the end of `except ... as error`, has no line
    line = frame.f_lineno or f"{code.co_firstlineno} or further down,"
    return f"{code.co_filename}:{line} in {code.co_name}"


class Stopper:
    """Ends what the main thread calls by `run`, in one iteration.

    Whether it runs is a lock that the main thread holds: no signal's exception can come between what ran and its
    release, and the thread that stops it can wait for that. The exception is raised by the main thread itself, after a
    look at that lock, so nowhere else. It is raised again when it was dropped, or, if somebody keeps it, after a while.
    """

    def __init__(self) -> None:
        self._pid, self._thread_id = os.getpid(), threading.get_ident()
        self._running = threading.RLock()
        self._block = threading.RLock()  # held in atomic blocks
        self._wanted = self._put_off = self._answering = self._stepping = self._told = False
        self._raised: Callable[[], RankShouldRestart | None] = lambda: None
        self._sparing = Sparing()
        self._aside, self._go_on = False, threading.Lock()
        self.stopping = False  # abort has begun, or is about to

    # --- main thread --------------------------------------------------------------------------------------------------

    def run(self, function: Callable[[], Any]) -> None:
        """Call it; raises what it raises, and RankShouldRestart, if it is to stop, at any of its steps."""
        with self._running:
            if self.stopping:
                raise self._made()
            function()

    @contextlib.contextmanager
    def atomic(self) -> Iterator[None]:
        """A block that is not stopped in the middle, and not entered any more once stopping has begun."""
        with self._block:
            if self.stopping:
                raise self._made()
            yield

    @property
    def runs_here(self) -> bool:
        """Whether the caller is called by `run`; False in a child that was forked in there."""
        return os.getpid() == self._pid and bool(self._running._is_owned())  # type: ignore[attr-defined]

    def answer(self, frame: FrameType | None, by_signal: bool) -> PutOff:
        """Stop here, in the middle of `frame`, if that is wanted."""
        if self._answering or not self.runs_here:
            return PutOff.NOT  # two signals that come together are one look
        if self._aside:
            self._aside = False
            self._go_on.acquire(timeout=_ASIDE_S)
        if not self._wanted:
            return PutOff.NOT
        self._answering = True
        try:
            off = self._sparing.look(frame, by_signal)
        finally:
            self._answering = False
        if off is PutOff.NOT:
            raise self._made()
        self._put_off = True
        return off

    def will_step(self) -> None:
        """Each step writes a byte to the signals' file descriptor, asyncio's perhaps; no complaints if it is full."""
        if not self._stepping:
            self._stepping = True
            with contextlib.suppress(OSError, ValueError):  # it has been closed
                signal.set_wakeup_fd(signal.set_wakeup_fd(-1), warn_on_full_buffer=False)

    def _made(self) -> RankShouldRestart:
        made = (_Traced if logger.isEnabledFor(logging.DEBUG) else RankShouldRestart)()
        self._raised = weakref.ref(made)
        self._wanted = False
        return made

    # --- monitor thread -----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until no atomic block is open; none is entered from here on. One that the function has left open, in a
        generator that somebody keeps, is none any more."""
        while not self._block.acquire(timeout=_LOOK_S):
            if self._ended(0.0):
                self.stopping = True
                return
        self.stopping = True
        self._block.release()
        # For a moment, or until `stop`, it shall step aside: a function that hands over the GIL every few microseconds,
        # and takes it at once again, lets nobody else have it for long, and `abort` needs it more than once.
        self._go_on = threading.Lock()
        self._go_on.acquire()
        self._aside = True
        self._ask()

    def stop(self, period_s: float, unwind_s: float = 0.0, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Raise in the main thread until `run` has ended; again every `period_s` seconds, should it be kept somewhere.

        Not before `unwind_s`: who is leaving the function already, since its collective raised, is in its clean-up.
        `meanwhile` is called with every signal, which a call that blocks in C does not see.
        """
        self._aside = False
        with contextlib.suppress(RuntimeError):  # it is not held: `begin` saw the end
            self._go_on.release()
        if self._ended(unwind_s):
            return
        period_s, pauses = max(period_s, _MIN_PERIOD_S), iter(_PAUSES_S)
        pause_s = next(pauses)
        wanted_s, self._sparing = time.monotonic(), Sparing()
        self._wanted = self._raised() is None  # else it is on its way already, by `atomic`
        while True:
            if not self._wanted and (self._raised() is None or time.monotonic() >= wanted_s + period_s):
                if self._ended(0.0):  # what is there no more has done its work
                    break
                self._tell_where()
                wanted_s, self._wanted, self._sparing = time.monotonic(), True, Sparing()
            self._put_off = False
            if self._wanted:
                self._ask()
            if self._ended(_SOON_S) or self._ended_or_put_off(pause_s):
                break
            if not self._put_off:  # it runs: to ask will do
                self._nudge()
                meanwhile()
                pause_s = next(pauses, _PAUSES_S[-1])
        self._sparing = Sparing()  # the last one keeps a frame

    def _ended_or_put_off(self, timeout_s: float) -> bool:
        """Whether it has ended, after so many seconds or as soon as it was put off."""
        deadline_s = time.monotonic() + timeout_s
        while not self._put_off and (left_s := deadline_s - time.monotonic()) > 0:
            if self._ended(min(left_s, _SOON_S)):
                return True
        return False

    def _ended(self, timeout_s: float) -> bool:
        """Whether the main thread has left `run`, or is not there yet, and will not be once `stopping` is set."""
        if not self._running.acquire(timeout=timeout_s):
            return False
        self._running.release()
        return True

    def _ask(self) -> None:
        """Have the main thread look, at its next step in Python, whether it shall stop."""
        _asking.stopper = self
        for signum in _ours(_STEP):
            interrupt_main(signum)

    def _nudge(self) -> None:
        """A blocking call of Python itself (sleep, lock, socket) ends with EINTR, and the exception is raised there."""
        for signum in _ours(_NUDGE):
            signal.pthread_kill(self._thread_id, signum)

    def _tell_where(self) -> None:
        frame = sys._current_frames().get(self._thread_id)
        if frame is None:
            return
        if not self._told:
            self._told = True
            logger.warning(
                "RankShouldRestart was suppressed (`except:`, `except BaseException`?) and is raised again; the main"
                " thread is at %s, NVRX_LOG_LEVEL=DEBUG says more",
                _place(frame),
            )
        logger.debug("the main thread is at\n%s", "".join(traceback.format_stack(frame)))


def on_nudge(signum: int, frame: FrameType | None) -> None:
    """Python calls it in the main thread."""
    stopper = _asking.stopper
    if stopper is not None and stopper.answer(frame, signum == _NUDGE) is PutOff.A_STEP:
        stopper.will_step()
        # Have this called at the next step, which must not be one of this function itself. The interpreter looks for
        # signals after each call that stands in the code; `map`'s calls, which come with the unpacking, are none of
        # these, and at the return it does not look.
        [*_] = map(interrupt_main, _ours(_STEP))


def _ours(signum: signal.Signals) -> tuple[signal.Signals, ...]:
    """It, if it calls `on_nudge`: the user may handle it."""
    return (signum,) if signal.getsignal(signum) is on_nudge else ()


@contextlib.contextmanager
def nudges() -> Iterator[None]:
    """Have the signals handled, unless the user handles them; main thread only."""
    before: dict[signal.Signals, Any] = {signum: signal.getsignal(signum) for signum in (_NUDGE, _STEP)}
    for signum, handler in before.items():
        if handler in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signum, on_nudge)
    try:
        yield
    finally:
        for signum, handler in before.items():
            if handler is not on_nudge and signal.getsignal(signum) is on_nudge:
                signal.signal(signum, handler)


def was_stopped(error: BaseException) -> bool:
    """Whether what came out of the function is RankShouldRestart, or a group with one in it (asyncio.TaskGroup)."""
    leaves = getattr(error, "exceptions", ())
    return isinstance(error, RankShouldRestart) or (isinstance(leaves, tuple) and any(map(was_stopped, leaves)))


def way_out(error: BaseException) -> BaseException | None:
    """What the function was leaving its rank with when it was stopped: that exception's clean-up was running."""
    seen: list[BaseException] = []
    todo: list[Any] = [error]
    while todo:
        one = todo.pop()
        if isinstance(one, (SystemExit, KeyboardInterrupt, RestartAbort)):
            return one
        if isinstance(one, BaseException) and not any(one is other for other in seen):
            seen.append(one)
            todo += [one.__context__, *(leaves if isinstance(leaves := getattr(one, "exceptions", ()), tuple) else ())]
    return None
