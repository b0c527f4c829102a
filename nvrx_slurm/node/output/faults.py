"""Describes the fault of a worker that ended: from its exit code, torchelastic's error file and its stderr."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import re
import signal
import tempfile
from functools import partial
from pathlib import Path

from nvrx_slurm.core.bounded_json import parsed
from nvrx_slurm.declared import replace
from nvrx_slurm.system import bounded, limits
from nvrx_slurm.system.foreign import first_bytes, last_bytes
from nvrx_slurm.types import Blame, Confidence, FaultKind, Finding, LineRole, RankFault, Remedy

_WRONG_LOSS = Finding("", LineRole.CAUSE, Blame.UNKNOWN, Confidence.LIKELY, Remedy.RESTART, "wrong loss")
_TAIL_BYTES, _LOG_BYTES = 16_000, 1 << 16
_STOPPED_BYTES = 12 << 10  # of a rank that was stopped, for which a plan waits: a traceback with C++ frames fits
_ERROR_FILE_BYTES = 1 << 20
_MESSAGE_CHARS = 500
_ROOM_BYTES = 16 << 10  # a print or a traceback takes as much
_TRACEBACK = "Traceback (most recent call last)"
_FATAL = "Fatal Python error"
_FRAME, _INDENT = '  File "', "  "  # of lines of a traceback, behind any prefix
_NOT_READ = "the end of its traceback is not in its log"
# A dump of faulthandler without a fatal error: blocks of a header and indented lines.
_DUMP = re.compile(r"(?:^(?:Current thread|Thread) 0x\w+.*\n(?:^  .*\n?)*\n?)+", re.MULTILINE)
_MODULES = "\nExtension modules: "  # faulthandler's last line
_CANNOT_START = "nvrx-run: cannot start "  # printed by the trampoline, which exits with a shell's codes for it
_CANNOT_START_CODES = (126, 127)
_KILLED = (-9, 137)  # by SIGKILL, also where a shell says so
_WORDS = (
    b"error",
    b"xid",
    b"fail",
    b"exception",
    b"fatal",
    b"fault",
    b"cancelled",
    b"killed",
    b"lost",
    b"hang",
    b"oom",
)
_WITHIN_S, _STOPPED_WITHIN_S = 1.0, 0.2  # a hung file system must not hold up the report of a fault, or a plan
_STOPS = (signal.SIGTERM, signal.SIGKILL)
_CLOCKS_S = 2.0  # the clocks of a file server and of this node differ


def signal_name(signum: int) -> str:
    """The name of signal `signum`, for example SIGKILL; "signal N" for a number without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def from_exit_code(code: int, where: RankFault) -> RankFault | None:
    """The fault of a worker that ended with `code` (negative = by that signal); None for 0."""
    if code == 0:
        return None
    if code < 0:
        return replace(where, kind=FaultKind.SIGNAL, exit_code=code, message=signal_name(-code))
    return replace(where, kind=FaultKind.EXIT, exit_code=code)


def read_rules() -> None:
    """Import what judges a fault, which takes 8 ms; in a thread, so that no restart waits for that."""
    with contextlib.suppress(OSError):  # who needs it tries again
        importlib.import_module("nvrx_slurm.core.attribution.evidence")
        importlib.import_module("nvrx_slurm.core.attribution.verdict")


async def explained(
    fault: RankFault, error_file: str, progress_s: float, oom_kills: float, stopped_s: float
) -> RankFault:
    """The fault with what its rank wrote, within a second. `stopped_s`: when it was stopped because of another fault
    (`time.time()`, 0 = it was not); then sooner, as a plan waits for it. Parameters as of `with_details`."""
    stderr = Path(fault.log)
    files = (stderr.with_suffix(error_file), stderr, progress_s)
    within_s = _WITHIN_S
    read = partial(with_details, fault, *files, oom_kills)
    if stopped_s:
        read = partial(of_stopped, fault, *files, stopped_s)
        within_s = _STOPPED_WITHIN_S
    try:
        return await bounded.call_async(read, within_s, "faults")
    except (OSError, bounded.Overrun):
        return replace(fault, message=fault.message or f"its log could not be read within {within_s:g} s")


def with_details(
    fault: RankFault,
    error_file: Path,
    stderr_file: Path,
    progress_s: float = 0.0,
    oom_kills: float = math.inf,
    most_bytes: int = _LOG_BYTES,
) -> RankFault:
    """Add message, traceback and finding from files that the worker wrote; what they hold is not trusted. Never raises.

    `progress_s`: its last heartbeat (`time.time()`, 0 = none); what was written long before says nothing of its end.
    `oom_kills`: the number of those in its cgroup before it started. `most_bytes`: of each file that are looked at.
    Blocks while their file system does. torchelastic's `@record` writes
    {"message": {"message": ..., "extraInfo": {"py_callstack": ...}}}.
    """
    from nvrx_slurm.core.attribution.evidence import examine, of_rule  # not at the start: see `read_rules`
    from nvrx_slurm.core.attribution.named_node import JobNode, host_of
    from nvrx_slurm.core.attribution.reached import progress

    if fault.kind is FaultKind.LOSS:  # equal ones are the same failure, whatever the rank has written
        return replace(fault, finding=_WRONG_LOSS)
    explained = _explained(fault, error_file, _written(stderr_file, 0.0, most_bytes)[0])
    stdout, written_s = _written(stderr_file.with_suffix(".out"), progress_s, most_bytes)
    if progress(stdout.lower()) >= 0:
        progress_s = max(progress_s, written_s)
    stderr = _written(stderr_file, progress_s, most_bytes)[0]
    killed = fault.kind is not FaultKind.HANG and fault.exit_code in _KILLED
    if killed and (more := limits.oom_kills() - oom_kills) > 0:
        told = f"oom_kill event: the kernel killed {more} of its cgroup's processes for lack of memory"
        explained, stderr = replace(explained, message=f"SIGKILL ({told})"), stderr + f"\n{told}".encode()
    finding = examine(explained, stderr, stdout)
    if explained.kind is FaultKind.EXIT and finding.rests_on == "exit" and (why := _no_room(stderr_file.parent)):
        why = f"it could not write to its log: {why}: {stderr_file.parent}"
        explained, finding = replace(explained, message=why), of_rule(explained, "logs-full", why, "field")
    if host_of(finding.node, [JobNode(os.uname().nodename)]):  # Slurm may have another name for this node
        finding = replace(finding, node=fault.host)
    return replace(explained, finding=finding)


def _no_room(folder: Path) -> str:
    """Why nothing can be written to a folder for lack of space or quota; "" otherwise."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        return os.strerror(error.errno) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
    return ""


def of_stopped(fault: RankFault, error_file: Path, stderr_file: Path, progress_s: float, stopped_s: float) -> RankFault:
    """Do as `with_details`, for a rank that was stopped because of another one, at `stopped_s` (`time.time()`).

    It has a finding if what it says is no consequence of the stop: then it may be the cause, or the victim of another
    rank. A victim may end before the culprit, which still flushes, dumps core or aborts. Never raises.
    """
    ended, most_bytes = fault, _LOG_BYTES
    if -fault.exit_code in _STOPS:
        most_bytes = _STOPPED_BYTES
        stderr, stdout = (_written(file, 0.0, most_bytes)[0] for file in (stderr_file, stderr_file.with_suffix(".out")))
        if not _says_something(stderr) and not _says_something(stdout):
            return fault  # as most do: no plan waits for that
        if _TRACEBACK.encode() in stderr or error_file.exists():  # by its exception, had it not been stopped
            ended = replace(fault, kind=FaultKind.EXIT, exit_code=1)
    told = with_details(ended, error_file, stderr_file, progress_s, most_bytes=most_bytes)
    found = told.finding
    if found is None or not found.rule:
        return fault
    if found.role is LineRole.ECHO:
        return told
    with contextlib.suppress(OSError):
        if found.confidence is not Confidence.GUESS or stderr_file.stat().st_mtime <= stopped_s:
            return told
    return fault


def _says_something(text: bytes) -> bool:
    """Whether there is a word that each text about a failure has."""
    lower = text.lower()
    return any(word in lower for word in _WORDS)


def _explained(fault: RankFault, error_file: Path, stderr: bytes) -> RankFault:
    from nvrx_slurm.core.attribution.raised import clean, raised_in  # not at the start either

    message, traceback = _read_error_file(error_file)
    exited = fault.kind is FaultKind.EXIT
    end = clean(stderr.decode("utf-8", "replace"))
    if not traceback:
        last_line = end.strip().rpartition("\n")[2].strip()
        if fault.exit_code in _CANNOT_START_CODES and last_line.startswith(_CANNOT_START):
            why = last_line.removeprefix(_CANNOT_START)[:_MESSAGE_CHARS]
            return replace(fault, kind=FaultKind.SPAWN, message=why)
        raised = raised_in(end) if exited else None
        if raised is not None:
            message = message or raised.headline
            traceback = raised.traceback
        traceback = traceback or _stacks_in(end[-_TAIL_BYTES:], exited)
    if exited and traceback and not message:
        last = traceback.rstrip().splitlines()[-1]
        message = _NOT_READ if _INDENT in last else last
    is_dump = fault.kind is FaultKind.HANG and traceback.startswith(_FATAL)
    if is_dump:  # the monitor made the rank print its stacks: only these are of interest
        stacks = traceback.partition("\n\n")[2]
        traceback = stacks.partition(_MODULES)[0]
    message = fault.message or message.partition("\n")[0][:_MESSAGE_CHARS]
    return replace(fault, message=message, traceback=traceback[-_TAIL_BYTES:])


def _read_error_file(path: Path) -> tuple[str, str]:
    try:
        content = parsed(first_bytes(path, _ERROR_FILE_BYTES))
        inner = content["message"]
        if isinstance(inner, str):
            return inner, ""
        message, extra = inner["message"], inner.get("extraInfo", {})
        return str(message), str(extra.get("py_callstack", ""))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", ""  # no @record, or a file that is torn or not torchelastic's: the log's end is used instead


def _written(path: Path, progress_s: float, most_bytes: int = _LOG_BYTES) -> tuple[bytes, float]:
    """The end of a file, and when it was last written to; nothing of a file that is older than the rank's progress."""
    with contextlib.suppress(OSError):
        if (written_s := path.stat().st_mtime) + _CLOCKS_S >= progress_s:
            return last_bytes(path, most_bytes), written_s
    return b"", 0.0


def _stacks_in(text: str, exited: bool) -> str:
    """`text` from the last traceback or dump of faulthandler on; of a rank that `exited` also from its first frame."""
    starts = [text.rfind(mark) for mark in (_TRACEBACK, _FATAL)]
    dumps = [found.start() for found in _DUMP.finditer(text)]
    if dumps and _FATAL not in text[max(0, dumps[-1] - 200) : dumps[-1]]:
        starts.append(dumps[-1])
    if exited and max(starts) < 0:
        starts.append(text.find(_FRAME))
    return text[text.rfind("\n", 0, max(starts)) + 1 :] if max(starts) >= 0 else ""
