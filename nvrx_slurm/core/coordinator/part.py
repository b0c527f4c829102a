"""What each part of the coordinator has at hand: it reads all of it, and writes its own fields only."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.said import evidence, headline
from nvrx_slurm.core.attribution.verdict import first_cause
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.machine import Say

_FAULTS_SAID = 4  # per cycle; result.json has all
_FAULTS_COMPARED = 100


class Part:
    """Base of the parts. See `core.coordinator` for who may write what."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._s = roster.settings
        self._out = roster.out
        self._job = roster.job
        self._members = roster.members
        self._quorum = roster.quorum
        self._ledger = roster.ledger
        self._budget = roster.budget

    def _send(self, node_id: str, message: t.CoordinatorMessage) -> None:
        """A message to one agent."""
        self._roster.send(node_id, message)

    def _say(self, text: str) -> None:
        """A sentence for people."""
        self._out.append(Say(text))

    def _say_late(self, fault: t.RankFault) -> None:
        """A fault that came after the one for which its cycle was stopped.

        Comparing a fault with all others is slow: of the many ranks of a big job only the first are compared.
        """
        cause = self._ledger.cause
        faults = self._ledger.faults
        if fault.kind is t.FaultKind.HANG and cause is not None and cause.finding is not None:
            return  # one of the ranks that wait for the first cause
        first = len(faults) <= _FAULTS_COMPARED and first_cause(faults) == fault
        if first or len(faults) <= _FAULTS_SAID:
            what = "more likely the cause" if first else "also failed"
            self._say(f"{what}: {headline(fault)}{evidence(fault)}")
