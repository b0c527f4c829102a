"""A call that may never return, with a bound: drivers, collective libraries, functions of users, dead file systems."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

# A waiting caller executes Python this often, so that the in-process wrapper sees that its rank does not hang.
_SIGN_OF_LIFE_S = 0.05
_OVERRUN = "{} did not return within {:g} s"
_NO_THREAD = "{}: no thread can be made"


class Overrun(Exception):
    """The call did not return in time, or there is no thread for it. A daemon thread that does not return is abandoned:
    nothing can end a thread from outside."""


def begin(fn: Callable[[], object], name: str) -> threading.Thread | None:
    """Run `fn` in a daemon thread called `name`; None where no thread can be made (limits, memory)."""
    thread = threading.Thread(target=fn, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class _Outcome(Generic[T]):
    """What the thread's call returned or raised; `value` is a list so that None is a result, too."""

    def __init__(self) -> None:
        self.value: list[T] = []
        self.error: BaseException | None = None

    def run(self, fn: Callable[[], T]) -> None:
        """Call `fn` and keep the outcome."""
        try:
            self.value.append(fn())
        except BaseException as error:
            self.error = error

    def get(self, timeout_s: float, name: str) -> T:
        """Return or raise what the call did; raises Overrun if it has done neither yet."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # its traceback refers to this object: break the cycle
        if not self.value:
            raise Overrun(_OVERRUN.format(name, timeout_s))
        return self.value[0]


def call(fn: Callable[[], T], timeout_s: float, name: str) -> T:
    """Run `fn` in a daemon thread called `name` and return its value, or raise its exception.

    Raises Overrun, at the latest after `timeout_s` seconds.
    """
    outcome: _Outcome[T] = _Outcome()
    thread = begin(partial(outcome.run, fn), name)
    if thread is None:
        raise Overrun(_NO_THREAD.format(name))
    deadline_s = time.monotonic() + timeout_s
    while thread.is_alive() and (left_s := deadline_s - time.monotonic()) > 0:
        thread.join(min(left_s, _SIGN_OF_LIFE_S))
    return outcome.get(timeout_s, name)


async def wait_for(awaitable: Awaitable[T], timeout_s: float) -> T:
    """The result of `awaitable`. It is cancelled after `timeout_s` seconds, and asyncio.TimeoutError is raised.

    Like asyncio.wait_for(), which must not be used: up to Python 3.11 that returns a result where its caller has been
    cancelled in the same moment, and the caller goes on as if nothing had happened.
    """
    import asyncio  # see call_async

    inner = asyncio.ensure_future(awaitable)
    # a cancelled caller does not ask for it
    inner.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        in_time, _ = await asyncio.wait({inner}, timeout=timeout_s)
    finally:
        if inner.cancel():  # it has not ended yet
            await asyncio.wait({inner})
    if inner.cancelled() and not in_time:
        raise asyncio.TimeoutError
    return inner.result()


async def call_async(fn: Callable[[], T], timeout_s: float, name: str) -> T:
    """Run `fn` in a daemon thread called `name`; the running event loop goes on meanwhile.

    Returns or raises what `fn` does. Raises Overrun, at the latest after `timeout_s` seconds.
    Unlike a thread of an executor, an abandoned one delays neither the loop's end nor the interpreter's.
    """
    import asyncio  # not for health checks: it takes 25 ms, and a prolog has none of it

    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    outcome: _Outcome[T] = _Outcome()

    def run() -> None:
        outcome.run(fn)
        with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits any more
            loop.call_soon_threadsafe(ended.set)

    if begin(run, name) is None:
        raise Overrun(_NO_THREAD.format(name))
    with contextlib.suppress(asyncio.TimeoutError):
        await wait_for(ended.wait(), timeout_s)
    return outcome.get(timeout_s, name)


def report_defect(task: asyncio.Task[None]) -> None:
    """Of a task that is to end by cancellation only, tell any other end at once: no code awaits its result."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        name = getattr(task.get_coro(), "__qualname__", "a task")
        task.get_loop().call_exception_handler({"message": f"{name} broke", "exception": error})


async def call_or_none(fn: Callable[[], T], timeout_s: float, name: str) -> T | None:
    """Call as `call_async`; None where that raises OSError or Overrun."""
    try:
        return await call_async(fn, timeout_s, name)
    except (OSError, Overrun):
        return None


class OneAtATime:
    """Calls functions in threads, one at a time: a file system that hangs costs one thread."""

    def __init__(self) -> None:
        self._busy = threading.Lock()  # held by the thread

    async def call(self, fn: Callable[[], T], timeout_s: float, name: str) -> T:
        """Call as `call_async`. Raises Overrun at once while an earlier call has not returned."""
        if self._busy.locked():
            raise Overrun(_OVERRUN.format(name, timeout_s))

        def run() -> T:
            with self._busy:
                return fn()

        return await call_async(run, timeout_s, name)
