"""What ranks do in the tests of a rank that ends, or never gets on, in the middle of a restart or at the very end."""

from __future__ import annotations

import signal
import sys
from typing import Any

from scenarios import PLUGINS, Assignment, Plugin, Rank, block, scenario

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper


def _raise() -> None:
    raise ValueError("plug-in")


def _abort() -> None:
    raise inprocess.exception.RestartAbort("plug-in")


ENDS = {"wait": block, "exit": lambda: sys.exit(4), "raise": _raise, "abort": _abort, "wrong": lambda: 42}


@scenario
def ended(rank: Rank) -> None:
    """When all have entered, the ranks `victims` raise; from then on rank 1 does `how` in its plug-in `place`. With
    `handler`, SIGTERM makes it leave."""
    if rank.arguments.get("handler"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
    entered: list[int] = []

    def at(kind: type[Plugin]) -> Any:
        class Here(kind):  # type: ignore[misc,valid-type]
            def __call__(self, what: Any) -> Any:
                if entered and rank.initial == 1 and self.name == rank.arguments["place"]:
                    rank.say("fault")
                    return ENDS[rank.arguments["how"]]() or what
                return what

        return Here

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            entered.append(1)
            rank.together("entered")
            if rank.initial in rank.arguments["victims"]:
                raise inprocess.exception.RestartAbort if rank.arguments["place"] == "terminate" else ValueError
            if rank.arguments["victims"]:
                block()
        return f"{rank.initial} done"

    ranks = inprocess.plugins.rank_assignment
    assignment = inprocess.Compose(ranks.ShiftRanks(), at(Assignment)(rank, "rank_assignment"))
    plugins = {name: at(kind)(rank, name) for name, kind in PLUGINS.items()}
    rank.call(fn, rank_assignment=assignment, **plugins)
