"""The job's own service: what rules, history and a language model make of the log of a failed cycle."""

from __future__ import annotations

import json
import logging
import os
import stat
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution import rules
from nvrx_slurm.attribution.answer import Answer
from nvrx_slurm.attribution.settings import CycleNews, Settings
from nvrx_slurm.system.files import write_atomic

_log = logging.getLogger(__name__)
TAIL_BYTES = 64 << 10
_MAX_RESULT_BYTES = 64 << 10
_MOST_FILES = 200  # of earlier results that are read
_SAME = 3  # equal failures in a row, over requeues, after which another try is pointless
_SLACK_S = 60.0  # starts differ
FOLDER = "attribution"


class NotAllowed(Exception):
    """A log that may not be analysed: (status, error_code, message) of the HTTP interface."""


def checked(path: object, root: str, must_exist: bool = True) -> str:
    """The real path of a log below `root`. Blocks while its file system does. Raises NotAllowed."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path or len(path) > 4096:
        raise NotAllowed(400, "invalid_path", "log_path must be an absolute path")
    real = os.path.realpath(path)
    if not root or os.path.commonpath([real, root]) != root:
        raise NotAllowed(403, "outside_root", f"{path} is not below {root}")
    try:
        status = os.stat(real)
    except FileNotFoundError:
        if must_exist or not os.path.isdir(os.path.dirname(real)):
            raise NotAllowed(404, "not_found", f"{path} does not exist") from None
        return real
    except OSError as error:
        raise NotAllowed(403, "not_readable", f"{path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise NotAllowed(400, "not_regular", f"{path} is no regular file")
    return real


def tail(path: str) -> bytes:
    """The last TAIL_BYTES of a regular file; nothing where it cannot be read. Blocks while its file system does."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return b""
    with os.fdopen(fd, "rb", buffering=0) as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return b""
        file.seek(max(0, status.st_size - TAIL_BYTES))
        return file.read(TAIL_BYTES)


def _about(one_s: float, other_s: float) -> bool:
    return max(one_s, other_s) <= 2 * min(one_s, other_s) + _SLACK_S


class Analyst:
    """Keeps the results of the job, also those of earlier runs of it, in the log tree. Its methods may block."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._run = Path(settings.tree).name
        self._folder = Path(settings.tree) / FOLDER
        self.history: dict[tuple[str, int], tuple[str, float]] = {}  # (run, cycle) -> (mark, how long it ran), in order

    def load(self) -> None:
        """Read what earlier runs of the job, and earlier processes of this one, have found."""
        tree = Path(self._settings.tree)
        files = [path for path in tree.parent.glob(f"r*/{FOLDER}/cycle_*.json") if path.is_file()]
        files.sort(key=lambda path: path.stat().st_mtime)
        for path in files[-_MOST_FILES:]:
            try:
                found = json.loads(tail(str(path)))
                self.history[str(found["run"]), int(found["cycle"])] = str(found["mark"]), float(found["lasted_s"])
            except (ValueError, KeyError, TypeError):
                _log.warning("%s is no result of attribution", path)

    def _row(self) -> int:
        """How many cycles in a row, up to the last one, failed alike on the same rank after about the same time: one
        that runs longer has got further."""
        marks = list(reversed(self.history.values()))
        last, lasted_s = marks[0]
        alike = takewhile(lambda one: last and one[0] == last and _about(one[1], lasted_s), marks)
        return len(list(alike))

    def evidence(self, news: CycleNews) -> bytes:
        """The end of the faulty rank's log, else of its traceback, else of the merged log."""
        fault = news.fault
        own = tail(str(fault["log"])) if fault.get("log") else b""
        told = str(fault.get("traceback") or fault.get("message") or "").encode()
        return (own or told or tail(news.log))[-TAIL_BYTES:]

    def analyse(self, news: CycleNews, evidence: bytes, of_job: bool = True) -> Answer:
        """The answer of the rules. `of_job`: a cycle of our own job, which counts for its history."""
        if of_job and not news.fault:
            self.history[self._run, news.cycle] = "", news.lasted_s
            return Answer("CONTINUE", "the cycle ended without a fault", "rules")
        found, fault = rules.examine(evidence), news.fault
        headline = str(fault.get("message") or found.line or found.signature)
        fingerprint = str(fault.get("fingerprint") or found.fingerprint)
        action, reason = found.action, f"{found.signature}: {headline}"
        if of_job:
            mark = f"{fingerprint} of rank {fault.get('rank')}" if found.whose == "user" and fingerprint else ""
            self.history[self._run, news.cycle] = mark, news.lasted_s
            if (row := self._row()) >= _SAME:
                action, reason = "STOP", f"the same failure {row} times in a row, {reason}"
        result: dict[str, Any] = {
            "schema_version": 1,
            "decision": action,
            "justification": reason,
            "failure_domain": found.whose,
            "primary_failure": {
                "failure_class": found.signature,
                "root_fingerprint": fingerprint,
                "line": found.line,
                "confidence": found.confidence,
                "rank": fault.get("rank", found.rank),
                "node": fault.get("host", ""),
            },
        }
        return Answer(action, reason, "rules", result)

    def keep(self, news: CycleNews, answer: Answer) -> None:
        """Write the result to the log tree; a file system that refuses costs the file."""
        mark, lasted_s = self.history.get((self._run, news.cycle), ("", 0.0))
        head = {"run": self._run, "cycle": news.cycle, "mark": mark, "lasted_s": lasted_s}
        data = json.dumps(head | asdict(answer), indent=1).encode()
        try:
            self._folder.mkdir(exist_ok=True)
            if len(data) <= _MAX_RESULT_BYTES:
                write_atomic(self._folder / f"cycle_{news.cycle}.json", data)
        except OSError as error:
            _log.warning("the result of cycle %d cannot be written: %s", news.cycle, error)
