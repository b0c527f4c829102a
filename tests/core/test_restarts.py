"""Restart or give up, which fault was the first, and the sentences about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nvrx_slurm.core.restarts import Decision, decide, first_cause, headline, report
from nvrx_slurm.types import FaultKind, RankFault

from .benches import a_fault

EXIT = a_fault(1)
ABORT = a_fault(2, FaultKind.SIGNAL, -6)
KILLED = a_fault(3, FaultKind.SIGNAL, -9)
HANG = a_fault(4, FaultKind.HANG, -9)
LOST = RankFault(FaultKind.NODE_LOST, "h5", 5, message="connection reset")
SPAWN = a_fault(6, FaultKind.SPAWN)
STUCK = a_fault(7, FaultKind.UNKILLABLE)


@pytest.mark.parametrize(
    ("faults", "cause"),
    [
        ([], None),
        ([EXIT], EXIT),
        ([EXIT, ABORT], EXIT),  # of those that may follow from others, the first to arrive
        ([ABORT, EXIT], ABORT),
        ([EXIT, KILLED], KILLED),  # a peer's connection error was reported sooner than what caused it
        ([EXIT, HANG], HANG),
        ([ABORT, LOST], LOST),
        ([EXIT, SPAWN], SPAWN),
        ([EXIT, STUCK], STUCK),
        ([EXIT, LOST, KILLED], LOST),  # of those that do not follow from others, too
    ],
)
def test_first_cause(faults: list[RankFault], cause: RankFault | None) -> None:
    assert first_cause(faults) == cause


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (EXIT, "rank 2 (local rank 0, pid 4711) on node 1 (h1) exited with code 1: boom"),
        (replace(EXIT, message=""), "rank 2 (local rank 0, pid 4711) on node 1 (h1) exited with code 1"),
        (KILLED, "rank 6 (local rank 0, pid 4711) on node 3 (h3) was killed by boom"),
        (replace(KILLED, message=""), "rank 6 (local rank 0, pid 4711) on node 3 (h3) was killed by signal 9"),
        (HANG, "rank 8 (local rank 0, pid 4711) on node 4 (h4) hung: boom"),
        (LOST, "node 5 (h5) was lost: connection reset"),
        (replace(LOST, host=""), "connection reset"),
        (SPAWN, "rank 12 (local rank 0, pid 4711) on node 6 (h6) could not be started: boom"),
        (STUCK, "rank 14 (local rank 0, pid 4711) on node 7 (h7) does not end: boom"),
    ],
)
def test_headline(fault: RankFault, text: str) -> None:
    assert headline(fault) == text


@pytest.mark.parametrize(
    ("used", "allowed", "decision"),
    [
        (0, 3, Decision(True, 0, "node 5 (h5) was lost: connection reset; restart 1 of 3")),
        (2, 3, Decision(True, 0, "node 5 (h5) was lost: connection reset; restart 3 of 3")),
        (3, 3, Decision(False, 1, "node 5 (h5) was lost: connection reset; all 3 restarts are used")),
        (
            0,
            0,
            Decision(False, 1, "node 5 (h5) was lost: connection reset; no restart was allowed (--max-restarts=0)"),
        ),
    ],
)
def test_decide(used: int, allowed: int, decision: Decision) -> None:
    assert decide(used, allowed, LOST) == decision


def test_a_report_has_the_log_and_the_traceback() -> None:
    fault = replace(EXIT, log="/logs/rank_2.err", traceback="Traceback:\n  File x\n")
    assert report(fault).splitlines()[1:] == ["  log: /logs/rank_2.err", "  | Traceback:", "  |   File x"]
