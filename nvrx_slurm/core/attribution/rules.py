"""The rules that this process uses, those of the site first.

A coordinator decides and speaks by the built-in rules only: its decisions can be repeated without the site's file.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvrx_slurm.core.attribution.raised import RAISED
from nvrx_slurm.core.attribution.signatures import SIGNATURES, Signature
from nvrx_slurm.types import RankFault

_used: list[Signature] = list(SIGNATURES)


def use(site: Sequence[Signature]) -> None:
    """Rules of the site, for the life of this process."""
    _used[:] = [*site, *SIGNATURES]


def used() -> Sequence[Signature]:
    """All rules."""
    return _used


def named(rule: str, of_site: bool = False) -> Signature | None:
    """The rule of that name, perhaps one of the site; None where no signature has it."""
    return next(
        (signature for signature in (_used if of_site else SIGNATURES) if signature.name == rule),
        None,
    )


def topic(fault: RankFault) -> str:
    """The class of failures that a fault is of: its rule's, else its kind."""
    rule = fault.finding.rule if fault.finding is not None else ""
    found = named(rule, of_site=True)
    return found.topic if found is not None else "code" if rule == RAISED else fault.kind.value
