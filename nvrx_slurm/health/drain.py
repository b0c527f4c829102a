"""When a node is drained and taken back, and what the reason looks like.

The reason is `nvrx:CHECK[,CHECK...]:TEXT`: all checks that asked for it, then one short sentence of the first. A node
is taken back only if root drained it with such a reason and nothing else has happened to it since.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import Finding, NodeView, Verdict

if TYPE_CHECKING:
    from nvrx_slurm.slurm.drain import Note  # it loads what only a drain needs

PREFIX = "nvrx:"
MAX_TEXT = 120  # characters of the sentence
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


def recovered(checks: Iterable[str], findings: Iterable[Finding]) -> bool:
    """Whether all these checks pass now; unknown, or not applicable any more, is no pass."""
    return {finding.check for finding in findings if finding.verdict is Verdict.PASS}.issuperset(checks)


# --- a mark on the node, so that slurmctld is asked only if there may be something to take back -----------------------


def expect_drained(node: NodeView, name: str, drained: bool) -> None:
    """Note down whether `name` may be drained by us. Where that cannot be kept, slurmctld is asked each time."""
    try:
        cache.write_private(_mark(node, name), {"boot": cache.boot_id(node), "drained": drained})
    except (OSError, cache.Unusable):
        return


def may_be_drained(node: NodeView, name: str) -> bool:
    """False only if it was noted down in this boot that we did not drain `name`."""
    try:
        mark = cache.read_private(_mark(node, name))
        return not (mark and mark["boot"] == cache.boot_id(node) and mark["drained"] is False)
    except (OSError, cache.Unusable, KeyError, TypeError):
        return True


def _mark(node: NodeView, name: str) -> str:
    return f"{cache.private_directory(node)}/drained-{name}.json"
