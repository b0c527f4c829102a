"""What a dead worker left behind: exit code, torchelastic's error file, the end of its stderr -> RankFault."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

from nvrx_slurm.types import FaultKind, RankFault

_TAIL_BYTES = 16_000
_ERROR_FILE_BYTES = 1 << 20
_TRACEBACK = "Traceback (most recent call last)"
_FATAL = "Fatal Python error"
# A dump of faulthandler without a fatal error: blocks of a header and indented lines.
_DUMP = re.compile(r"(?:^(?:Current thread|Thread) 0x\w+.*\n(?:^  .*\n?)*\n?)+", re.MULTILINE)
_CANNOT_START = "nvrx-run: cannot start "  # the trampoline's words, with the codes that a shell has for it
_CANNOT_START_CODES = (126, 127)


def signal_name(signum: int) -> str:
    """SIGKILL for 9; numbers without a name stay numbers."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def from_exit_code(code: int, where: RankFault) -> RankFault | None:
    """Fault of a worker that ended with `code` (negative = by that signal); None for 0."""
    if code == 0:
        return None
    if code < 0:
        return replace(where, kind=FaultKind.SIGNAL, exit_code=code, message=signal_name(-code))
    return replace(where, kind=FaultKind.EXIT, exit_code=code)


def with_details(fault: RankFault, error_file: Path, stderr_file: Path) -> RankFault:
    """Add message and traceback. Reads files of the worker, so everything in them is suspect; never raises.

    torchelastic's `@record` writes {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}.
    """
    message, traceback = _read_error_file(error_file)
    end = tail(stderr_file) if not traceback else ""
    last_line = end[end.rstrip().rfind("\n") + 1 :].strip()
    if fault.exit_code in _CANNOT_START_CODES and last_line.startswith(_CANNOT_START):
        return replace(fault, kind=FaultKind.SPAWN, message=last_line.removeprefix(_CANNOT_START)[:500])
    if not traceback:
        traceback = _traceback_in(end)
    if not message and traceback and fault.kind is FaultKind.EXIT:
        message = traceback.rstrip().splitlines()[-1]
    return replace(fault, message=fault.message or message[:500], traceback=traceback[-_TAIL_BYTES:])


def _read_error_file(path: Path) -> tuple[str, str]:
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(_ERROR_FILE_BYTES))
        inner = content["message"]
        if isinstance(inner, str):
            return inner, ""
        message, extra = inner["message"], inner.get("extraInfo", {})
        return str(message), str(extra.get("py_callstack", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return "", ""  # no @record, or a torn or foreign file: the log's tail serves


def tail(path: Path) -> str:
    """The end of a log, "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _traceback_in(text: str) -> str:
    """From the last traceback (or faulthandler's dump) on; nothing if there is none."""
    starts = [text.rfind(mark) for mark in (_TRACEBACK, _FATAL)]
    dumps = [found.start() for found in _DUMP.finditer(text)]
    if dumps and _FATAL not in text[max(0, dumps[-1] - 200) : dumps[-1]]:
        starts.append(dumps[-1])
    return text[max(starts) :] if max(starts) >= 0 else ""
