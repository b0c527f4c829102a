"""Scripts that run in processes which have imported torch already; to a test they are like `subprocess.Popen`."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import time
from pathlib import Path

from ranks_harness import WAIT_S, Zygote


class Script:
    """One process. Its stdout is a pipe, its stderr a file."""

    def __init__(self, zygote: Zygote, argv: list[str], env: dict[str, str], err: Path) -> None:
        self._zygote, self._err = zygote, err
        request = {
            "module": "scenarios_lost",
            "scenario": "script",
            "arguments": {"argv": argv, "cwd": str(err.parent)},
            "env": env,
        }
        read, write = os.pipe()
        self.stdout = os.fdopen(read)
        with err.open("ab") as file:
            self.pid = zygote.start(request, write, file.fileno())
        os.close(write)

    @property
    def returncode(self) -> int | None:
        return self._zygote.codes.get(self.pid)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # its end is on its way to us
                os.kill(self.pid, signum)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of stdout, and all of stderr, when it has ended. Raises AssertionError if that takes longer."""
        deadline_s = time.monotonic() + timeout
        left = io.BytesIO()
        while select.select([self.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            if not (data := os.read(self.stdout.fileno(), 1 << 16)):
                break
            left.write(data)
        self._zygote.await_end(self.pid, max(0.0, deadline_s - time.monotonic()))
        return left.getvalue().decode(), self._err.read_text()

    def close(self) -> None:
        """Nothing is left of it."""
        self.send_signal(signal.SIGKILL)
        self._zygote.await_end(self.pid, WAIT_S)
        self.stdout.close()
