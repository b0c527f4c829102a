#!/usr/bin/env python3
"""Count how often one restart goes from one file of `nvrx_slurm/core` to another: `python scripts/lib/moves.py`.

The scenario: an any-failed job of two nodes; a rank of node 0 fails, and its agent reports what it has read in the
rank's output; then both nodes stop. A move is a call from a function in one file to a function in another one.
The account (`core/account/follower.py`) is not on the way: nothing follows the coordinator here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))
CORE = str(REPO / "nvrx_slurm" / "core")

from nvrx_slurm import types as t  # noqa: E402
from nvrx_slurm.core.coordinator import events as ev  # noqa: E402
from nvrx_slurm.declared import replace  # noqa: E402
from tests.core.samples import a_fault  # noqa: E402
from tests.core.stories import Story  # noqa: E402

FINDING = t.Finding("", t.LineRole.UNCLEAR, t.Blame.UNKNOWN, t.Confidence.GUESS, t.Remedy.RESTART)


def moves(work: Callable[[], object]) -> list[tuple[str, str, str]]:
    """(from file, to file, function) of each move while `work` runs."""
    found: list[tuple[str, str, str]] = []

    def profile(frame: FrameType, event: str, _: Any) -> None:
        caller, callee = frame.f_back, frame.f_code
        if event != "call" or not callee.co_filename.startswith(CORE) or caller is None:
            return
        while caller is not None and not caller.f_code.co_filename.startswith(CORE):  # generated code, sorted(key=)
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != callee.co_filename:
            names = (Path(caller.f_code.co_filename).name, Path(callee.co_filename).name)
            found.append((*names, callee.co_name))

    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    """Print both ways."""
    rehearsal, story = Story(), Story()
    ways: list[tuple[str, list[tuple[str, str, str]]]] = []
    for one in (rehearsal, story):  # the first one imports what is imported late
        one.begin("running", "2 of 2")
        fault = replace(a_fault(0), finding=FINDING)
        failed = ev.FromAgent("h0.0", t.RanksFailed(1, 0, (fault,)))
        events = [failed, one.event("stops", ["0"]), one.event("stops", ["1"])]
        ways = [
            ("a fault to Stop", moves(partial(one.core.step, events[0], 100.0))),
            ("two Ready to a plan", [move for e in events[1:] for move in moves(partial(one.core.step, e, 101.0))]),
        ]
    for title, found in ways:
        files = {name for move in found for name in move[:2]}
        print(f"{title}: {len(found)} moves between {len(files)} files")
        if "-v" in sys.argv:
            print(*(f"  {a:16} -> {b:16} {what}" for a, b, what in found), sep="\n")


if __name__ == "__main__":
    main()
