"""The protocol of a check: one function reads the node and decides. It may block, because it runs in a child process.

A new check is such a function with the decorator `check`, in the tuple CHECKS of a module in health/checks that
`registry.FAMILIES` names. Slurm's prolog loads this module for every job: only cheap imports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from nvrx_slurm.system.hardware import Absent

T = TypeVar("T")

# groups: files of the kernel that answer at once; NVML, opened once for all its checks
QUICK, NVML = "quick", "NVML"

Expected = Mapping[str, Any]  # by `SiteKey.name`: what this node should have, and thresholds
CONTEXTS = ("prolog", "epilog", "periodic", "preflight", "manual")
# For faults that are no reason to take a node out of a running job, unless the site says so.
OUTSIDE_PREFLIGHT = ("prolog", "epilog", "periodic", "manual")
ACTIONS = ("drain", "fail", "warn")
NOTE_BYTES = 512  # longest note on what a check reads at the moment
_MAX_DIGITS = 20  # of a 64-bit count
_MARGIN_S = 0.15  # for a check whose files do not answer to send its verdict before its time is up
_MAX_THREADS = 32


class Verdict(str, Enum):
    """Result of a check. UNKNOWN: it could not tell; NOT_APPLICABLE: the node has no such device or service."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not applicable"


Judgement = tuple[Verdict, str]  # of a check, in one sentence
Examine: TypeAlias = "Callable[[NodeView, Expected], Judgement]"


class CheckFinding(NamedTuple):
    """`text`: one sentence of at most MAX_TEXT characters. `seconds`: duration of the check. `action`: one
    of ACTIONS, "" if the finding asks for none."""

    check: str
    verdict: Verdict
    text: str
    seconds: float = 0.0
    action: str = ""


class SiteKey(NamedTuple):
    """A key of `expect:` in a site file. `kind`: a word of `config.site.KINDS`. Default None: no
    expectation."""

    name: str
    kind: str
    default: Any
    help: str


class Check(NamedTuple):
    """One check. `examine(node, expected)` reads the node and returns the verdict and one sentence. It need not handle
    errors:

    * `system.hardware.Absent("why")` -> NOT_APPLICABLE;
    * OSError, ValueError, `HardwareError` and any other exception -> UNKNOWN, with its sentence;
    * no result after `budget_s` -> UNKNOWN "timed out", with the last note (see `NodeView.doing`).
    """

    name: str  # kebab-case
    reads: str  # for people: files and calls
    fails: str  # for people: when it fails, in one sentence
    examine: Examine
    contexts: tuple[str, ...] = CONTEXTS
    # those it uses of `expected` (other checks may use them, too)
    settings: tuple[SiteKey, ...] = ()
    budget_s: float = 2.0
    needs_root: bool = False  # else NOT_APPLICABLE for other users, except below a --sysroot
    only_if: str = ""  # the setting without which it does not apply
    on_fail: str = "drain"
    on_unknown: str = "warn"
    # settings of a good node, for `health init`
    learn: Callable[[NodeView, Expected], dict[str, Any]] | None = None
    # checks of one group share a child process; "": a process of its own, for those that may block
    group: str = ""


def check(name: str, reads: str, **more: Any) -> Callable[[Examine], Check]:
    """Make the decorated function the `examine` of a Check; its docstring says when the check fails."""

    def declare(examine: Examine) -> Check:
        return Check(name, reads, " ".join((examine.__doc__ or "").split()), examine, **more)

    return declare


# For what the kernel's own files tell at once. Outside of the preflight: no reason to leave a node out of its job.
system_check = partial(check, group=QUICK, contexts=OUTSIDE_PREFLIGHT)


class NodeView:
    """The node as a check sees it: every path is below `root` ("/" or the --sysroot).

    Each method notes first what it reads, so that the finding of a check that hangs can name it.
    """

    def __init__(
        self, root: str = "/", env: Mapping[str, str] | None = None, state_dir: str = ""
    ) -> None:
        self.root = os.path.abspath(root)
        self.state_dir = state_dir  # where results and counters are kept; "": see `kept`
        self.env: Mapping[str, str] = os.environ if env is None else env
        self.deadline_s = float("inf")  # of this check, time.monotonic()
        self.note: Any = None  # writable buffer of NOTE_BYTES, shared with the runner

    @property
    def live(self) -> bool:
        """Whether this is the node itself and not a recorded tree."""
        return self.root == "/"

    def is_host(self) -> bool:
        """Whether the node's own processes are seen, by the parent of the kernel's threads. False in a container."""
        try:
            return self.text("/proc/2/comm", 64).strip() == "kthreadd"
        except OSError:
            return False

    def path(self, absolute: str) -> str:
        """The path of `absolute` ("/proc/meminfo") below the root."""
        return absolute if self.root == "/" else self.root + absolute

    def doing(self, phrase: str) -> None:
        """Note what is done next ("reading /proc/mdstat"), in case it never returns."""
        if self.note is not None:
            data = phrase.encode(errors="replace")[: NOTE_BYTES - 1]
            self.note[: len(data) + 1] = data + b"\0"

    def text(self, absolute: str, limit: int = 1 << 20, absent: str = "") -> str:
        """The first `limit` bytes of a file, as text (bytes that are no UTF-8 replaced). Raises OSError.

        With `absent`, a sentence, it raises Absent where there is no such file.
        """
        self.doing(f"reading {absolute}")
        try:
            with open(self.path(absolute), "rb") as file:
                return file.read(limit).decode(errors="replace")
        except OSError as error:
            if absent and isinstance(error, FileNotFoundError):
                raise Absent(absent) from None
            error.filename = absolute  # read(2) was not told it
            raise

    def number(self, absolute: str) -> int:
        """The count in a file. Raises OSError, and ValueError as `whole`."""
        return whole(self.text(absolute, 4096).strip(), absolute)

    def names(self, directory: str) -> list[str]:
        """Sorted names in a directory; [] where there is none. Raises OSError for what cannot be read."""
        self.doing(f"listing {directory}")
        try:
            return sorted(os.listdir(self.path(directory)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def at_once(self, fn: Callable[[str], T], items: Iterable[str]) -> dict[str, T | Exception]:
        """`fn` of each item in a thread of its own, since any may block for ever: its result, or its exception.

        Items without an answer when the time of this check is nearly up are left out. At most 32 run at a time.
        """
        import threading  # in the child process of the check, after the fork

        todo = list(dict.fromkeys(items))
        waiting = iter(todo)
        answers = dict[str, T | Exception]()

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
        return dict(answers)


def whole(word: str, file: str) -> int:
    """The count in `word`, at most 20 digits. Raises ValueError that names the file."""
    if not word.isdecimal() or len(word) > _MAX_DIGITS:
        raise ValueError(f"{file} holds {word[:40]!r} instead of a whole number")
    return int(word)


def judged(wrong: Iterable[str], well: str, unknown: Iterable[str] = ()) -> Judgement:
    """FAIL with the problems in `wrong`, else UNKNOWN with those in `unknown`, else PASS with `well`."""
    for verdict, problems in ((Verdict.FAIL, list(wrong)), (Verdict.UNKNOWN, list(unknown))):
        if problems:
            return verdict, listed(problems)
    return Verdict.PASS, well


def listed(words: Iterable[object], most: int = 3) -> str:
    """ "a, b, c and 2 more"."""
    everything = [str(word) for word in words]
    rest = len(everything) - most
    return ", ".join(everything[:most]) + (f" and {rest} more" if rest > 0 else "")
