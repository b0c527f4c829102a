"""The checkpoint iteration file (--ft-checkpoint-iteration-file): how far the job has got, as the training says it."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable

READ_TIMEOUT_S = 5.0
_MAX_BYTES = 4096
_MAX_ITERATION = 10**15  # above it, it is no iteration


class _Unreadable(Exception):
    """Why there is no iteration: a sentence without the file's name. Each kind of reason has one `kind`."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class ProgressFile:
    """Reads the file without ever holding up the job: `path` may be on a file system that hangs.

    All methods belong to the thread of the running event loop. `say` gets a sentence when the file cannot be used, once
    per kind of reason.
    """

    def __init__(self, path: str, say: Callable[[str], None]) -> None:
        self._path = path
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._said: set[str] = set()
        self._reading = False  # by a thread, perhaps one that is stuck: there is never a second one

    def read(self, done: Callable[[int | None], None]) -> None:
        """Call `done(iteration)` once on the loop, READ_TIMEOUT_S from now at the latest; None = there is none to have.

        The file must be a regular one (or a link to one) with one decimal integer of 0 or more, white space around it.
        """
        answer: asyncio.Future[int | None] = self._loop.create_future()
        answer.add_done_callback(lambda answered: done(answered.result()))
        if self._reading:
            self._give(answer, _Unreadable("stuck", "its file system still has not answered an earlier read"))
            return
        # A thread that may be left behind, stuck in its file system: an executor's would hold up our exit.
        reader = threading.Thread(target=self._run, args=(answer,), name="progress file", daemon=True)
        try:
            reader.start()
        except RuntimeError as error:
            self._give(answer, _Unreadable("thread", str(error)))
            return
        self._reading = True
        too_late = _Unreadable("slow", f"its file system does not answer within {READ_TIMEOUT_S:g} s")
        timer = self._loop.call_later(READ_TIMEOUT_S, self._give, answer, too_late)
        answer.add_done_callback(lambda _: timer.cancel())

    def _take(self, answer: asyncio.Future[int | None], found: int | _Unreadable) -> None:
        self._reading = False
        self._give(answer, found)

    def _give(self, answer: asyncio.Future[int | None], found: int | _Unreadable) -> None:
        if answer.done():
            return  # too late
        if isinstance(found, _Unreadable) and found.kind not in self._said:
            self._said.add(found.kind)
            self._say(f"progress is not counted: the checkpoint iteration file {self._path} cannot be used: {found}")
        answer.set_result(found if isinstance(found, int) else None)

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self, answer: asyncio.Future[int | None]) -> None:
        found: int | _Unreadable
        try:
            found = _parse(_read(self._path))
        except _Unreadable as error:
            found = error
        except (OSError, ValueError) as error:  # ValueError: a name with a 0 in it
            found = _Unreadable(type(error).__name__, getattr(error, "strerror", None) or str(error))
        try:
            self._loop.call_soon_threadsafe(self._take, answer, found)
        except RuntimeError:
            return  # the loop is closed: nobody waits for it any more


def _read(path: str) -> bytes:
    """At most _MAX_BYTES + 1 of a regular file. Opening never waits for a writer (FIFO) nor takes a terminal."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise _Unreadable("no file", f"it is a {'directory' if stat.S_ISDIR(mode) else 'pipe or device'}")
        return os.read(fd, _MAX_BYTES + 1)
    finally:
        os.close(fd)


def _parse(content: bytes) -> int:
    if len(content) > _MAX_BYTES:
        raise _Unreadable("long", f"it is longer than {_MAX_BYTES} bytes")
    text = content.strip()
    if not text:
        raise _Unreadable("empty", "it is empty")
    if not text.isdigit():  # of bytes: ASCII digits only
        raise _Unreadable("junk", f"it must hold one integer of 0 or more, not {_excerpt(text)}")
    if len(text.lstrip(b"0")) > len(str(_MAX_ITERATION)) or int(text) > _MAX_ITERATION:
        raise _Unreadable("huge", f"{_excerpt(text)} is no iteration")
    return int(text)


def _excerpt(text: bytes) -> str:
    return repr(text[:40].decode("ascii", "backslashreplace"))
