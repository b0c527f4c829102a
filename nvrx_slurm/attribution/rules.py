"""What our own rules say about the end of a log: the one place where this folder meets `core.attribution`. Pure."""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple

_DETAILS = re.compile(rb"0x[0-9a-fA-F]+|[0-9]+|/\S*/")
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
    errors = _ERROR.findall(_RANK.sub(b"", tail))
    if not errors:
        return Finding()
    text = errors[-1].strip()
    mark = hashlib.sha256(_DETAILS.sub(b"#", text)).hexdigest()[:16]
    return Finding("traceback", "user", "RESTART", "guess", text.decode("utf-8", "replace")[:400], mark)
