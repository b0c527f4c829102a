"""What our own rules say about the end of a log: the one place where this folder meets `core.attribution`. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from nvrx_slurm.core.attribution import evidence
from nvrx_slurm.types import FaultKind, RankFault, Remedy

_ERROR = re.compile(rb"^(?:\[rank\d+\]: ?)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)
_RANK = re.compile(rb"^ *(\d{1,7}): ?", re.MULTILINE)


class Finding(NamedTuple):
    """What is most likely wrong, from the lines of one log."""

    signature: str = "unknown"
    whose: str = "unknown"  # user, node, storage, network, ...
    action: str = "RESTART"  # what the rule advises: RESTART or STOP
    confidence: str = "guess"  # certain, likely or guess
    line: str = ""  # the line that says so
    fingerprint: str = ""  # equal for equal failures
    rank: int = -1


def examine(tail: bytes) -> Finding:
    """The finding for the last bytes of one rank's log, or of a merged one."""
    text = _RANK.sub(b"", tail)
    errors = _ERROR.findall(text)
    message = errors[-1].strip().decode("utf-8", "replace") if errors else ""
    fault = RankFault(FaultKind.EXIT, "", -1, 0, exit_code=1, message=message, traceback=message)
    f = evidence.examine(fault, text)
    action = "STOP" if f.remedy is Remedy.STOP else "RESTART"
    return Finding(f.rule or "unknown", f.blame.value, action, f.confidence.value, f.line, f.fingerprint)
