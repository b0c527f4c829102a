"""The ranks' side of the tests of how the function is stopped in the middle of something."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from scenarios import Rank, block, pause, scenario

from nvrx_slurm.inprocess import CallWrapper


def _task_group(rank: Rank) -> None:
    async def busy() -> None:
        while True:
            await asyncio.sleep(0)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(busy())
            group.create_task(busy())
            _met(rank)

    asyncio.run(main())


def _exit(rank: Rank) -> None:
    try:
        sys.exit(5)
    finally:
        _met(rank)
        block()


def _met(rank: Rank) -> None:
    rank.say("met")
    (rank.tmp / "met").touch()


STOPPED = {"task group": _task_group, "exit": _exit}


@scenario
def stopped_in(rank: Rank) -> None:
    """Rank 0 raises when rank 1 is in the middle of `what`."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            if rank.initial == 1:
                STOPPED[rank.arguments["what"]](rank)
            rank.await_file("met")
            raise ValueError("fault of rank 0")
        return f"{rank.initial} done"

    rank.call(fn)


def _lock_is_free(lock: Any) -> bool:
    """Asked by a thread that does not hold it, as RLocks want."""
    with ThreadPoolExecutor(1) as other:
        free: bool = other.submit(lock.acquire, False).result()
        if free:
            other.submit(lock.release).result()
    return free


class _Logs:
    def __init__(self) -> None:
        self.logger, self.came = logging.getLogger("of the user"), list[str]()
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115

    def __call__(self) -> None:
        self.logger.info("on we go")

    def left(self) -> list[str]:
        return self.came if _lock_is_free(self.logger.handlers[0].lock) else ["the handler's lock"]


class _LogsWithSigurg(_Logs):
    """Which the user handles, so that it is not ours to raise."""

    def __init__(self) -> None:
        super().__init__()
        signal.signal(signal.SIGURG, lambda *_: self.came.append("SIGURG"))


class _StartsThreads:
    """As a DataLoader does."""

    def __call__(self) -> None:
        ran: list[int] = []
        thread = threading.Thread(target=ran.append, args=(1,))
        thread.start()
        thread.join()
        assert ran

    def left(self) -> list[str]:
        return []


class _Autocasts:
    def __call__(self) -> None:
        with torch.autocast("cpu"), torch.no_grad():
            torch.ones(2)

    def left(self) -> list[str]:
        return ["autocast"] * torch.is_autocast_enabled("cpu") + ["no_grad"] * (not torch.is_grad_enabled())


class _Starts:
    """Processes that wait for something; nobody but this object ends them. It knows them before they are started."""

    def __init__(self) -> None:
        known = self._known = []  # type: list[Any]

        class Program(subprocess.Popen):  # type: ignore[type-arg]
            def __init__(self) -> None:
                known.append(self)
                super().__init__(["/bin/sleep", "1000"])

        self._program = Program

    def __call__(self) -> None:
        self.end_all()
        self._program()
        self._known.append(multiprocessing.get_context("fork").Process(target=pause, args=(1000,), daemon=True))
        self._known[-1].start()

    def end_all(self) -> None:
        while self._known:
            one = self._known[-1]
            if getattr(one, "pid", None):
                one.kill()
                one.wait() if isinstance(one, subprocess.Popen) else one.join()
            self._known.pop()

    def left(self) -> list[str]:
        self.end_all()
        multiprocessing.active_children()  # reaps
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        names = [Path(f"/proc/{pid}/comm").read_text().strip() for pid in children]
        return [name for name in names if name != "nvrx-monitor"]


MIDDLES = {
    "logging": _Logs,
    "logging, SIGURG handled": _LogsWithSigurg,
    "autocast": _Autocasts,
    "starting threads": _StartsThreads,
    "starting processes": _Starts,
}


@scenario
def over_and_over(rank: Rank) -> None:
    """Rank 0 fails, at some moment while rank 1 does `what`, in each of the first `rounds` iterations."""
    do = MIDDLES[rank.arguments["what"]]() if rank.initial == 1 else None
    left: list[str] = []

    def fn(call: CallWrapper) -> list[str]:
        if do is not None:
            left.extend(do.left())
        if call.iteration == rank.arguments["rounds"]:
            return left
        rank.together(f"round{call.iteration}")
        if do is None:
            pause(0.001 * (call.iteration % 10))
            raise ValueError("once more")
        while True:
            do()

    rank.call(fn)
