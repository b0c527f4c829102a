"""What ranks do in the tests that take away what the wrapper relies on: its monitor processes, its coordinator, its
store. Rank `victim` raises when the file "fault" is there; ranks `slow` finalize only when the file "go" is."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from scenarios import Rank, block, pause, scenario

from nvrx_slurm import inprocess
from nvrx_slurm.core.inprocess.rollcall import Arrival, Status
from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess.attribution import Interruption, InterruptionRecord
from nvrx_slurm.inprocess.meeting.barriers import Iteration, serve_barrier
from nvrx_slurm.inprocess.meeting.store import StoreView
from nvrx_slurm.inprocess.monitor_thread import MonitorThread
from nvrx_slurm.inprocess.assigning import _AssigningView
from nvrx_slurm.inprocess.watch.page import Page


def await_file(rank: Rank, name: str) -> None:
    while not (Path(rank.arguments["tmp"]) / name).exists():
        pause(0.005)


class Finalize(inprocess.plugins.finalize.Finalize):
    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        self.rank.say("finalize")
        if self.rank.initial in self.rank.arguments.get("slow", []):
            await_file(self.rank, "go")
        return state


class Initialize(inprocess.plugins.initialize.Initialize):
    """On reserves, too."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank

    def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
        self.rank.say("initialize")
        return state


def where(rank: Rank) -> dict[str, Any]:
    """The store, and the monitor processes' files."""
    place = rank.arguments["tmp"]
    files = {f"monitor_process_{kind}file": os.path.join(place, "monitor{rank}." + kind[:3]) for kind in ("pid", "log")}
    if rank.arguments.get("file_store"):
        path = os.path.join(place, "store")
        return {**files, "store_factory": inprocess.meeting.store.FileStore, "store_kwargs": {"file_name": path}}
    if port := rank.arguments.get("own_store"):
        return {**files, "store_factory": OwnStore, "store_kwargs": {"port": port}}
    return files


class OwnStore(dist.TCPStore):
    """Of a user: torch's, whose server has nothing to do with the ranks."""

    def __init__(self, port: int) -> None:
        super().__init__("127.0.0.1", port, wait_for_workers=False)


@scenario
def one_fault(rank: Rank) -> None:
    """In iteration 0 all wait until rank `victim` raises; with `active`, so many ranks are active."""
    active = inprocess.plugins.rank_assignment.MaxActiveWorldSize(rank.arguments.get("active"))
    assignment = inprocess.Compose(active, inprocess.plugins.rank_assignment.ShiftRanks())

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            if rank.initial == rank.arguments.get("victim"):
                await_file(rank, "fault")
                rank.say("fault")
                raise ValueError("wanted")
            block()
        return "done"

    rank.call(fn, rank_assignment=assignment, initialize=Initialize(rank), finalize=Finalize(rank), **where(rank))


@scenario
def serve(rank: Rank) -> None:
    """Not a rank: the server of the store, in a process of its own, as a launcher may have one."""
    port = int(os.environ["MASTER_PORT"])
    server = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    rank.say("serving")
    block()
    del server


@scenario
def enters(rank: Rank) -> None:
    """The server of the store, process `server`, is stopped when rank 1 has made its `nth` store."""
    mine, made = os.getpid(), []

    def make() -> Any:
        store = inprocess.meeting.store.TCPStore()
        if os.getpid() == mine and rank.initial == 1:
            made.append(1)
            if len(made) == rank.arguments["nth"]:
                os.kill(rank.arguments["server"], signal.SIGSTOP)
                rank.say("fault")
        return store

    rank.call(rank.entered, store_factory=make)


@scenario
def abort_and_stay(rank: Rank) -> None:
    """Rank 0 leaves in iteration 0, and lives on until it has no child process any more."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 0:
                raise inprocess.exception.RestartAbort("enough")
            block()
        return "done"

    with contextlib.suppress(inprocess.exception.RestartAbort):
        rank.call(fn, **where(rank))
    while any(path.read_text() for path in Path("/proc/self/task").glob("*/children")):
        pause(0.01)
    rank.say("childless")


@scenario
def fork_fails(rank: Rank) -> None:
    """On rank 1 no process can be made for two tries after it has lost its monitor process; then rank 0 raises."""
    fork, refused = os.fork, []

    def refuse() -> int:
        if len(refused) == 2:
            return fork()
        refused.append(1)
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 1:
                os.fork = refuse
                path = Path(rank.arguments["tmp"]) / "monitor1.pid"
                first = path.read_text()
                os.kill(int(first), signal.SIGKILL)
                while path.read_text() in ("", first):
                    pause(0.01)
                rank.say("replaced", refused=len(refused))
                (Path(rank.arguments["tmp"]) / "fault").touch()
            if rank.initial == 0:
                await_file(rank, "fault")
                raise ValueError("wanted")
            block()
        return "done"

    rank.call(fn, **where(rank))


@scenario
def garbage(rank: Rank) -> None:
    """Rank 1 says about its fault what no coordinator can read."""
    from nvrx_slurm.inprocess.helpers import _job

    port = int(os.environ["MASTER_PORT"])

    def fn(call: CallWrapper) -> None:
        rank.entered(call)
        if rank.initial == 1:
            keys = inprocess.meeting.store.TCPStore("127.0.0.1", port).view(f"nvrx/{_job()}/0/0/")
            rank.say("fault", number=keys.add("records", 1))
            keys.set("record/1", "garbage")
            raise ValueError("wanted")
        block()

    rank.call(fn, **where(rank))


@scenario
def waits(rank: Rank) -> None:
    """Not a rank: waits in one of the ways that ranks wait for each other, for 2 s, until some time after "go"."""
    port = int(os.environ["MASTER_PORT"])
    here, there = (StoreView(dist.TCPStore("127.0.0.1", port, wait_for_workers=False)) for _ in range(2))
    this, bound_s = Iteration(here, 0), 2.0
    this.interrupt(InterruptionRecord(0, Interruption.EXCEPTION))

    def tell() -> str:
        pause(0.3)
        rank.say("waiting")  # for a while by now
        await_file(rank, "go")
        pause(0.3)
        there.set("1/assign/key" if rank.arguments["what"] == "assignment" else "key", "1")
        Iteration(there, 0).arrive(0, Arrival(Status.READY, 0, 1))
        return "in time"

    def answer() -> str:
        thread = MonitorThread(Page())
        thread.start()
        return thread.call(tell, bound_s)

    def came() -> str:
        view = _AssigningView(Iteration(here, 1)) if rank.arguments["what"] == "assignment" else here
        return "in time" if view.came(["key"], bound_s) else "too late"

    def verdict() -> str:
        return "too late" if serve_barrier(this, 1, (), bound_s, lambda: None).gone else "in time"

    if rank.arguments["what"] != "answer":
        threading.Thread(target=tell, daemon=True).start()
    rank.say("waited", result={"answer": answer, "coordinate": verdict}.get(rank.arguments["what"], came)())
