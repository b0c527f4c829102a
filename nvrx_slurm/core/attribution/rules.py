"""The rules that this process uses, those of the site first; and what they say to do.

A coordinator decides and speaks by the built-in rules only: its decisions can be repeated without the site's file.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.core.attribution.signatures import SIGNATURES, Signature
from nvrx_slurm.types import FaultKind, RankFault

_used: list[Signature] = list(SIGNATURES)
_BY_KIND = {
    FaultKind.HANG: "Look at hang.json of the cycle: who waits for whom, and where. A timeout may be too short.",
    FaultKind.NODE_LOST: "Nothing: the job goes on with the other nodes or a spare. Report a node that is lost again.",
    FaultKind.UNHEALTHY: "Report the node: its health check failed.",
    FaultKind.UNKILLABLE: "Report the node: a process there does not end, as with a stuck driver or file system.",
    FaultKind.SPAWN: "Correct path and mode of the program, or the image.",
    FaultKind.SIGNAL: "Look for what killed it: the out-of-memory killer (dmesg, sacct), or a person.",
    FaultKind.EXIT: "Look at its last lines: the program has ended itself with this code.",
}
_RAISED = "python-exception"
_CODE = "Correct the script or its data: its exception is above."


def use(site: Sequence[Signature]) -> None:
    """Rules of the site, for the life of this process."""
    _used[:] = [*site, *SIGNATURES]


def used() -> Sequence[Signature]:
    """All rules."""
    return _used


def named(rule: str, of_site: bool = False) -> Signature | None:
    """The rule of that name, perhaps one of the site; None where no signature has it."""
    return next((signature for signature in (_used if of_site else SIGNATURES) if signature.name == rule), None)


def topic(fault: RankFault) -> str:
    """The class of failures that a fault is of: its rule's, else its kind."""
    rule = fault.finding.rule if fault.finding is not None else ""
    found = named(rule, of_site=True)
    return found.topic if found is not None else "code" if rule == _RAISED else fault.kind.value


def what_to_do(fault: RankFault, of_site: bool = False) -> str:
    """One line that a user can act on; "" where there is nothing to say."""
    rule = fault.finding.rule if fault.finding is not None else ""
    found = named(rule, of_site)
    if found is not None:
        return found.advice
    return _CODE if rule == _RAISED else "" if rule else _BY_KIND.get(fault.kind, "")
