"""What is said of a fault: one line about it, its evidence, and what the user can do. Pure."""

from __future__ import annotations

from nvrx_slurm.core.attribution.named_node import in_words
from nvrx_slurm.core.attribution.raised import RAISED, failing_line
from nvrx_slurm.types import FaultKind, Finding, RankFault

_BY_SIGNAL = 128  # a shell's exit code for a child that a signal ended is more
_ENDS = (FaultKind.SIGNAL, FaultKind.EXIT)
_CODE = "Correct the script or its data, where the exception was raised."
_BY_KIND = {
    FaultKind.HANG: (
        "Look at hang.json of the cycle: who waits for whom, and where. A timeout may be too short."
    ),
    FaultKind.LOSS: (
        "Look at its loss before: data, learning rate, precision, or a GPU that computes wrong."
    ),
    FaultKind.NODE_LOST: (
        "Nothing: the job goes on with the other nodes or a spare."
        " Report a node that is lost again."
    ),
    FaultKind.UNHEALTHY: "Report the node: its health check failed.",
    FaultKind.UNKILLABLE: (
        "Report the node: a process there does not end, as with a stuck driver or file system."
    ),
    FaultKind.INEXACT: (
        "Export the variable in the batch script; then ranks are forked from the start."
    ),
    FaultKind.SPAWN: "Correct path and mode of the program, or the image.",
    FaultKind.SIGNAL: "Look for what sent this signal, and at the last lines of its log.",
    FaultKind.EXIT: "No rule knows its words: read its last lines, and those of the other ranks.",
}
# What a signal means for a program, where nothing else is known. A shell tells it as 128 + its number.
_BY_SIGNAL_NUMBER = {
    2: "It was interrupted (SIGINT): by a person or by the program that started it.",
    3: "It was told to quit (SIGQUIT), mostly by a process of its own job.",
    4: (
        "An instruction that this processor does not have: use builds for it."
        " On one node only: report that node."
    ),
    6: "The program ended itself (abort): its last lines and the stack above say why.",
    7: (
        "A page could not be read: look at /dev/shm, at full disks"
        " and at the file system of a mapped file."
    ),
    8: ("Native code divided by zero, or the like: look at the core file or the stack above."),
    9: "Look for what killed it: the out-of-memory killer (dmesg, sacct), or a person.",
    11: ("Native code used memory that is not its own: look at the core file or the stack above."),
    15: "It was asked to end from outside: scancel, preemption, a time limit, or a peer's failure.",
    31: ("A system call is forbidden here: look at the seccomp profile of the container."),
}
_BY_CODE = {
    255: (
        "Code 255 says only that it failed (-1 in many programs, ssh and srun):"
        " its last lines say more."
    ),
}


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
    signal = -code if code < 0 else code - _BY_SIGNAL
    of_end = _BY_SIGNAL_NUMBER.get(signal) or _BY_CODE.get(code)
    if of_end and fault.kind in _ENDS:
        return of_end
    return _BY_KIND.get(fault.kind, "")


def report(fault: RankFault) -> str:
    """The first-cause report, several lines: headline, log file, traceback."""
    told = evidence(fault, advises=True, of_site=True)
    lines = [f"first cause: {headline(fault)}{told}"]
    lines += ["  | " + line for line in fault.traceback.rstrip().splitlines()]
    return "\n".join(lines)
