"""XIDs and SXIDs in the kernel's log, since boot or since they were acknowledged (`nvrx health ack`).

Not "since the last look": a node that was drained for a broken GPU must not pass at the next look. After a repair
without a reboot (a GPU reset) an administrator acknowledges them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import Expected, NodeView, Setting, Verdict, listed, system_check
from nvrx_slurm.health.checks.xid import Event, Remedy, meaning, parsed, remedy
from nvrx_slurm.system.hardware import Absent

KMSG = "/dev/kmsg"
_LEVEL_BITS = 3  # syslog(3): a priority is a facility and, in its lowest bits, a level
_KERNEL = 0
_MAX_RECORD_BYTES = 8192  # the kernel's CONSOLE_EXT_LOG_MAX
_MAX_RECORDS = 1_000_000
_MAX_FILE_BYTES = 64 << 20
_MARK = "acknowledged-events"


class Record(NamedTuple):
    """One record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg): its sequence number and its text."""

    sequence: int
    text: str


def gather(node: NodeView, expected: Expected) -> list[Event]:
    """All events after the acknowledged ones, oldest first."""
    after = acknowledged(node)
    return [
        event
        for record in records(node)
        if record.sequence > after and (event := parsed(record.text, record.sequence)) is not None
    ]


def records(node: NodeView) -> Iterator[Record]:
    """All records that the kernel still has. Raises OSError, and Absent where there is no log."""
    node.doing(f"reading {KMSG}")
    try:
        fd = os.open(node.path(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Absent(f"there is no {KMSG}") from None
    try:
        device = stat.S_ISCHR(os.fstat(fd).st_mode)  # of a recorded tree: a file with one record per line
        for chunk in _chunks(fd) if device else node.text(KMSG, _MAX_FILE_BYTES).encode().splitlines():
            if record := _record(chunk):
                yield record
    finally:
        os.close(fd)


def _chunks(fd: int) -> Iterator[bytes]:
    """One record per read(2); EPIPE says that some were overwritten before they were read."""
    for _ in range(_MAX_RECORDS):
        try:
            chunk = os.read(fd, _MAX_RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.EPIPE:
                continue
            raise
        if not chunk:
            return
        yield chunk


def _record(chunk: bytes) -> Record | None:
    """ "priority,sequence,microseconds,flags;text" and continuation lines; None for anything else.

    A process that writes there has a facility (user, daemon), never the kernel's: its records are not believed.
    """
    head, separator, text = chunk.partition(b";")
    fields = head.split(b",")
    if not separator or len(fields) < 3 or not (fields[0].isdigit() and fields[1].isdigit() and len(head) < 100):
        return None
    if int(fields[0]) >> _LEVEL_BITS != _KERNEL:
        return None
    return Record(int(fields[1]), text.partition(b"\n")[0].decode(errors="replace"))


def acknowledged(node: NodeView) -> int:
    """Sequence number of the last acknowledged record; -1 if there is none."""
    try:
        return int(kept.recall(node, _MARK).get("sequence", -1))
    except (Absent, OSError):
        return -1


def acknowledge(node: NodeView) -> list[Event]:
    """Acknowledge all records that the log holds now; returns the events that counted until now.

    Raises OSError and Absent.
    """
    events = gather(node, {})
    last = max((record.sequence for record in records(node)), default=-1)
    kept.remember(node, _MARK, {"sequence": last})
    return events


_NEEDS = {Remedy.RESET: "a GPU reset", Remedy.REBOOT: "a reboot", Remedy.ISOLATE: "a person at the node"}
_SETTINGS = (
    Setting("xid_ignore", "counts", (), "XIDs that never fail here"),
    Setting("xid_fail", "counts", (), "XIDs that fail here in addition to the table"),
)


@system_check(
    "kernel-log",
    gather,
    f"{KMSG}: XIDs and SXIDs since boot, or since `nvrx health ack`",
    settings=_SETTINGS,
    needs_root=True,
)
def kernel_log(events: Iterable[Event], expected: Expected) -> tuple[Verdict, str]:
    """A code asks for a GPU reset, a reboot or a person."""
    grave: dict[str, Remedy] = {}
    others: dict[str, int] = {}
    for event in events:
        name, due = f"{event.kind} {event.code}", remedy(event)
        if event.kind == "XID" and event.code in expected["xid_fail"]:
            due = max(due, Remedy.RESET)
        if due is Remedy.MONITOR or (event.kind == "XID" and event.code in expected["xid_ignore"]):
            others[name] = others.get(name, 0) + 1
        else:
            grave[f"{name} on {event.where} ({meaning(event)})"] = due
    if grave:
        worst = sorted(grave, key=lambda text: -grave[text])
        return Verdict.FAIL, f"{listed(worst)}: needs {_NEEDS[grave[worst[0]]]}"
    counts = listed((f"{count} x {name}" for name, count in others.items()), 5)
    return Verdict.PASS, f"nothing that needs repair ({counts})" if others else "no XID or SXID"


CHECKS = (kernel_log,)
