"""What each part of the coordinator has at hand: it reads all of it, and writes its own fields only."""

from __future__ import annotations

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.roster import Roster
from nvrx_slurm.core.machine import Say


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
