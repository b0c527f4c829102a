"""The ranks' side of the tests of ranks that leave, and of lost stores, monitor processes and barrier servers."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from scenarios import Rank, block, files, pause, scenario, throw

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess.resources import _job


@scenario
def leaves_at(rank: Rank) -> None:
    """Rank 2 raises in iteration 0. Between its `finalize` and its next `initialize` rank `victim` leaves."""
    mine, nth, calls = rank.initial == rank.arguments["victim"], rank.arguments["nth"], 0

    def look(frame: FrameType, event: str, _: object) -> None:
        """Raise, as a signal handler may, at the `nth` call of a function of the wrapper (0: never)."""
        nonlocal calls
        if event == "call" and "/nvrx_slurm/inprocess/" in frame.f_code.co_filename:
            calls += 1
            if calls == nth:
                sys.setprofile(None)
                rank.say("fault", where=f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
                sys.exit(5)

    class First(inprocess.finalize.Finalize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            sys.setprofile(look if mine else None)
            return state

    class Last(inprocess.initialize.Initialize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            if mine:
                sys.setprofile(None)
                rank.say("calls", number=calls, iteration=state.iteration)
            return state

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            throw(ValueError("wanted")) if rank.initial == 2 else block()
        return "done"

    rank.call(fn, finalize=First(), initialize=Last())


@scenario
def leaves_at_entry(rank: Rank) -> None:
    """Rank `victim` leaves, or is killed, before it has reported that it is there."""
    mine = os.getpid()

    def make() -> inprocess.store.TCPStore:
        if os.getpid() == mine and rank.initial == rank.arguments["victim"]:
            rank.say("fault")
            if rank.arguments.get("how") == "kill":
                os.kill(mine, signal.SIGKILL)
            sys.exit(5)
        return inprocess.store.TCPStore()

    rank.call(rank.entered, store_factory=make, monitor_process_logfile=str(rank.tmp / "monitor{rank}.log"))


@scenario
def abort_and_stay(rank: Rank) -> None:
    """Rank 0 leaves in iteration 0, and lives on until it has no child process any more."""

    def fn(call: CallWrapper) -> str:
        if call.iteration == 0:
            rank.together("entered")
            throw(inprocess.exception.RestartAbort("enough")) if rank.initial == 0 else block()
        return "done"

    with contextlib.suppress(inprocess.exception.RestartAbort):
        rank.call(fn)
    while any(path.read_text() for path in Path("/proc/self/task").glob("*/children")):
        pause(0.01)
    rank.say("childless")


@scenario
def garbage(rank: Rank) -> None:
    """Rank 1 writes a record about its fault that no barrier server can read."""
    port = int(os.environ["MASTER_PORT"])

    def fn(call: CallWrapper) -> None:
        if rank.initial != 1:
            block()
        keys = inprocess.store.TCPStore("127.0.0.1", port).view(f"nvrx/{_job()}/0/0/")
        rank.say("fault", number=keys.add("records", 1))
        keys.set("record/1", "garbage")
        raise ValueError("wanted")

    rank.call(fn, **files(rank))


@scenario
def script(rank: Rank) -> None:
    """`argv`, in the directory `cwd`, as the interpreter would; its output are the rank's events."""
    import runpy

    sys.argv = rank.arguments["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    os.chdir(rank.arguments["cwd"])
    os.dup2(rank.events, 1)
    runpy.run_path(sys.argv[0], run_name="__main__")
