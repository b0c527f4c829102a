"""The job's own service: what rules and history make of the log of a failed cycle. Its functions may block."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.records import Answer, CycleNews
from nvrx_slurm.core.attribution.evidence import TAIL_BYTES, examine
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, RankFault, Remedy

FOLDER = "attribution"  # of results, in the log tree
_log = logging.getLogger(__name__)
_SAME = 3  # equal failures in a row, over requeues, after which another try is pointless
_SLACK_S = 60.0  # starts differ
_ERROR = re.compile(rb"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)
_RANK = re.compile(rb"^ *(\d{1,7}): ?", re.MULTILINE)


def tail(path: str) -> bytes:
    """The last TAIL_BYTES of a regular file; nothing where it cannot be read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return b""
            file.seek(max(0, status.st_size - TAIL_BYTES))
            return file.read(TAIL_BYTES)
    except OSError:
        return b""


def evidence_of(news: CycleNews) -> bytes:
    """The end of the faulty rank's log, else of its traceback, else of the merged log."""
    fault = news.fault
    told = str(fault.get("traceback") or fault.get("message") or "").encode()
    return tail(str(fault.get("log") or "")) or told[-TAIL_BYTES:] or tail(news.log)


def by_rules(news: CycleNews, evidence: bytes) -> Answer:
    """The answer of the rules alone: those that the coordinator has applied, or the same ones for a foreign log."""
    fault = news.fault
    found = Finding(**fault["finding"]) if fault.get("finding") else _examined(evidence)
    name = found.rule or "unknown"
    reason = f"{name}: {fault.get('message') or found.line or name}"
    action = "STOP" if found.remedy == Remedy.STOP else "RESTART"
    primary = {
        "failure_class": name,
        "root_fingerprint": found.fingerprint,
        "line": found.line,
        "confidence": Confidence(found.confidence).value,
        "rank": fault.get("rank", -1),
        "node": fault.get("host", ""),
    }
    result = {
        "schema_version": 1,
        "decision": action,
        "justification": reason,
        "failure_domain": Blame(found.blame).value,
        "primary_failure": primary,
    }
    return Answer(action, reason, "rules", result)


def _examined(evidence: bytes) -> Finding:
    text = _RANK.sub(b"", evidence)
    errors = _ERROR.findall(text)
    message = errors[-1].strip().decode("utf-8", "replace") if errors else ""
    return examine(RankFault(FaultKind.EXIT, "", -1, exit_code=1, message=message, traceback=message), text)


class History:
    """The results of the job, those before a requeue included, in its log tree."""

    def __init__(self, tree: str) -> None:
        self._folder = Path(tree) / FOLDER

    def analyse(self, news: CycleNews) -> tuple[Answer, bytes]:
        """The answer about a cycle of this job, and the evidence for it."""
        evidence = evidence_of(news)
        answer = Answer("CONTINUE", "the cycle ended without a fault", "rules")
        if news.fault:
            answer = by_rules(news, evidence)
        if self._ends_alike(news, answer):
            reason = f"the same failure {_SAME} times in a row, {answer.reason}"
            answer = Answer("STOP", reason, "rules", answer.result | {"decision": "STOP", "justification": reason})
        self.keep(news, answer)
        return answer, evidence

    def keep(self, news: CycleNews, answer: Answer) -> None:
        """Write the result; a file system that refuses costs the file."""
        record = asdict(news) | {"mark": _mark(news, answer)} | asdict(answer)
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomic(self._path(news), json.dumps(record, indent=1).encode())
        except OSError as error:
            _log.warning("the result of cycle %d cannot be written: %s", news.cycle, error)

    def _path(self, news: CycleNews) -> Path:
        return self._folder / f"cycle_{news.cycle}.json"

    def _ends_alike(self, news: CycleNews, answer: Answer) -> bool:
        """Whether the user's code failed alike on the same rank in the cycles before, after about the same time: a
        cycle that runs longer has got further."""
        mark, own = _mark(news, answer), _place(self._path(news))
        results = sorted(self._folder.parent.parent.glob(f"r*/{FOLDER}/cycle_*.json"), key=_place)
        before = [_load(path) for path in results if _place(path) < own][1 - _SAME :]
        times = [news.lasted_s, *(one.get("lasted_s", 0.0) for one in before)]
        alike = len(times) == _SAME and all(one.get("mark") == mark for one in before)
        return bool(mark) and alike and max(times) <= 2 * min(times) + _SLACK_S


def _place(path: Path) -> tuple[list[int], list[int]]:
    """.../r1_step2/attribution/cycle_3.json -> ([1, 2], [3]), which sorts as they ran."""
    run, cycle = (re.findall(r"\d+", name) for name in (path.parts[-3], path.stem))
    return [int(number) for number in run], [int(number) for number in cycle]


def _load(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        _log.warning("%s is no result of attribution: %s", path, error)
        return {}
    return found if isinstance(found, dict) else {}


def _mark(news: CycleNews, answer: Answer) -> str:
    """Equal for equal failures of the user's code on the same rank; "" for others."""
    fingerprint = answer.result.get("primary_failure", {}).get("root_fingerprint")
    is_users = answer.result.get("failure_domain") == "user" and fingerprint
    return f"{fingerprint} of rank {news.fault.get('rank')}" if is_users else ""
