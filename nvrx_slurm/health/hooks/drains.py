"""Draining this node and taking it back: the rules of drain_policy, the record of drain_record, and scontrol."""

from __future__ import annotations

import syslog
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health import cache
from nvrx_slurm.health.check import Finding, NodeView, Verdict
from nvrx_slurm.health.hooks import drain_policy as policy
from nvrx_slurm.health.hooks import drain_record as record

if TYPE_CHECKING:
    from nvrx_slurm.slurm.drain import Scontrol

SETTLE_S = 60.0  # a drain that slurmctld did not confirm in time may still take effect
_SCONTROL_S = 10.0  # for both calls of a drain together; the prolog has less
_MARGIN_S = 0.8  # to give up a scontrol that is blocked in the kernel, and to write LOG, before hook.sh ends the hook


class Drains:
    """Drains of the node `name`. `scontrol`: its path, "" for the usual places; `until_s`: end of the hook
    (time.monotonic()); `say(level, text)`: logs with a level of syslog(3)."""

    def __init__(
        self, node: NodeView, name: str, scontrol: str, until_s: float, say: Callable[[int, str], None]
    ) -> None:
        self._node, self._name, self._path, self._until_s, self._say = node, name, scontrol, until_s, say

    def recorded(self) -> dict[str, float] | None:
        """As `drain_record.read`."""
        return record.read(self._node, self._name)

    def drain(self, failed: list[Finding]) -> bool:
        """Drain the node unless it is out of service already. Returns whether it is out of service now."""
        checks = [finding.check for finding in failed]
        reason = policy.reason(failed)
        asked_s = cache.now_s()
        try:
            record.update(self._node, self._name, checks)  # first: the periodic hook may run at the same time
            scontrol = self._scontrol()
            note = scontrol.note()
            if not policy.may_drain(note):
                states = "+".join(sorted(note.states))
                self._say(syslog.LOG_NOTICE, f"not drained for {reason!r}: it is {states} already ({note.reason})")
                if both := policy.extended(note, checks):
                    scontrol.set_reason(both)
                    self._say(syslog.LOG_ERR, f"drained for more: {both}")
                return True
            scontrol.drain(reason)
        except (NvrxError, ImportError) as error:  # ImportError: a module is missing, or others can change it
            self._say(syslog.LOG_ERR, f"the node cannot be drained for {reason!r}: {error}")
            return False
        record.update(self._node, self._name, checks, asked_s - SETTLE_S)  # it was in service: forget older failures
        self._say(syslog.LOG_ERR, f"drained: {reason}")
        return True

    def ours(self) -> policy.Reason | None:
        """Our reason if the node is plainly drained by us. Asks slurmctld, and records a drain that is not ours."""
        asked_s = cache.now_s()
        try:
            note = self._scontrol().note()
        except NvrxError as error:
            self._say(syslog.LOG_WARNING, f"cannot tell whether this node is drained: {error}")
            return None
        if not policy.may_be_ours(note):
            record.update(self._node, self._name, since_s=asked_s - SETTLE_S)
        return policy.ours(note)

    def undrain(self, why: policy.Reason, recorded: dict[str, float] | None, text: str) -> None:
        """Take the node back unless its reason or record has changed while the checks ran. `text`: for the log."""
        asked_s = cache.now_s()
        try:
            scontrol = self._scontrol()
            if policy.ours(scontrol.note()) != why or self.recorded() != recorded:
                return
            scontrol.undrain()
        except NvrxError as error:
            self._say(syslog.LOG_ERR, f"the node cannot be taken back: {error}")
            return
        self._say(syslog.LOG_NOTICE, f"taken back: {text}")
        if late := record.update(self._node, self._name, since_s=asked_s):  # another hook saw the node drained still
            self.drain([Finding(check, Verdict.FAIL, "failed while the node was taken back") for check in late])

    def _scontrol(self) -> Scontrol:
        from nvrx_slurm.slurm.drain import Scontrol, find

        until_s = min(self._until_s - _MARGIN_S, time.monotonic() + _SCONTROL_S)
        return Scontrol(find(self._path), self._name, until_s)
