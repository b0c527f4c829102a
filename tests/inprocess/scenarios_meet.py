"""What ranks do in the tests of where process groups meet: some are in `init_process_group`, or about to be, when
another one fails; and a second wrapped function is called."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import signal
import sys
from typing import Any

from scenarios import Rank, block, scenario
from scenarios_lost import await_file, where

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper


def _touch(rank: Rank, name: str) -> None:
    open(os.path.join(rank.arguments["tmp"], f"{name}.{rank.initial}"), "w").close()


def _after(module: Any, name: str, then: Any) -> None:
    """Call `then` whenever torch has called its own function of that name."""
    own = getattr(module, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        value = own(*args, **kwargs)
        then(*args)
        return value

    setattr(module, name, both)


def _hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(1000)


FAULTS = {
    "hang": _hold_the_gil,
    "raise": lambda: (_ for _ in ()).throw(OSError("no data set")),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(3),
}


@scenario
def fails_before_meeting(rank: Rank) -> None:
    """Rank `victim` does `how` in iteration `at`, before it calls `init_process_group`, while the others are in it."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    iteration = [0]
    _after(c10d, "_process_group_name", lambda *_: _touch(rank, f"in{iteration[0]}"))  # it has counted
    others = [one for one in range(int(rank.arguments["world_size"])) if one != rank.arguments["victim"]]

    def fn(call: CallWrapper) -> float:
        iteration[0] = call.iteration
        rank.entered(call, groups=c10d._world.group_count)
        if call.iteration == rank.arguments.get("at", 0) and rank.initial == rank.arguments["victim"]:
            for other in others:
                await_file(rank, f"in{call.iteration}.{other}")
            rank.say("fault")
            FAULTS[rank.arguments["how"]]()
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    assignment = {}
    if shift := rank.arguments.get("shift"):
        assignment = {"rank_assignment": Turned(shift)}
    rank.call(fn, **where(rank), **assignment)


class Turned(inprocess.plugins.rank_assignment.RankAssignment):
    """As by default, but the first rank is another one: not that of the store and the coordinator."""

    def __init__(self, shift: int) -> None:
        self._shift = shift
        self._default = inprocess.Compose(
            inprocess.plugins.rank_assignment.ActivateAllRanks(), inprocess.plugins.rank_assignment.ShiftRanks()
        )

    def __call__(self, ctx: Any) -> Any:
        ctx = self._default(ctx)
        if ctx.state.iteration == 0:
            size = ctx.state.active_world_size
            ctx.state.rank = ctx.state.active_rank = (ctx.state.rank + self._shift) % size
        return ctx


@scenario
def half_made(rank: Rank) -> None:
    """In iteration 0 ranks 0 and 1 have met; rank 2 has a process group that torch has not made the world yet."""
    import torch
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    own = c10d._update_default_pg

    def update(group: Any) -> None:
        if (
            group is not None
            and rank.initial == 2
            and not os.path.exists(os.path.join(rank.arguments["tmp"], "half.2"))
        ):
            rank.say("half", groups=len(c10d._world.pg_names))
            _touch(rank, "half")
            block()
        own(group)

    c10d._update_default_pg = update

    def fn(call: CallWrapper) -> float:
        rank.entered(call, groups=c10d._world.group_count, names=len(c10d._world.pg_names))
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
        if call.iteration == 0:
            if rank.initial == 1:
                await_file(rank, "half.2")
                raise OSError("no data set")
            block()
        total = torch.ones(1)
        dist.all_reduce(total)
        return float(total)

    rank.call(fn)


@scenario
def hooked(rank: Rank) -> None:
    """torch wraps `sys.excepthook` in every iteration."""
    import torch.distributed as dist

    before = sys.excepthook

    def fn(call: CallWrapper) -> None:
        at_start = sys.excepthook is before
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))
        rank.say("hooked", iteration=call.iteration, at_start=at_start, wrapped=sys.excepthook is not before)
        if call.iteration < 3:
            raise ValueError("once more")
        dist.destroy_process_group()

    rank.call(fn)
    rank.say("after", same=sys.excepthook is before)


@scenario
def two_calls(rank: Rank) -> None:
    """One after the other; rank `victim` is lost in the first one, as `how` says."""

    def first(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0 and rank.initial == rank.arguments.get("victim"):
            rank.say("fault")
            FAULTS[rank.arguments["how"]]()
        if call.iteration == 0 and "victim" in rank.arguments:
            block()
        return "first"

    def second(call: CallWrapper) -> str:
        rank.entered(call, second=True)
        if call.iteration == 0 and "fault_in_second" in rank.arguments:
            rank.together("second", gone=1)
            if rank.initial == rank.arguments["fault_in_second"]:
                raise ValueError("second")
            block()
        return f"second of {os.environ['WORLD_SIZE']}"

    left: Any = SystemExit if rank.arguments.get("comes_back") else ()
    with contextlib.suppress(left):
        rank.call(first, **where(rank))
    rank.call(second, **where(rank))


@scenario
def gives_up(rank: Rank) -> None:
    """The first start of the ranks by torchrun ends with RestartAbort on all of them; the second one does not."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("of the first start")
        return "done"

    rank.call(fn, initialize=inprocess.plugins.initialize.RetryController(max_iterations=1), **where(rank))
