"""When a node is drained and taken back, and what the reason looks like.

The reason is `nvrx:CHECK[,CHECK...]:TEXT`: all checks that asked for it, then one short sentence of the first. A node
is taken back only if root drained it with such a reason and nothing else has happened to it since. What fails on a node
that is drained by us already is added to the reason, and to a mark on the node, which needs no slurmctld.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import Finding, NodeView, Verdict
from nvrx_slurm.system import files

if TYPE_CHECKING:
    from nvrx_slurm.slurm.drain import Note  # it loads what only a drain needs

PREFIX = "nvrx:"
MAX_TEXT = 120  # characters of the sentence
SETTLE_S = 60.0  # a drain that slurmctld did not confirm in time may still come
_WAIT_S = 1.0  # for others to write the mark, which takes them no time (it is in memory)
_REASON = re.compile(r"nvrx:([a-z0-9-]+(?:,[a-z0-9-]+)*):(.*)", re.ASCII)
# What Slurm's tools take for structure, and what looks like their [user@time], is replaced.
_UNFIT = re.compile(r"[^A-Za-z0-9 ._/:,;()%+*<>'-]", re.ASCII)
_DRAINED = "DRAIN"
# Words of scontrol(1), "NODE STATES", and of older versions. Beside DRAIN: jobs may run on it, it may be reserved, or
# be of a kind that lasts; anything else is somebody's doing.
_FOR_GOOD = frozenset({"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"})
_PLAIN = _FOR_GOOD | {_DRAINED, "IDLE", "ALLOCATED", "MIXED", "COMPLETING", "RESERVED", "PLANNED", "BLOCKED"}
_REPAIRED = frozenset({"MAINT", "MAINTENANCE", "REBOOT", "REBOOT_REQUESTED", "REBOOT_ISSUED"})
_SWITCHED_OFF = frozenset({"POWER_DOWN", "POWERING_DOWN", "POWERED_DOWN"})
_OUT = _REPAIRED | _SWITCHED_OFF | {_DRAINED, "DRAINED", "DRAINING", "DOWN", "FAIL", "FAILING", "NOT_RESPONDING"}


class Reason(NamedTuple):
    """A reason of ours: the checks that asked for the drain, and the sentence."""

    checks: tuple[str, ...]
    text: str


def reason(findings: Iterable[Finding]) -> str:
    """The reason for these failures, at least one."""
    failed = list(findings)
    text = _UNFIT.sub("?", failed[0].text.replace("=", ":").replace("[", "(").replace("]", ")"))
    return f"{PREFIX}{','.join(dict.fromkeys(finding.check for finding in failed))}:{text[:MAX_TEXT].strip()}"


def parse(text: str) -> Reason | None:
    """The parts of a reason of ours; None for any other."""
    found = _REASON.fullmatch(text)
    return Reason(tuple(found[1].split(",")), found[2]) if found else None


def may_drain(note: Note) -> bool:
    """Whether the node is surely in use: nobody's drain, nor his note, is written over."""
    return bool(note.states) and not note.states & _OUT


def ours(note: Note) -> Reason | None:
    """The reason if we drained the node, as root, and it is plainly drained; else None."""
    if note.who != "root" or _DRAINED not in note.states or not note.states <= _PLAIN:
        return None
    return parse(note.reason)


def may_be_ours(note: Note) -> bool:
    """Whether we drained the node, whatever else has happened to it since (maintenance, not responding, a reboot)."""
    return note.who == "root" and parse(note.reason) is not None and not may_drain(note)


def extended(note: Note, checks: Iterable[str]) -> str:
    """The reason of a node that is drained by us with these checks in it, too; "" if they are, or it is not ours."""
    why = parse(note.reason) if may_be_ours(note) else None
    missing = [check for check in dict.fromkeys(checks) if why and check not in why.checks]
    return f"{PREFIX}{','.join([*why.checks, *missing])}:{why.text}" if why and missing else ""


def recovered(checks: Iterable[str], findings: Iterable[Finding]) -> bool:
    """Whether all these checks pass now; unknown, or not applicable any more, is no pass."""
    return {finding.check for finding in findings if finding.verdict is Verdict.PASS}.issuperset(checks)


# --- a mark on the node: what asked for a drain, and whether slurmctld has to be asked about it -----------------------


def noted(node: NodeView, name: str) -> dict[str, float] | None:
    """The checks for which `name` is (or is about to be) drained by us, and when each failed last (`cache.now_s`).

    {}: surely not drained by us; None: not known, as after a boot. Only {} spares slurmctld the question.
    """
    try:
        mark = cache.read_private(_mark(node, name))
        if mark["boot"] != cache.boot_id(node):
            return None
        return {str(check): float(at_s) for check, at_s in mark["checks"].items()}
    except (OSError, cache.Unusable, KeyError, TypeError, ValueError, AttributeError):
        return None


def note_down(node: NodeView, name: str, checks: Iterable[str] = (), since_s: float = 0.0) -> dict[str, float]:
    """Note down that these failed now, and forget what failed before `since_s`; what is noted then.

    Where a failure cannot be kept no mark says that there is none: slurmctld is asked each time.
    """
    try:
        with _alone(node, name):
            known = noted(node, name) or {}
            kept = {check: at_s for check, at_s in known.items() if at_s >= since_s}
            kept.update(dict.fromkeys(checks, cache.now_s()))
            cache.write_private(_mark(node, name), {"boot": cache.boot_id(node), "checks": kept})
            return kept
    except (OSError, cache.Unusable):
        if checks and noted(node, name) == {}:
            with contextlib.suppress(OSError, cache.Unusable):
                os.unlink(_mark(node, name))
        return {}


def _alone(node: NodeView, name: str) -> contextlib.AbstractContextManager[None]:
    """No other hook writes the mark meanwhile. Raises OSError when that takes too long, and Unusable."""
    return files.file_lock(f"{cache.private_directory(node)}/drained-{name}.lock", _WAIT_S)


def _mark(node: NodeView, name: str) -> str:
    return f"{cache.private_directory(node)}/drained-{name}.json"
