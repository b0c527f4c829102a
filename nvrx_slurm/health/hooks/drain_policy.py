"""Pure rules: when a node may be drained or taken back, and the grammar of our reasons.

A reason is `nvrx:CHECK[,CHECK...]:TEXT`: all checks that failed, then one short sentence about the first. A node is
taken back only if root drained it with such a reason and nothing else has happened to it since.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.health.check import Finding, Verdict

if TYPE_CHECKING:
    from nvrx_slurm.slurm.drain import Note  # its module is needed for a drain only

PREFIX = "nvrx:"
MAX_TEXT = 120  # characters of the sentence
_REASON = re.compile(r"nvrx:([a-z0-9-]+(?:,[a-z0-9-]+)*):(.*)", re.ASCII)
# Replaced: characters that structure the output of Slurm's tools or look like their [user@time].
_UNFIT = re.compile(r"[^A-Za-z0-9 ._/:,;()%+*<>'-]", re.ASCII)
_DRAINED = "DRAIN"
# Words of scontrol(1), "NODE STATES", and of older versions. _PLAIN: states that a node drained by us may have besides;
# any other state means that others changed the node.
_PERMANENT = frozenset({"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
_PLAIN = _PERMANENT | {_DRAINED, "IDLE", "ALLOCATED", "MIXED", "COMPLETING", "RESERVED", "PLANNED", "BLOCKED"}
_REPAIRED = frozenset({"MAINT", "MAINTENANCE", "REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED"})
_SWITCHED_OFF = frozenset({"POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN"})
_OUT = _REPAIRED | _SWITCHED_OFF | {_DRAINED, "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING", "NOT_RESPONDING"}


class Reason(NamedTuple):
    """A parsed reason of ours: the checks that failed, and the sentence."""

    checks: tuple[str, ...]
    text: str


def reason(findings: Iterable[Finding]) -> str:
    """The reason for these failures, at least one."""
    failed = list(findings)
    text = _UNFIT.sub("?", failed[0].text.replace("=", ":").replace("[", "(").replace("]", ")"))
    return f"{PREFIX}{','.join(dict.fromkeys(finding.check for finding in failed))}:{text[:MAX_TEXT].strip()}"


def parse(text: str) -> Reason | None:
    """The parts of a reason of ours; None for any other text."""
    found = _REASON.fullmatch(text)
    return Reason(tuple(found[1].split(",")), found[2]) if found else None


def may_drain(note: Note) -> bool:
    """Whether the node is in service. A drain or a reason of others is never overwritten."""
    return bool(note.states) and not note.states & _OUT


def ours(note: Note) -> Reason | None:
    """The reason if root drained the node with a reason of ours and its state is plainly drained; else None."""
    if note.who != "root" or _DRAINED not in note.states or not note.states <= _PLAIN:
        return None
    return parse(note.reason)


def may_be_ours(note: Note) -> bool:
    """Whether we drained the node, even if it is in maintenance, does not respond or reboots now."""
    return note.who == "root" and parse(note.reason) is not None and not may_drain(note)


def extended(note: Note, checks: Iterable[str]) -> str:
    """Our reason with `checks` added; "" if they are in it already or the drain is not ours."""
    why = parse(note.reason) if may_be_ours(note) else None
    missing = [check for check in dict.fromkeys(checks) if why and check not in why.checks]
    return f"{PREFIX}{','.join([*why.checks, *missing])}:{why.text}" if why and missing else ""


def recovered(checks: Iterable[str], findings: Iterable[Finding]) -> bool:
    """Whether all these checks pass now. UNKNOWN and NOT_APPLICABLE do not count as a pass."""
    return {finding.check for finding in findings if finding.verdict is Verdict.PASS}.issuperset(checks)
