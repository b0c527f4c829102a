"""What people see: our sentences and the workers' lines, prefixed by rank, written by a thread of its own.

Workers write straight to their log files, so nothing they say is lost when an agent dies; this thread follows the
files. It may block on a slow terminal or pipe for as long as it likes without holding up the agent.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nvrx_slurm.system.inotify import Inotify

_CHUNK = 1 << 16
_QUEUED_SENTENCES = 10_000


@dataclass(slots=True)
class _Followed:
    file: IO[bytes]
    prefix: bytes
    out: int  # our file descriptor to copy to
    partial: bytes = b""


class Console:
    """Start with `start()`, end with `finish()`. All methods may be called from the agent's loop; none blocks."""

    def __init__(self, name: str, refresh_s: float | None = None) -> None:
        """`refresh_s`: also look at the files this often, as inotify does not see what other hosts write."""
        self._head = f"{name}: ".encode()
        self._refresh_ms = None if refresh_s is None else refresh_s * 1000
        self._said: deque[bytes] = deque(maxlen=_QUEUED_SENTENCES)
        self._followed: dict[str, _Followed] = {}
        self._new: deque[tuple[Path, str, int]] = deque()
        self._inotify: Inotify | None = None
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._finishing = False
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def say(self, text: str) -> None:
        """Print one of our own sentences (on stderr)."""
        self._said.extend(self._head + line.encode("utf-8", "replace") + b"\n" for line in text.splitlines())
        self._wake()

    def follow(self, path: Path, prefix: str, stream: int) -> None:
        """Copy what is appended to `path` from now on to stdout (1) or stderr (2), line by line behind `prefix`."""
        self._new.append((path, prefix, stream))
        self._wake()

    def finish(self, timeout_s: float) -> None:
        """Copy what is there, then stop; a console that does not take it within `timeout_s` is left behind."""
        self._finishing = True
        self._wake()
        self._thread.join(timeout_s)

    def _wake(self) -> None:
        try:
            os.write(self._wake_w, b"x")
        except BlockingIOError:
            return  # the thread has enough wake-ups waiting

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poll.poll(self._refresh_ms)]
            if self._wake_r in ready:
                os.read(self._wake_r, 4096)
            finishing = self._finishing  # read before the last round of copying
            self._follow_new(poll)
            names = set(self._followed) if finishing or not ready else self._changed(ready)
            while self._said:
                _write(2, self._said.popleft())
            for name in names & set(self._followed):
                self._copy(self._followed[name], flush=finishing)
            if finishing:
                return

    def _changed(self, ready: list[int]) -> set[str]:
        if self._inotify is None or self._inotify.fd not in ready:
            return set()
        return self._inotify.wait()

    def _follow_new(self, poll: select.poll) -> None:
        while self._new:
            path, prefix, stream = self._new.popleft()
            if self._inotify is None:
                self._inotify = Inotify()
                poll.register(self._inotify.fd, select.POLLIN)
            try:
                file = path.open("rb", buffering=0)
                file.seek(0, os.SEEK_END)
            except OSError as error:
                _write(2, self._head + f"cannot follow {path}: {error.strerror}\n".encode())
                continue
            self._inotify.watch(str(path.parent))
            self._retire(path.name)
            self._followed[path.name] = followed = _Followed(file, prefix.encode(), stream)
            self._copy(followed, flush=False)

    def _retire(self, name: str) -> None:
        """The same rank's file of an earlier cycle: copy its rest and close it."""
        older = self._followed.pop(name, None)
        if older is not None:
            self._copy(older, flush=True)
            older.file.close()

    def _copy(self, followed: _Followed, flush: bool) -> None:
        while True:
            try:
                chunk = followed.file.read(_CHUNK)
            except OSError:
                return
            lines = (followed.partial + chunk).split(b"\n")
            followed.partial = lines.pop()
            if len(followed.partial) >= _CHUNK or (flush and not chunk and followed.partial):
                lines.append(followed.partial)
                followed.partial = b""
            if lines:
                _write(followed.out, b"".join(followed.prefix + line + b"\n" for line in lines))
            if not chunk:
                return


def _write(fd: int, data: bytes) -> None:
    """Write all of it; a console that is gone (EPIPE, EIO) loses lines that are in the log files anyway."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)
        except OSError:
            return
