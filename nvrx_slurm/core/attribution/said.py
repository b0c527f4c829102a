"""What is said of a fault: one line about it, its evidence, and what the user can do. Pure."""

from __future__ import annotations

from nvrx_slurm.core.attribution.named_node import in_words
from nvrx_slurm.core.attribution.raised import RAISED, failing_line
from nvrx_slurm.types import FaultKind, Finding, RankFault

_BY_SIGNAL = 128  # a shell's exit code for a child that a signal ended is more
_CODE = "Correct the script or its data, where the exception was raised."
with open(f"{__file__.removesuffix('.py')}.txt", encoding="utf-8") as file:
    _BY_END = dict(row.split(": ", 1) for row in file.read().splitlines() if row[0] != "#")


def headline(fault: RankFault) -> str:
    """One line without the traceback: rank, node and fault."""
    where = f"node {fault.infra_rank} ({fault.host})"
    rank = f"rank {fault.rank} (local rank {fault.local_rank}, pid {fault.pid}) on {where}"
    if fault.kind is FaultKind.NODE_LOST and not fault.host:  # no single node is to blame
        return fault.message
    if fault.kind is FaultKind.SIGNAL:
        return f"{rank} was killed by {fault.message or f'signal {-fault.exit_code}'}"
    what = {
        FaultKind.NODE_LOST: f"{where} was lost",
        FaultKind.EXCLUDED: f"{where} was excluded on request of its rank {fault.rank}",
        FaultKind.UNHEALTHY: f"{where} is not healthy",
        FaultKind.EXIT: f"{rank} exited with code {fault.exit_code}",
        FaultKind.HANG: f"{rank} hung",
        FaultKind.LOSS: f"{rank} reported a wrong loss",
        FaultKind.SPAWN: f"{rank} could not be started",
        FaultKind.UNKILLABLE: f"{rank} does not end",
        FaultKind.INEXACT: f"{rank} has to be executed, not forked",
    }[fault.kind]
    return f"{what}: {fault.message}" if fault.message else what


def evidence(fault: RankFault, advises: bool = False, of_site: bool = False) -> str:
    """Lines (each behind a newline) about where a rank failed in the user's code, and in which file its log is.

    If it `advises`, also what the user can do, by rules of the site, too (`of_site`).
    """
    told = {
        "rule": _rule(fault.finding) if fault.finding is not None else "",
        "at": failing_line(fault.traceback) if fault.traceback else "",
        "log": fault.log,
        "to do": what_to_do(fault, of_site) if advises else "",
    }
    return "".join(f"\n  {name}: {text}" for name, text in told.items() if text)


def _rule(f: Finding) -> str:
    """Of a finding: rule, blame and confidence; "" where no rule knows anything."""
    blame = in_words(f.node) if f.node else f.blame.value
    return f"{f.rule} ({blame}, {f.confidence.value})" if f.rule else ""


def what_to_do(fault: RankFault, of_site: bool = False) -> str:
    """One line that a user can act on; "" where there is nothing to say."""
    f = fault.finding
    if f is None or not f.rule or f.rests_on == "exit":
        return _of_end(fault)
    from nvrx_slurm.core.attribution.rules import named  # not at the start: it takes 10 ms

    found = named(f.rule, of_site)
    if found is not None:
        return found.advice
    return _CODE if f.rule == RAISED else ""


def _of_end(fault: RankFault) -> str:
    code = fault.exit_code
    ends = [f"{fault.kind.value} {fault.message.partition(' (')[0]}", fault.kind.value]
    if fault.kind in (FaultKind.SIGNAL, FaultKind.EXIT):
        ends = [f"signal {-code}", f"signal {code - _BY_SIGNAL}", f"code {code}", *ends]
    return next((_BY_END[end] for end in ends if end in _BY_END), "")


def report(fault: RankFault) -> str:
    """The first-cause report, several lines: headline, log file, traceback."""
    told = evidence(fault, advises=True, of_site=True)
    lines = [f"first cause: {headline(fault)}{told}"]
    lines += ["  | " + line for line in fault.traceback.rstrip().splitlines()]
    return "\n".join(lines)
