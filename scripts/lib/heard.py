"""A program whose output is read as it comes."""

from __future__ import annotations

import subprocess
import threading
import time

_END_S = 20.0  # for a program that is told to end


class Heard:
    """One program with its lines. As a context manager it leaves nothing running."""

    def __init__(self, command, **how):
        self._process = subprocess.Popen(
            command, text=True, errors="replace", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, **how,
        )  # fmt: skip
        self.pid = self._process.pid
        self.lines: list[str] = []
        self._ended = False
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __exit__(self, *_):
        self._process.terminate()
        self.wait(_END_S)
        self._process.kill()
        self._process.wait()
        self._reader.join(_END_S)

    def _read(self):
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def find(self, look, until_s):
        """Return what `look` finds in the lines; None if the output ends or the time is over before that."""
        with self._news:
            while (found := look()) is None and not self._ended and time.monotonic() < until_s:
                self._news.wait(0.5)
            return found

    def wait(self, timeout_s):
        """Return the exit code; None: it does not end in time."""
        try:
            return self._process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return None
