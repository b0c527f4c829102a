"""Draining this node and taking it back: pure rules, and scontrol.

A reason is `nvrx:CHECK[,CHECK...]:TEXT`: all checks that failed, then one short sentence about the first. A node is
taken back only if root drained it with such a reason and nothing else has happened to it since.

A healthy node asks slurmctld once per hour whether it is drained: the last answer is kept on the node.
"""

from __future__ import annotations

import contextlib
import re
import syslog
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.health import kept
from nvrx_slurm.health.check import CheckFinding, Verdict
from nvrx_slurm.system.hardware import Absent

if TYPE_CHECKING:
    from nvrx_slurm.health.hooks.run import Hook
    from nvrx_slurm.slurm.api.cli import Slurm  # needed for a drain only
    from nvrx_slurm.slurm.api.facts import NodeFacts

# a drain of ours that was missed, as one that slurmctld confirmed late, is found then
ASK_AGAIN_S = 3600.0
_SCONTROL_S = 10.0  # for both calls of a drain together; the prolog has less
# to give up a scontrol that is blocked in the kernel, and to write LOG, before hook.sh ends the hook
_MARGIN_S = 0.8

# --- the rules --------------------------------------------------------------------------------------------------------

MAX_TEXT = 120  # characters of the sentence
_REASON = re.compile(r"nvrx:([a-z0-9-]+(?:,[a-z0-9-]+)*):(.*)", re.ASCII)
# Replaced: characters that structure the output of Slurm's tools or look like their [user@time].
_UNFIT = re.compile(r"[^A-Za-z0-9 ._/:,;()%+*<>'-]", re.ASCII)
# Words of scontrol(1), "NODE STATES", and of older versions. _PLAIN: states that a node drained by us may have besides;
# any other state means that others changed the node.
_PLAIN = frozenset(
    {"DRAIN", "IDLE", "ALLOCATED", "MIXED", "COMPLETING", "RESERVED", "PLANNED", "BLOCKED"}
)
_PLAIN |= {"CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"}
_OUT = frozenset(
    {
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "DOWN",
        "FAIL",
        "FAILING",
        "NOT_RESPONDING",
        "MAINT",
        "MAINTENANCE",
    }
)
_OUT |= {
    "REBOOT",
    "REBOOT_REQUESTED",
    "REBOOT_ISSUED",
    "POWER_DOWN",
    "POWERING_DOWN",
    "POWERED_DOWN",
}


class Reason(NamedTuple):
    """A parsed reason of ours: the checks that failed, and the sentence."""

    checks: tuple[str, ...]
    text: str


def reason(findings: Iterable[CheckFinding], evidence: str = "") -> str:
    """The reason for these failures, at least one. `evidence`: what is known of the job before them, a few words."""
    failed = list(findings)
    text, about = (
        _UNFIT.sub("?", some.replace("=", ":").replace("[", "(").replace("]", ")"))
        for some in (failed[0].text, f" ({evidence})"[:MAX_TEXT] if evidence else "")
    )
    checks = ",".join(dict.fromkeys(finding.check for finding in failed))
    return f"nvrx:{checks}:{text[: MAX_TEXT - len(about)].strip()}{about}"


def parse(text: str) -> Reason | None:
    """The parts of a reason of ours; None for any other text."""
    found = _REASON.fullmatch(text)
    return Reason(tuple(found[1].split(",")), found[2]) if found else None


def may_drain(note: NodeFacts) -> bool:
    """Whether the node is in service. A drain or a reason of others is never overwritten."""
    return bool(note.states) and not note.states & _OUT


def ours(note: NodeFacts) -> Reason | None:
    """The reason if root drained the node with a reason of ours and its state is plainly drained; else None."""
    if note.reason_by != "root" or "DRAIN" not in note.states or not note.states <= _PLAIN:
        return None
    return parse(note.reason)


def may_be_ours(note: NodeFacts) -> bool:
    """Whether we drained the node, even if it is in maintenance, does not respond or reboots now."""
    return note.reason_by == "root" and parse(note.reason) is not None and not may_drain(note)


def extended(note: NodeFacts, checks: Iterable[str]) -> str:
    """Our reason with `checks` added; "" if they are in it already or the drain is not ours."""
    why = parse(note.reason) if may_be_ours(note) else None
    missing = [check for check in dict.fromkeys(checks) if why and check not in why.checks]
    return f"nvrx:{','.join([*why.checks, *missing])}:{why.text}" if why and missing else ""


def recovered(checks: Iterable[str], findings: Iterable[CheckFinding]) -> bool:
    """Whether all these checks pass now. UNKNOWN and NOT_APPLICABLE do not count as a pass."""
    return {finding.check for finding in findings if finding.verdict is Verdict.PASS}.issuperset(
        checks
    )


# --- scontrol ---------------------------------------------------------------------------------------------------------


def drain(hook: Hook, failed: list[CheckFinding]) -> bool:
    """Drain the node unless it is out of service already. Returns whether it is out of service now."""
    why = reason(failed, hook.evidence)
    try:
        slurm = _slurm(hook)
        note = slurm.nodes([hook.name])[hook.name]
        if may_drain(note):
            slurm.update_node(hook.name, "State=DRAIN", f"Reason={why}")
            hook.say(syslog.LOG_ERR, f"drained: {why}")
            return True
        states = "+".join(sorted(note.states))
        hook.say(
            syslog.LOG_NOTICE,
            f"not drained for {why!r}: it is {states} already ({note.reason})",
        )
        if both := extended(note, [finding.check for finding in failed]):
            slurm.update_node(hook.name, f"Reason={both}")
            hook.say(syslog.LOG_ERR, f"drained for more: {both}")
        return True
    except (
        NvrxError,
        ImportError,
    ) as error:  # ImportError: a module is missing, or others can change it
        hook.say(syslog.LOG_ERR, f"the node cannot be drained for {why!r}: {error}")
        return False
    finally:
        _keep_in_service(hook, False)


def drained(hook: Hook) -> Reason | None:
    """Our reason if the node is plainly drained by us; slurmctld is asked only where that is possible."""
    if _was_in_service(hook):
        return None
    try:
        note = _slurm(hook).nodes([hook.name])[hook.name]
    except NvrxError as error:
        hook.say(syslog.LOG_WARNING, f"cannot tell whether this node is drained: {error}")
        return None
    _keep_in_service(hook, not may_be_ours(note))
    return ours(note)


def undrain(hook: Hook, why: Reason, text: str) -> None:
    """Take the node back unless its reason has changed while the checks ran. `text`: for the log."""
    try:
        slurm = _slurm(hook)
        if ours(slurm.nodes([hook.name])[hook.name]) != why:
            return
        slurm.update_node(hook.name, "State=UNDRAIN")
    except NvrxError as error:
        hook.say(syslog.LOG_ERR, f"the node cannot be taken back: {error}")
        return
    hook.say(syslog.LOG_NOTICE, f"taken back: {text}")


def _was_in_service(hook: Hook) -> bool:
    """Whether slurmctld said within the last hour, and since boot, that we did not drain the node."""
    with contextlib.suppress(OSError, Absent):
        asked_s = kept.recall(hook.node, f"in-service-{hook.name}").get("asked_s")
        return isinstance(asked_s, float) and kept.now_s() - asked_s < ASK_AGAIN_S
    return False


def _keep_in_service(hook: Hook, is_in_service: bool) -> None:
    answer = {"asked_s": kept.now_s()} if is_in_service else {}
    with contextlib.suppress(OSError, Absent):
        kept.remember(hook.node, f"in-service-{hook.name}", answer)


def _slurm(hook: Hook) -> Slurm:
    from nvrx_slurm.slurm.api.cli import Slurm
    from nvrx_slurm.slurm.api.tools import Tools, find

    until_s = min(hook.until_s - _MARGIN_S, time.monotonic() + _SCONTROL_S)
    return Slurm(Tools(trusted=find(hook.scontrol), until_s=until_s))
