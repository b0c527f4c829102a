"""What people see: our sentences and the workers' lines, prefixed by rank, written by a thread of its own.

Workers write straight to their log files, so nothing they say is lost when an agent dies; this thread follows the
files. It may block on a slow terminal or pipe for as long as it likes without holding up the agent.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nvrx_slurm.system.inotify import Inotify

_CHUNK = 1 << 14  # read at once: a sentence waits for the writing of one such piece at most
_LONGEST_LINE = 1 << 16  # a longer one is broken
_QUEUED_SENTENCES = 10_000
_FALLBACK_S = 0.5  # between looks at the files where the kernel does not tell


@dataclass(slots=True)
class _Followed:
    file: IO[bytes]
    path: Path
    prefix: bytes
    out: int  # our file descriptor to copy to
    partial: bytes = b""
    pending: bool = True  # there may be something to copy
    retired: bool = False  # a later file of the same name is followed: this one ends where it is read to its end


class Console:
    """Start with `start()`, end with `finish()`. All methods may be called from the agent's loop; none blocks."""

    def __init__(self, name: str, refresh_s: float | None = None) -> None:
        """`refresh_s`: also look at the files this often, as inotify does not see what other hosts write."""
        self._head = f"{name}: ".encode()
        self._refresh_s = refresh_s
        self._next_look_s = 0.0
        self._said: deque[bytes] = deque(maxlen=_QUEUED_SENTENCES)
        self._followed: list[_Followed] = []  # older files first
        self._new: deque[tuple[Path, str, int, int]] = deque()
        self._changes: dict[Path, Inotify] = {}  # by directory; closed when nothing in it is followed any more
        self._poll = select.poll()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._finishing = False
        self._cut_off_s = 0.0  # when `finish` gives up on the backlog
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
        try:
            start = path.stat().st_size
        except OSError:
            start = 0  # the thread says why when it cannot open it either
        self._new.append((path, prefix, stream, start))
        self._wake()

    def finish(self, timeout_s: float) -> None:
        """Print our sentences, then copy what is there within `timeout_s`; the rest is in the log files anyway."""
        self._cut_off_s = time.monotonic() + 0.75 * timeout_s  # leaves time to say how much was cut off
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
        self._poll.register(self._wake_r, select.POLLIN)
        try:
            self._copy_until_finished()
        except Exception as error:  # a defect, or no memory: what matters most still gets out
            self._said.append(self._head + f"the workers' lines are in their log files only: {error!r}\n".encode())
            self._speak_until_finished()

    def _copy_until_finished(self) -> None:
        while True:
            ready = self._wait()
            finishing = self._finishing  # read before the last look at the files
            self._speak()
            self._follow_new()
            self._mark(ready, everything=finishing)
            self._round(flush=finishing)
            if not finishing:
                continue
            while any(one.pending for one in self._followed) and time.monotonic() < self._cut_off_s:
                self._round(flush=True)
            self._speak()
            self._say_what_is_missing()
            return

    def _speak_until_finished(self) -> None:
        finishing = False
        while not finishing:
            finishing = self._finishing
            self._speak()
            if not finishing:
                select.select([self._wake_r], [], [])
                os.read(self._wake_r, 4096)

    def _wait(self) -> set[int]:
        """The file descriptors that are ready, once there is something to do."""
        if any(one.pending for one in self._followed):
            timeout_s: float | None = 0.0
        elif self._refresh_s is not None:
            timeout_s = max(0.0, self._next_look_s - time.monotonic())
        else:
            timeout_s = None
        ready = {fd for fd, _ in self._poll.poll(None if timeout_s is None else timeout_s * 1000 + 1)}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        return ready

    def _speak(self) -> None:
        while self._said:
            _write(2, self._said.popleft())

    def _mark(self, ready: set[int], everything: bool) -> None:
        """Note which files may have grown."""
        if self._refresh_s is not None and time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + self._refresh_s
            everything = True
        for directory, changes in self._changes.items():
            names = changes.wait() if changes.fd in ready else set()
            lost = "" in names  # IN_Q_OVERFLOW has no name: anything may have changed
            for one in self._followed:
                if one.path.parent == directory and (lost or one.path.name in names):
                    one.pending = True
        if everything:
            for one in self._followed:
                one.pending = True

    def _round(self, flush: bool) -> None:
        """One piece of every file that has one, our sentences before each; a rank's older file before its newer one."""
        unfinished: set[str] = set()
        for one in list(self._followed):
            if not one.pending or one.path.name in unfinished:
                continue
            self._speak()
            self._copy(one, flush or one.retired)
            if one.retired and one.pending:
                unfinished.add(one.path.name)
            elif one.retired:
                self._drop(one)

    def _follow_new(self) -> None:
        while self._new:
            path, prefix, stream, start = self._new.popleft()
            try:
                file = path.open("rb", buffering=0)
                file.seek(start)
            except OSError as error:
                _write(2, self._head + f"cannot follow {path}: {error.strerror}\n".encode())
                continue
            self._watch(path.parent)
            for older in self._followed:
                if older.path.name == path.name or older.path.parent != path.parent:
                    older.retired = older.pending = True  # of an earlier cycle: only its rest is wanted
            self._followed.append(_Followed(file, path, prefix.encode(), stream))

    def _watch(self, directory: Path) -> None:
        if directory in self._changes:
            return
        changes = None
        try:
            changes = Inotify()
            changes.watch(str(directory))
        except OSError as error:
            if changes is not None:
                changes.close()
            if self._refresh_s is None:
                self._refresh_s = _FALLBACK_S
                what = f"no inotify here ({error.strerror}), looking at the log files every {_FALLBACK_S:g} s\n"
                _write(2, self._head + what.encode())
            return
        self._changes[directory] = changes
        self._poll.register(changes.fd, select.POLLIN)

    def _drop(self, one: _Followed) -> None:
        one.file.close()
        self._followed.remove(one)
        directory = one.path.parent
        if directory in self._changes and all(other.path.parent != directory for other in self._followed):
            changes = self._changes.pop(directory)
            self._poll.unregister(changes.fd)
            changes.close()

    def _copy(self, followed: _Followed, flush: bool) -> None:
        """One piece; at the end of the file, with `flush`, also a last line without its newline."""
        try:
            chunk = followed.file.read(_CHUNK)
        except OSError:
            chunk = b""  # a file system in trouble; we look again when the file changes
        followed.pending = bool(chunk)
        lines = (followed.partial + chunk).split(b"\n")
        followed.partial = lines.pop()
        if len(followed.partial) >= _LONGEST_LINE or (flush and not chunk and followed.partial):
            lines.append(followed.partial)
            followed.partial = b""
        if lines:
            _write(followed.out, b"".join(followed.prefix + line + b"\n" for line in lines))

    def _say_what_is_missing(self) -> None:
        for one in self._followed:
            try:
                missing = os.fstat(one.file.fileno()).st_size - one.file.tell() + len(one.partial)
            except OSError:
                continue  # nothing can be said about it
            if missing > 0:
                _write(2, self._head + f"... {missing} bytes more in {one.path}\n".encode())


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
