"""The console: the launcher's own lines with the time, and the workers' lines with their rank, written by one thread.

Workers write straight to their log files, so no output is lost when an agent dies. The thread follows these files. It
may block on a slow terminal, pipe or file system without delaying the agent.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.core.bounded_json import parsed
from nvrx_slurm.core.logs.lines import Lines
from nvrx_slurm.core.logs.printable import printable
from nvrx_slurm.core.progress import DAMAGE, now_doing
from nvrx_slurm.logs.rank_file import RankFile
from nvrx_slurm.system import bounded
from nvrx_slurm.system.foreign import last_bytes
from nvrx_slurm.system.inotify import Inotify
from nvrx_slurm.system.owned import append_to

_CHUNK = 1 << 14  # bytes read at once: a sentence waits for the writing of one such piece at most
_QUEUED_SENTENCES = 10_000
_SENTENCES = 1000  # most sentences that `once` remembers
_PROMPT_S = 0.1  # print() without a buffer writes a line in pieces
_FALLBACK_S = 0.5  # between two readings of the files where inotify is not available
_DRAW_S = 1.0  # between two looks at the job's status, for the last line of a terminal
_MAX_STATUS = 1 << 20  # bytes
_HEAD = re.compile(rb"^\d\d:\d\d:\d\d \+[\d.]+s [\w-]+(?:\[[^]\n]*\])?:", re.MULTILINE)
_RANK = re.compile(rb"^\[rank (\d+)\]", re.MULTILINE)


@dataclass(slots=True)
class _Followed:
    file: RankFile
    path: Path
    prefix: bytes
    out: int  # file descriptor to copy to
    pending: bool = True  # there may be something to copy
    retired: bool = False  # a later cycle has a file of this name: drop this one when it is read to its end


class Console:
    """End it with `finish()`. All methods may be called from the agent's loop; only `finish` waits.

    The thread begins with what is said or followed first. Where no thread can be made, sentences wait for the next try.

    Each of the launcher's lines has a head: local time, seconds since the job began, `name`.
    `began_s`: when that was (Unix seconds); 0 = now.
    `refresh_s`: also read the files this often, because inotify does not report writes of other hosts.
    `copy`: a file for the launcher's own lines, too. `prompts`: show a line whose newline does not come.
    """

    def __init__(
        self,
        name: str,
        refresh_s: float | None = None,
        copy: Path | None = None,
        prompts: bool = False,
        began_s: float = 0.0,
    ) -> None:
        self._name = name
        self._prompts = prompts
        self._prompt_at = math.inf  # when a line whose newline has not come is a prompt
        self._copy_path = copy
        self._copy_fd = -1
        before_s = max(0.0, time.time() - began_s) if began_s else 0.0
        self._started_s = time.monotonic() - before_s
        self._refresh_s = refresh_s
        self._next_refresh_s = 0.0
        self._said: deque[tuple[bytes, bool]] = deque(maxlen=_QUEUED_SENTENCES)
        self._followed: list[_Followed] = []  # older files first
        self._new: deque[tuple[Path, str, int, int]] = deque()
        self._changes: Inotify | None = None
        self._poll = select.poll()
        self._wake_r, self._wake_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._status: Path | None = None
        self._drawn = ""
        self._next_draw_s = 0.0
        self._is_terminal = os.isatty(1) and os.isatty(2) and os.environ.get("TERM") != "dumb"
        self._has_colours = {fd for fd in (1, 2) if os.isatty(fd) and not os.environ.get("NO_COLOR")}
        self._finishing = False
        self._cut_off_s = 0.0  # when `finish` gives up on the backlog
        self._thread: threading.Thread | None = None

    def say(self, text: str, to_copy: bool = False) -> None:
        """Print `text` on stderr, each line behind the head. A text that finds a full queue replaces the oldest.

        `to_copy`: only into the launchers' file, where there is one.
        """
        self._said.append((self._lines(text), to_copy))
        self._wake()

    def follow(self, path: Path, prefix: str, stream: int, start: int = 0) -> None:
        """Copy the lines of `path` from byte `start` on to stdout (1) or stderr (2), each behind `prefix`."""
        self._new.append((path, prefix, stream, start))
        self._wake()

    def draw(self, status: Path) -> None:
        """Tell in the last line of a terminal, from now on, what the job does, by this status.json."""
        self._status = status if self._is_terminal and not self._prompts else None
        self._wake()

    def finish(self, timeout_s: float) -> None:
        """Print the queued sentences, then copy for at most `timeout_s` (> 0); the log files have the rest."""
        self._cut_off_s = time.monotonic() + 0.75 * timeout_s  # leaves time to say how much was cut off
        self._finishing = True
        self._wake()
        if self._thread is None:
            self._run()
        else:
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the thread has enough wake-ups waiting
            os.write(self._wake_w, b"x")
        if self._thread is None:
            self._thread = bounded.begin(self._run, "console")

    def _lines(self, text: str) -> bytes:
        head = f"{time.strftime('%H:%M:%S')} +{time.monotonic() - self._started_s:.1f}s {self._name}: "
        return "".join(f"{head}{line}\n" for line in text.splitlines()).encode("utf-8", "replace")

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._poll.register(self._wake_r, select.POLLIN)
        if self._copy_path is not None:
            with contextlib.suppress(OSError):
                self._copy_fd = append_to(self._copy_path, 4)
        while True:
            ready = self._wait()
            finishing = self._finishing  # read before the files are read for the last time
            self._speak()
            self._follow_new()
            is_prompt = time.monotonic() >= self._prompt_at
            if is_prompt:
                self._prompt_at = math.inf
            self._mark(ready, everything=finishing or is_prompt)
            self._round(flush=finishing or is_prompt)
            if not finishing:
                self._draw()
                continue
            while any(one.pending for one in self._followed) and time.monotonic() < self._cut_off_s:
                self._round(flush=True)
            self._speak()
            self._say_what_is_missing()
            self._redraw("")
            return

    def _wait(self) -> set[int]:
        """Wait until there is something to do; returns the file descriptors that are ready."""
        timeout_ms = None
        if any(one.pending for one in self._followed):
            timeout_ms = 0.0
        else:
            refresh_s = self._next_refresh_s if self._refresh_s is not None else math.inf
            draw_s = self._next_draw_s if self._status is not None else math.inf
            due_s = min(refresh_s, draw_s, self._prompt_at)
            if due_s < math.inf:
                timeout_ms = max(0.0, due_s - time.monotonic()) * 1000
        ready = {fd for fd, _ in self._poll.poll(timeout_ms)}
        if self._wake_r in ready:
            os.read(self._wake_r, 4096)
        return ready

    def _speak(self) -> None:
        while self._said:
            lines, to_copy = self._said.popleft()
            if not to_copy:
                self._print(2, lines)
            if self._copy_fd >= 0:
                _write(self._copy_fd, lines)

    def _print(self, fd: int, lines: bytes) -> None:
        """Write lines above the one that is drawn."""
        self._redraw("")
        if fd in self._has_colours:
            lines = _HEAD.sub(b"\x1b[1m\\g<0>\x1b[0m", lines)
            lines = _RANK.sub(lambda rank: b"\x1b[3%dm%b\x1b[0m" % (2 + int(rank[1]) % 5, rank[0]), lines)
        _write(fd, lines)

    def _draw(self) -> None:
        """Tell what the job does, once in a second."""
        if self._status is None or time.monotonic() < self._next_draw_s:
            return
        self._next_draw_s = time.monotonic() + _DRAW_S
        try:
            self._redraw(now_doing(parsed(last_bytes(self._status, _MAX_STATUS)), time.time()))
        except DAMAGE:
            self._redraw("")

    def _redraw(self, text: str) -> None:
        if text != self._drawn:
            width = shutil.get_terminal_size().columns
            _write(2, b"\r\x1b[K" + printable(text)[: width - 1].encode())
            self._drawn = text

    def _mark(self, ready: set[int], everything: bool) -> None:
        """Note which files may have grown."""
        is_due = self._refresh_s is not None and time.monotonic() >= self._next_refresh_s
        if self._refresh_s is not None and is_due:
            self._next_refresh_s = time.monotonic() + self._refresh_s
            everything = True
        has_changed = self._changes is not None and self._changes.fd in ready
        if self._prompts and (is_due or has_changed):
            self._prompt_at = time.monotonic() + _PROMPT_S
        if self._changes is not None and has_changed:
            names = self._changes.wait()
            lost = "" in names  # IN_Q_OVERFLOW has no name: anything may have changed
            for one in self._followed:
                one.pending = one.pending or lost or one.path.name in names
        if everything:
            for one in self._followed:
                one.pending = True

    def _round(self, flush: bool) -> None:
        """Copy one piece of each file, queued sentences before it; a rank's older file goes before its newer one."""
        unfinished: set[str] = set()
        for one in list(self._followed):
            if not one.pending or one.path.name in unfinished:
                continue
            self._speak()
            self._copy(one, flush or one.retired)
            if one.retired and one.pending:
                unfinished.add(one.path.name)
            elif one.retired:
                one.file.close()
                self._followed.remove(one)

    def _follow_new(self) -> None:
        while self._new:
            path, prefix, stream, start = self._new.popleft()
            file = RankFile(path, Lines(as_written=True), start, _CHUNK)
            try:
                file.open()
            except OSError as error:
                self._print(2, self._lines(f"cannot follow {path}: {error.strerror}"))
                continue
            self._watch(path.parent)
            for older in self._followed:
                if older.path.name == path.name or older.path.parent != path.parent:
                    older.retired = older.pending = True  # the file of an earlier cycle: only its rest is copied
            self._followed.append(_Followed(file, path, prefix.encode(), stream))

    def _watch(self, directory: Path) -> None:
        """Directories of earlier cycles stay watched: nothing changes there any more."""
        try:
            if self._changes is None:
                self._changes = Inotify()
                self._poll.register(self._changes.fd, select.POLLIN)
            self._changes.watch(str(directory))
        except OSError as error:
            if self._refresh_s is None:
                self._refresh_s = _FALLBACK_S
                why = f"no inotify here ({error.strerror})"
                self._print(2, self._lines(f"{why}: the log files are read every {_FALLBACK_S:g} s"))

    def _copy(self, followed: _Followed, flush: bool) -> None:
        """Copy one piece; at the end of the file, with `flush`, also a last line without its newline."""
        text = b""
        with contextlib.suppress(OSError):  # the file system fails; the file is read again when it changes
            text, _ = followed.file.read(flush)
        followed.pending = bool(text)
        lines = text.split(b"\n")[:-1]
        if followed.out == 2:
            # torch's "[rank0]: " is our "[rank 0] "
            twice = followed.prefix.replace(b" ", b"", 1).replace(b"] ", b"]: ")
            lines = [line.removeprefix(twice) for line in lines]
        if lines:
            self._print(followed.out, b"".join(followed.prefix + line + b"\n" for line in lines))

    def _say_what_is_missing(self) -> None:
        for one in self._followed:
            try:
                missing = one.file.unread
            except OSError:
                continue  # its length cannot be known
            if missing > 0:
                self._print(2, self._lines(f"... {missing} bytes more in {one.path}"))


def once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Says each sentence once. It remembers, and says, a bounded number of them."""
    said = set[str]()

    def say_once(sentence: str) -> None:
        if sentence not in said and len(said) < _SENTENCES:
            said.add(sentence)
            say(sentence)

    return say_once


def _write(fd: int, data: bytes) -> None:
    """Write all of it; a console that is gone (EPIPE, EIO) loses lines that the log files have."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            select.select([], [fd], [], 1.0)
        except OSError:
            return
