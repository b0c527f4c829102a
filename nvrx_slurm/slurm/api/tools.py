"""Runs Slurm's command line tools: each in a child process, bounded, in the C locale, without a shell."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field

from nvrx_slurm.child import bounded_process
from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.facts import NoAnswer, NotInstalled, SlurmError
from nvrx_slurm.slurm.api.turn import Turn
from nvrx_slurm.system import trust

TIMEOUT_S = 10.0  # of one tool; Slurm's own MessageTimeout is 10 s by default
PLACES = ("/usr/bin", "/usr/local/bin", "/opt/slurm/bin")  # where root's hooks, which have no PATH, look
_ERROR_BYTES = 4096
_MIN_S = 0.05
# They change the output of squeue and scontrol.
_FORMATS = ("SQUEUE_", "SLURM_TIME_FORMAT", "SLURM_JSON", "SLURM_YAML")


@dataclass
class Tools:
    """Slurm's tools as the user has them on PATH; or, for root's hooks, the one scontrol at `trusted`.

    A trusted tool is looked at and executed in a forked child, because its file system may hang: use it in a process
    without threads. `until_s` (time.monotonic()): when all calls must be over; None: each has its own bound.
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
            return self._run(tool, list(words), bound_s)

    def _run(self, tool: str, words: list[str], bound_s: float) -> str:
        path = self.trusted or shutil.which(tool) or ""
        if not path:
            raise NotInstalled(f"Slurm's {tool} is not on PATH")
        try:
            ended, said = self._fork([path, *words], bound_s) if self.trusted else _spawn([path, *words], bound_s)
        except OSError as error:
            raise NotInstalled(f"{path} cannot be run: {error.strerror}") from None
        call = f"{path} {words[0]}"
        if ended.code is not None and ended.code < 0:
            raise NoAnswer(f"{call} was ended by signal {-ended.code}")
        if ended.code is None:
            raise NoAnswer(f"{call} did not end within {bound_s:.1f} s")
        if ended.truncated and not ended.code:
            raise SlurmError(f"{call} says more than {_limit_bytes(self.trusted)} bytes")
        if ended.code:
            # Some refusals go to stdout, behind what was found.
            raise text.error(call, (said or ended.stdout.rstrip().rpartition(b"\n")[2]).decode(errors="replace"))
        return ended.stdout.decode(errors="replace")

    def _fork(self, argv: list[str], bound_s: float) -> tuple[bounded_process.Ended, bytes]:
        error_fd = os.memfd_create("stderr")

        def work(pipe: int) -> None:
            # In the child: both the look at the path and execve(2) block on a file system that hangs.
            os.dup2(pipe, 1)
            os.dup2(error_fd, 2)
            try:
                trust.require(argv[0], SlurmError)
                os.execve(argv[0], argv, _environment())
            except (OSError, SlurmError) as error:
                os.write(2, f"{argv[0]} cannot be run: {error}".encode())
                raise

        try:
            ended = bounded_process.fork(work, bound_s, limit=_limit_bytes(argv[0])).finish()
            return ended, os.pread(error_fd, _ERROR_BYTES, 0)
        finally:
            os.close(error_fd)


def _spawn(argv: list[str], bound_s: float) -> tuple[bounded_process.Ended, bytes]:
    """The tool ends with the calling thread, because an agent that ends does not wait for it."""
    ended = bounded_process.run(argv, _environment(), bound_s, limit=_limit_bytes(""))
    return ended, ended.stderr[:_ERROR_BYTES]


def _limit_bytes(trusted: str) -> int:
    """Of an answer: hooks ask about one node, others about all, each of which takes about a kilobyte."""
    return 1 << 20 if trusted else 64 << 20


def _environment() -> dict[str, str]:
    return {**{k: v for k, v in os.environ.items() if not k.startswith(_FORMATS)}, "LC_ALL": "C"}


def find(path: str = "") -> str:
    """The absolute path of scontrol: `path` if it is given, else the first of PLACES. Raises SlurmError."""
    candidates = (f"{place}/scontrol" for place in PLACES)
    found = path or next((place for place in candidates if os.access(place, os.X_OK)), "")
    if not found:
        raise NotInstalled(f"there is no scontrol in {', '.join(PLACES)}; set SCONTROL")
    return found
