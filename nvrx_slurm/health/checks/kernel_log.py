"""XIDs of GPUs and SXIDs of NVSwitches in the kernel's log, since boot or since they were acknowledged (`health ack`).

Not since the last run: a node that was drained for a broken GPU must not pass at the next run. After a repair without
a reboot (a GPU reset) an administrator acknowledges them. Codes are grouped as in AWS' gpu-cluster-healthcheck, the
finest grouping that is public: ISOLATE > REBOOT > RESET > MONITOR.
"""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import (
    Expected,
    Judgement,
    NodeView,
    SiteKey,
    Verdict,
    listed,
    system_check,
)
from nvrx_slurm.system.hardware import Absent

KMSG = "/dev/kmsg"
_LEVEL_BITS = 3  # syslog(3): a priority is a facility and, in its lowest bits, a level
_KERNEL = 0
_MAX_RECORD_BYTES = 8192  # the kernel's CONSOLE_EXT_LOG_MAX
_MAX_RECORDS = 1_000_000
_MARK = "acknowledged-events"


class Repair(IntEnum):
    """The repair that an event asks for, the worst last. MONITOR: none (mostly a fault of the application)."""

    MONITOR = 0
    RESET = 1
    REBOOT = 2
    ISOLATE = 3


class DriverEvent(NamedTuple):
    """One line of the driver. `where`: PCI address."""

    kind: str  # "XID" or "SXID"
    code: int
    where: str
    text: str


# Codes that ask for a repair. All others are MONITOR: most are about applications.
XIDS: dict[int, tuple[Repair, str]] = {
    48: (Repair.RESET, "double-bit ECC error"),
    54: (Repair.ISOLATE, "auxiliary power is not connected"),
    64: (Repair.RESET, "row remapping or page retirement failed to be recorded"),
    74: (Repair.RESET, "NVLink error"),
    79: (Repair.REBOOT, "GPU has fallen off the bus"),
    95: (Repair.RESET, "uncontained memory error"),
    109: (Repair.RESET, "context switch timeout"),
    110: (Repair.RESET, "security fault"),
    119: (Repair.RESET, "GSP does not answer"),
    120: (Repair.RESET, "GSP error"),
    136: (Repair.RESET, "link training failed"),
    140: (Repair.RESET, "unrecovered ECC error"),
    143: (Repair.RESET, "GPU initialization failed"),
    151: (Repair.REBOOT, "key rotation failed"),
    155: (Repair.RESET, "NVLink software error"),
    156: (Repair.RESET, "resource retirement"),
    158: (Repair.RESET, "fatal timeout of the GPU"),
    168: (Repair.REBOOT, "GPU memory could not be initialized"),
}
_NEEDS = {
    Repair.RESET: "a GPU reset",
    Repair.REBOOT: "a reboot",
    Repair.ISOLATE: "a person at the node",
}

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has ...", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, ..."
# Only the beginning of a record is the driver's: further on the kernel quotes names that users choose (of cgroups).
_LINE = re.compile(
    r"(?:NVRM: (?:GPU at [0-9A-Fa-f:.]{4,16}: )?|nvidia-nvswitch\d+: (?=SXid))"
    r"(S?Xid) \(PCI:([0-9a-fA-F:.]{4,16})\): (\d{1,9})\b,? ?(.*)",
    re.ASCII,
)
_ACTIONS = (("Node Reboot", Repair.REBOOT), ("GPU Reset", Repair.RESET), ("Drain", Repair.RESET))


def parsed(line: str) -> DriverEvent | None:
    """The event in a record of the kernel's log, or None."""
    found = _LINE.match(line)
    if not found:
        return None
    return DriverEvent(found[1].upper(), int(found[3]), found[2], found[4].strip())


def repair(event: DriverEvent) -> Repair:
    """The repair that an event asks for."""
    if event.kind == "SXID":
        return Repair.RESET if event.text.startswith("Fatal") else Repair.MONITOR
    # "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    if event.code == 154:
        now = event.text.rpartition(" to ")[2]
        return next(
            (due for words, due in _ACTIONS if words.lower() in now.lower()), Repair.MONITOR
        )
    return XIDS.get(event.code, (Repair.MONITOR, ""))[0]


def records(node: NodeView) -> Iterator[tuple[int, str]]:
    """(sequence number, text) of all records that the kernel still has. Raises OSError and Absent."""
    node.doing(f"reading {KMSG}")
    try:
        fd = os.open(node.path(KMSG), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Absent(f"there is no {KMSG}") from None
    try:
        # A recorded tree has a file with one record per line.
        chunks = _chunks(fd) if node.live else node.text(KMSG, 64 << 20).encode().splitlines()
        yield from filter(None, map(_record, chunks))
    finally:
        os.close(fd)


def _chunks(fd: int) -> Iterable[bytes]:
    """One record per read(2); EPIPE says that some were overwritten before they were read."""
    for _ in range(_MAX_RECORDS):
        try:
            yield os.read(fd, _MAX_RECORD_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EPIPE:
                raise


def _record(chunk: bytes) -> tuple[int, str] | None:
    """The record in "priority,sequence,microseconds,flags;text" and continuation lines
    (Documentation/ABI/testing/dev-kmsg).

    A process that writes there has a facility (user, daemon), never the kernel's: its records are not believed.
    """
    head, separator, text = chunk.partition(b";")
    fields = head.split(b",")
    if (
        not separator
        or len(fields) < 3
        or not (fields[0].isdigit() and fields[1].isdigit() and len(head) < 100)
    ):
        return None
    if int(fields[0]) >> _LEVEL_BITS != _KERNEL:
        return None
    return int(fields[1]), text.partition(b"\n")[0].decode(errors="replace")


def events(node: NodeView) -> list[DriverEvent]:
    """All events after the acknowledged ones, oldest first. Raises OSError and Absent."""
    after = -1
    with suppress(Absent, OSError):
        after = int(kept.recall(node, _MARK).get("sequence", -1))
    found = (parsed(text) for sequence, text in records(node) if sequence > after)
    return [event for event in found if event]


def acknowledge(node: NodeView) -> int:
    """Acknowledge all records that the log holds now; returns how many events counted until now.

    Raises OSError and Absent.
    """
    count = len(events(node))
    last = max((sequence for sequence, _ in records(node)), default=-1)
    kept.remember(node, _MARK, {"sequence": last})
    return count


@system_check(
    "kernel-log",
    f"{KMSG}: XIDs and SXIDs since boot, or since `nvrx health ack`",
    settings=(
        SiteKey("xid_ignore", "counts", (), "XIDs that never fail here"),
        SiteKey("xid_fail", "counts", (), "XIDs that fail here in addition to the table"),
    ),
    needs_root=True,
)
def kernel_log(node: NodeView, expected: Expected) -> Judgement:
    """A code asks for a GPU reset, a reboot or a person."""
    return judge(events(node), expected)


def judge(found: Iterable[DriverEvent], expected: Expected) -> Judgement:
    """FAIL with the worst events first."""
    grave: dict[str, Repair] = {}
    others: Counter[str] = Counter()
    for event in found:
        name = f"{event.kind} {event.code}"
        due = repair(event)
        is_xid = event.kind == "XID"
        if is_xid and event.code in expected["xid_fail"]:
            due = max(due, Repair.RESET)
        if due is Repair.MONITOR or (is_xid and event.code in expected["xid_ignore"]):
            others[name] += 1
        else:
            meaning = XIDS[event.code][1] if is_xid and event.code in XIDS else event.text
            grave[f"{name} on {event.where} ({meaning})"] = due
    if grave:
        worst = sorted(grave, key=lambda text: -grave[text])
        return Verdict.FAIL, f"{listed(worst)}: needs {_NEEDS[grave[worst[0]]]}"
    counts = listed((f"{count} x {name}" for name, count in others.items()), 5)
    return Verdict.PASS, f"nothing that needs repair ({counts})" if others else "no XID or SXID"


CHECKS = (kernel_log,)
