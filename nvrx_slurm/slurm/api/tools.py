"""Runs Slurm's command line tools: each in a child process, bounded, in the C locale, without a shell.

A process asks Slurm one question at a time, and fewer while slurmctld is slow or away.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from nvrx_slurm.child import bounded_process
from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.facts import NoAnswer, NotInstalled, SlurmError
from nvrx_slurm.system import trust

TIMEOUT_S = 10.0  # of one tool; Slurm's own MessageTimeout is 10 s by default
# where root's hooks, which have no PATH, look
PLACES = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin")
_MAX_BYTES = 64 << 20  # of an answer: each node takes about a kilobyte
_ERROR_BYTES = 4096
_MIN_S = 0.05
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# They change the output of squeue and scontrol.
_FORMATS = ("SQUEUE_", "SLURM_TIME_FORMAT", "SLURM_JSON", "SLURM_YAML")


class Turn:
    """A lock with a back-off: after each NoAnswer in a row, calls fail at once for 1, 2, 4 ... 60 seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._until_s = 0.0

    @contextmanager
    def take(self, timeout_s: float) -> Iterator[None]:
        """Wait for the turn, at most `timeout_s` seconds. Raises NoAnswer if it does not come, or too early."""
        if not self._lock.acquire(timeout=timeout_s):
            raise NoAnswer(f"another question to Slurm takes longer than {timeout_s:g} s")
        try:
            left_s = self._until_s - time.monotonic()
            if left_s > 0.0:
                raise NoAnswer(f"Slurm did not answer; it is asked again in {left_s:.1f} s")
            answered = True  # also by a refusal
            try:
                yield
            except NoAnswer:
                answered = False
                raise
            finally:
                self._pause_s = (
                    0.0 if answered else min(_LONGEST_PAUSE_S, 2 * self._pause_s or _FIRST_PAUSE_S)
                )
                self._until_s = time.monotonic() + self._pause_s
        finally:
            self._lock.release()


@dataclass
class Tools:
    """Slurm's tools as the user has them on PATH; or, for root's hooks, the one scontrol at `trusted`.

    `until_s` (time.monotonic()): when all calls must be over; None: each has its own bound.
    """

    timeout_s: float = TIMEOUT_S
    trusted: str = ""
    until_s: float | None = None
    turn: Turn = field(default_factory=Turn)

    def run(self, tool: str, *words: str, timeout_s: float = 0.0) -> str:
        """Standard output of `tool`. Raises SlurmError: NoAnswer if it does not end in time; see text.error."""
        bound_s = timeout_s or self.timeout_s
        if self.until_s is not None:
            bound_s = max(_MIN_S, self.until_s - time.monotonic())
        with self.turn.take(bound_s):
            return self._run(tool, words, bound_s)

    def _run(self, tool: str, words: tuple[str, ...], bound_s: float) -> str:
        path = self.trusted or shutil.which(tool) or ""
        if not path:
            raise NotInstalled(f"Slurm's {tool} is not on PATH")
        try:
            if self.trusted:
                ended = _run_trusted([path, *words], bound_s)
            else:  # a tool ends with the calling thread, because an agent that ends does not wait for it
                ended = bounded_process.run(
                    [path, *words], _environment(), bound_s, limit=_MAX_BYTES
                )
        except OSError as error:
            raise NotInstalled(f"{path} cannot be run: {error.strerror}") from None
        call = f"{path} {words[0]}"
        if ended.code is None:
            raise NoAnswer(f"{call} did not end within {bound_s:.1f} s")
        if ended.code < 0:
            raise NoAnswer(f"{call} was ended by signal {-ended.code}")
        if ended.code:
            # Some refusals go to stdout, behind what was found.
            said = ended.stderr[:_ERROR_BYTES] or ended.stdout.rstrip().rpartition(b"\n")[2]
            raise text.error(call, said.decode(errors="replace"))
        if ended.truncated:
            raise SlurmError(f"{call} says more than {_MAX_BYTES} bytes")
        return ended.stdout.decode(errors="replace")


def _run_trusted(argv: list[str], bound_s: float) -> bounded_process.Ended:
    """Run a tool of root's in a forked child, because its file system may hang. Its stdout has its stderr in it.

    To be called in a process without threads.
    """

    def work(pipe: int) -> None:
        for fd in (1, 2):
            os.dup2(pipe, fd)
        try:
            trust.require(argv[0], SlurmError)
            os.execve(argv[0], argv, _environment())
        except (OSError, SlurmError) as error:
            os.write(2, f"{argv[0]} cannot be run: {error}".encode())
            raise

    return bounded_process.fork(work, bound_s, limit=_MAX_BYTES).finish()


def _environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith(_FORMATS)}, "LC_ALL": "C"}


def find(path: str = "") -> str:
    """The absolute path of scontrol: `path` if it is given, else the first of PLACES. Raises SlurmError."""
    candidates = (f"{place}/scontrol" for place in PLACES)
    found = path or next((place for place in candidates if os.access(place, os.X_OK)), "")
    if not found:
        raise NotInstalled(f"there is no scontrol in {', '.join(PLACES)}; set SCONTROL")
    return found
