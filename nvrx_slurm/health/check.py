"""The protocol of a check: `gather` reads the node (may block, runs in a child process), `judge` decides (pure).

A check is a `Check` in the tuple CHECKS of a module of this package that `registry.FAMILIES` names; nothing else.
This module is loaded by Slurm's prolog on every job: only cheap imports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

QUICK, NVML = "quick", "NVML"  # lanes: files of the kernel's own that answer at once; NVML, opened once for all

Expected = Mapping[str, Any]  # by `Setting.name`: what this node should have, and thresholds
CONTEXTS = ("prolog", "epilog", "periodic", "preflight", "manual")
# For what is no reason to take a node out of a running job, unless the site says that it is.
OUTSIDE_PREFLIGHT = ("prolog", "epilog", "periodic", "manual")
ACTIONS = ("drain", "fail", "warn")
MAX_TEXT = 400  # characters of a finding's sentence
NOTE_BYTES = 512  # of what a check is reading right now
_MARGIN_S = 0.15  # for the verdict of a check whose files did not answer to get out before the check's own end
_MAX_THREADS = 32


class Verdict(str, Enum):
    """What a check found. UNKNOWN: it could not tell; NOT_APPLICABLE: there is no such thing on this node."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not applicable"


class Finding(NamedTuple):
    """`text`: one sentence of at most MAX_TEXT characters. `seconds`: what the check took. `age_s`: seconds since it
    really ran (0 = just now). `action`: what the site wants done about it, "" if nothing."""

    check: str
    verdict: Verdict
    text: str
    seconds: float = 0.0
    age_s: float = 0.0
    action: str = ""


class Setting(NamedTuple):
    """A value that a site may set under `expect:`; `kind` is a word of `config.site.KINDS`, a default of None means
    that nothing special is expected."""

    name: str
    kind: str
    default: Any
    help: str


class Check(NamedTuple):
    """One check. `gather(node, expected)` returns facts of any type for `judge(facts, expected)`, which returns the
    verdict and one sentence. What may go wrong in `gather` needs no care:

    * `system.hardware.Absent("why")` -> NOT_APPLICABLE;
    * OSError, ValueError and everything else -> UNKNOWN, with the sentence;
    * not back after `budget_s` -> UNKNOWN "timed out", with what it was doing (see `NodeView.doing`).
    """

    name: str  # kebab-case
    reads: str  # what it reads, for people
    fails: str  # when it fails, in one sentence
    gather: Callable[[NodeView, Expected], Any]
    judge: Callable[[Any, Expected], tuple[Verdict, str]]
    contexts: tuple[str, ...] = CONTEXTS
    settings: tuple[Setting, ...] = ()  # what it uses of `expected` (may be shared with other checks)
    budget_s: float = 2.0
    needs_root: bool = False  # else NOT_APPLICABLE for others, except below a --sysroot
    only_if: str = ""  # the setting without which it does not apply
    reuse_s: float = 0.0  # a result of this node, at most that old, does as well (for heavy checks)
    on_fail: str = "drain"
    on_unknown: str = "warn"
    learn: Callable[[Any], dict[str, Any]] | None = None  # facts of a good node -> settings, for `nvrx health init`
    lane: str = ""  # checks of one lane share a child process; "": one of its own, for those that may well block
    per_job: str = ""  # where Slurm sets this variable, the result is this job's own: prologs do not share it
    ahead_s: float = 0.0  # the resident (see `resident`) runs it that often ahead, and uses its last result


class NotAsked(Exception):
    """There was neither time nor a thread for it."""


class NodeView:
    """The node as a check sees it: every path is below `root` ("/" or the --sysroot).

    All readers say first what they are about to read, so that a check that hangs can be told what it hangs on.
    """

    def __init__(self, root: str = "/", env: Mapping[str, str] | None = None, state_dir: str = "") -> None:
        self.root = os.path.abspath(root)
        self.state_dir = state_dir  # where results and counters are kept from run to run; "" = `cache` decides
        self.env: Mapping[str, str] = os.environ if env is None else env
        self.deadline_s = float("inf")  # of this check, time.monotonic()
        self.note: Any = None  # writable buffer of NOTE_BYTES, shared with the runner

    @property
    def live(self) -> bool:
        """Whether this is the node itself and not a recorded tree."""
        return self.root == "/"

    def path(self, absolute: str) -> str:
        """Where `absolute` ("/proc/meminfo") is."""
        return absolute if self.root == "/" else self.root + absolute

    def doing(self, phrase: str) -> None:
        """Say what is done next ("reading /proc/mdstat"), in case it never returns."""
        if self.note is not None:
            data = phrase.encode(errors="replace")[: NOTE_BYTES - 1]
            self.note[: len(data) + 1] = data + b"\0"

    def text(self, absolute: str, limit: int = 1 << 20) -> str:
        """The first `limit` bytes of a file, as text (bytes that are no UTF-8 replaced). Raises OSError."""
        self.doing(f"reading {absolute}")
        fd = os.open(self.path(absolute), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = b""
            while len(data) < limit and (more := os.read(fd, limit - len(data))):
                data += more
        except OSError as error:
            error.filename = absolute  # read(2) was not told it
            raise
        finally:
            os.close(fd)
        return data.decode(errors="replace")

    def number(self, absolute: str) -> int:
        """The whole number in a file. Raises OSError, and ValueError that names the file if there is something else."""
        word = self.text(absolute, 4096).strip()
        try:
            return int(word)
        except ValueError:
            raise ValueError(f"{absolute} holds {word[:40]!r} instead of a whole number") from None

    def names(self, directory: str) -> list[str]:
        """Sorted names in a directory; [] where there is none. Raises OSError for what cannot be read."""
        self.doing(f"listing {directory}")
        try:
            return sorted(os.listdir(self.path(directory)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def at_once(self, fn: Callable[[str], T], items: Iterable[str]) -> dict[str, T | Exception]:
        """`fn` of each item, side by side, since any may block for ever: its result, or the exception it raised.

        Items without an answer when this check's time is nearly up are left out of what is returned; those that were
        not even begun, as too many others do not answer, have NotAsked.
        """
        import threading  # in the child process of the check, after the fork

        todo = list(dict.fromkeys(items))
        waiting, answers = iter(todo), dict[str, T | Exception]()

        def work() -> None:
            for item in waiting:
                try:
                    answers[item] = fn(item)
                except Exception as error:
                    answers[item] = error

        threads = [threading.Thread(target=work, daemon=True) for _ in todo[:_MAX_THREADS]]
        for thread in threads:
            thread.start()
        for thread in threads:
            left_s = self.deadline_s - _MARGIN_S - time.monotonic()
            thread.join(min(max(left_s, 0.0), threading.TIMEOUT_MAX))
        found = dict(answers)
        return found | {item: NotAsked() for item in waiting if item not in found}


def one_line(text: object) -> str:
    """Printable text on one line of at most MAX_TEXT characters: findings go to terminals, logs and drain reasons."""
    words = " ".join(str(text).split())
    clean = "".join(char if char.isprintable() else "?" for char in words)
    return clean if len(clean) <= MAX_TEXT else f"{clean[: MAX_TEXT - 3]}..."


def listed(words: Iterable[object], most: int = 3) -> str:
    """ "a, b, c and 2 more"."""
    everything = [str(word) for word in words]
    rest = len(everything) - most
    return ", ".join(everything[:most]) + (f" and {rest} more" if rest > 0 else "")
