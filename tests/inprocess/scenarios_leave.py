"""What ranks do in the tests of ranks that leave, are discarded, or are declared gone while they are away."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from scenarios import Rank, block, pause, scenario
from scenarios_lost import await_file, where

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess.meeting.barriers import Iteration


class Injection:
    """Raises what a signal's handler may raise, when the wrapper calls its `nth` function (0: never)."""

    def __init__(self, rank: Rank, nth: int) -> None:
        self.rank, self.nth, self.calls = rank, nth, 0

    def start(self) -> None:
        sys.setprofile(self._look)

    def stop(self) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or "/nvrx_slurm/inprocess/" not in frame.f_code.co_filename:
            return
        self.calls += 1
        if self.calls == self.nth:
            self.stop()
            self.rank.say("fault", where=f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
            sys.exit(5)


@scenario
def leaves_at(rank: Rank) -> None:
    """Rank 2 raises in iteration 0. Between its `finalize` and its next `initialize` rank `victim` leaves."""
    injection = Injection(rank, rank.arguments["nth"])
    mine = rank.initial == rank.arguments["victim"]

    class First(inprocess.plugins.finalize.Finalize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            if mine:
                injection.start()
            return state

    class Last(inprocess.plugins.initialize.Initialize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            if mine:
                injection.stop()
                rank.say("calls", number=injection.calls, iteration=state.iteration)
            return state

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 2:
                raise ValueError("wanted")
            block()
        return "done"

    rank.call(fn, finalize=First(), initialize=Last())


@scenario
def leaves_at_entry(rank: Rank) -> None:
    """Rank `victim` leaves, or is killed, before it has said that it is there."""
    mine = os.getpid()
    place = Path(rank.arguments["tmp"])

    def make() -> inprocess.meeting.store.TCPStore:
        if os.getpid() == mine and rank.initial == rank.arguments["victim"]:
            rank.say("fault")
            if rank.arguments.get("how") == "kill":
                os.kill(mine, signal.SIGKILL)
            sys.exit(5)
        return inprocess.meeting.store.TCPStore()

    rank.call(rank.entered, store_factory=make, monitor_process_logfile=str(place / "monitor{rank}.log"))


@scenario
def discards(rank: Rank) -> None:
    """Ranks come in pairs. Rank 2 dies in iteration 0; the others run until "go"."""
    ranks = inprocess.plugins.rank_assignment

    def pair(state: inprocess.State) -> str:
        return str(state.initial_rank // 2)

    if rank.arguments["how"] == "tree":
        assignment = ranks.Tree(
            [ranks.Layer(1, None, "root", ranks.LayerFlag.RESERVE), ranks.Layer(2, 2, pair, ranks.LayerFlag.RESERVE)]
        )
    else:
        whole = ranks.FilterCountGroupedByKey(pair, lambda count: count == 2)
        assignment = inprocess.Compose(ranks.ActivateAllRanks(), ranks.ShiftRanks(), whole)

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        await_file(rank, "go")
        return "done"

    rank.call(fn, rank_assignment=assignment, **where(rank))


@scenario
def goes_on(rank: Rank) -> None:
    """Iteration 0 lasts until it is interrupted; rank 0 raises in iterations 1 to 4; iteration 5 lasts until "go"."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            block()
        if call.iteration < 5 and rank.initial == 0:
            raise ValueError("wanted")
        await_file(rank, "go")
        return "done"

    rank.call(fn, **where(rank))


@scenario
def no_start(rank: Rank) -> None:
    """What rank 0 says about where to meet in iteration 1 is lost."""
    publish = Iteration.publish_start

    def lose(this: Iteration, address: str, port: int) -> None:
        if this.number == 1:
            rank.say("fault")
        else:
            publish(this, address, port)

    Iteration.publish_start = lose  # type: ignore[method-assign]

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0 and rank.initial == 2:
            raise ValueError("wanted")
        if call.iteration < 2:
            block()
        return "done"

    rank.call(fn)


@scenario
def terminate_blocks(rank: Rank) -> None:
    """Rank 1 leaves, and its `terminate` never returns."""

    class Blocks(inprocess.plugins.terminate.Terminate):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            rank.say("terminate")
            pause(1000)
            return state

    def fn(call: CallWrapper) -> str:
        if call.iteration == 1:
            return "done"
        rank.together("round")
        sys.exit(3) if rank.initial == 1 else block()
        return ""

    rank.call(fn, terminate=Blocks())
