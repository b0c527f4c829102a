"""Repairs that the driver's error codes ask for: XIDs of GPUs (NVIDIA's catalogue), SXIDs of NVSwitches. Pure.

The grouping is that of AWS' gpu-cluster-healthcheck, the finest that is public: ISOLATE > REBOOT > RESET > MONITOR.
"""

from __future__ import annotations

import re
from enum import IntEnum
from typing import NamedTuple


class Remedy(IntEnum):
    """The repair that an event asks for, the worst last. MONITOR: none (mostly a fault of the application)."""

    MONITOR = 0
    RESET = 1
    REBOOT = 2
    ISOLATE = 3


class Event(NamedTuple):
    """One line of the driver. `where`: PCI address; `sequence`: of the record in the kernel's log."""

    kind: str  # "XID" or "SXID"
    code: int
    where: str
    text: str
    sequence: int


# Codes that ask for a repair. All others are MONITOR: most are about applications.
XIDS: dict[int, tuple[Remedy, str]] = {
    48: (Remedy.RESET, "double-bit ECC error"),
    54: (Remedy.ISOLATE, "auxiliary power is not connected"),
    64: (Remedy.RESET, "row remapping or page retirement failed to be recorded"),
    74: (Remedy.RESET, "NVLink error"),
    79: (Remedy.REBOOT, "GPU has fallen off the bus"),
    95: (Remedy.RESET, "uncontained memory error"),
    109: (Remedy.RESET, "context switch timeout"),
    110: (Remedy.RESET, "security fault"),
    119: (Remedy.RESET, "GSP does not answer"),
    120: (Remedy.RESET, "GSP error"),
    136: (Remedy.RESET, "link training failed"),
    140: (Remedy.RESET, "unrecovered ECC error"),
    143: (Remedy.RESET, "GPU initialization failed"),
    151: (Remedy.REBOOT, "key rotation failed"),
    155: (Remedy.RESET, "NVLink software error"),
    156: (Remedy.RESET, "resource retirement"),
    158: (Remedy.RESET, "fatal timeout of the GPU"),
    168: (Remedy.REBOOT, "GPU memory could not be initialized"),
}

# "NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has ...", "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 20034, Fatal, ..."
# Only the beginning of a record is the driver's: further on the kernel quotes names that users choose (of cgroups).
_LINE = re.compile(
    r"(?:NVRM: (?:GPU at [0-9A-Fa-f:.]{4,16}: )?|nvidia-nvswitch\d+: (?=SXid))"
    r"(S?Xid) \(PCI:([0-9a-fA-F:.]{4,16})\): (\d{1,9})\b,? ?(.*)",
    re.ASCII,
)
_ACTIONS = (
    ("Node Reboot", Remedy.REBOOT),
    ("GPU Reset", Remedy.RESET),
    ("Drain and Reset", Remedy.RESET),
    ("Drain P2P", Remedy.RESET),
)


def parsed(line: str, sequence: int) -> Event | None:
    """The event in a record of the kernel's log, or None."""
    found = _LINE.match(line)
    if found is None:
        return None
    return Event(found[1].upper(), int(found[3]), found[2], found[4].strip(), sequence)


def remedy(event: Event) -> Remedy:
    """The repair that an event asks for."""
    if event.kind == "SXID":
        return Remedy.RESET if event.text.startswith("Fatal") else Remedy.MONITOR
    if event.code == 154:  # "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
        now = event.text.rpartition(" to ")[2]
        return next((due for words, due in _ACTIONS if words.lower() in now.lower()), Remedy.MONITOR)
    return XIDS.get(event.code, (Remedy.MONITOR, ""))[0]


def meaning(event: Event) -> str:
    """The meaning in a few words; the driver's text where the table has none."""
    known = XIDS.get(event.code) if event.kind == "XID" else None
    return known[1] if known else event.text
