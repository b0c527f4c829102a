"""What ranks do in the tests of what is odd about their process: children of its own, closed streams, no rank 0."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from scenarios import Plugin, Rank, block, pause, scenario
from scenarios_lost import await_file, where

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess.watch.page import MANUAL, UNPROTECTED


def _raise() -> str:
    raise ValueError("of the child")


ENDS = {"raise": _raise, "exit": lambda: sys.exit(3), "return": lambda: "of the child"}


@scenario
def forks(rank: Rank) -> None:
    """In iteration 0 rank 1 forks in `place`, where the child does `how`; when the file "fault" is there, it dies."""

    def fork_at(place: str) -> tuple[int, str]:
        """The pid, and what a child returns."""
        mine = rank.initial == 1 and rank.arguments["place"] == place
        pid = os.fork() if mine else -1
        return pid, ENDS[rank.arguments["how"]]() if pid == 0 else ""

    def reap(pid: int, **fields: Any) -> None:
        if pid > 0:
            rank.say("child", code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), **fields)

    class Initialize(Plugin, inprocess.plugins.initialize.Initialize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            if state.iteration == 0:
                reap(fork_at("initialize")[0])
            return state

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            with call.disable_hang_protection():
                pid, value = fork_at("function")
                if pid == 0:
                    return value
                reap(pid, suspended=call._words[UNPROTECTED])
            rank.together("waited")
            rank.say("waited")
            if rank.initial == 1:
                await_file(rank, "fault")
                os.kill(os.getpid(), signal.SIGKILL)
            block()
        return "done"

    rank.call(fn, initialize=Initialize(rank, "initialize"), **where(rank))


@scenario
def abort_forks(rank: Rank) -> None:
    """Rank 1 raises in iteration 0; `abort` forks a child that does `how`, and is waited for."""

    class Forks(inprocess.plugins.abort.Abort):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            pid = os.fork()
            if pid == 0:
                ENDS[rank.arguments["how"]]()
                return state
            rank.say("child", code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return state

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 1:
                raise ValueError("wanted")
            block()
        return "done"

    rank.call(fn, abort=Forks())


@scenario
def child_asks(rank: Rank) -> None:
    """A child forked in an atomic block leaves the block, and uses all there is."""

    def fn(call: CallWrapper) -> str:
        with contextlib.ExitStack() as block:
            block.enter_context(call.atomic())
            pid = os.fork()
            if pid == 0:
                block.close()
                with call.atomic(), call.disable_hang_protection():
                    call.ping()
                    os.kill(os.getpid(), signal.SIGKILL) if call._words[UNPROTECTED] else os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        rank.say("child", code=code, pinged=bool(call._words[MANUAL]), suspended=call._words[UNPROTECTED])
        return "done"

    rank.call(fn)


@scenario
def later(rank: Rank) -> None:
    """A plain function, by its looks, that returns what an async function does."""

    async def coroutine() -> str:
        return "done"

    async def stream() -> AsyncIterator[str]:
        yield "done"

    made = {"coroutine": coroutine, "async generator": stream}[rank.arguments["how"]]

    def fn(call: CallWrapper) -> object:
        rank.entered(call)
        return functools.partial(made)()

    rank.call(fn)


@scenario
def closed(rank: Rank) -> None:
    """The file descriptors `closed` are, when the function is called; in iteration 0 rank 1 raises."""
    for fd in rank.arguments["closed"]:
        os.close(fd)

    def fn(call: CallWrapper) -> str:
        rank.entered(call, streams=[os.readlink(f"/proc/self/fd/{fd}") for fd in rank.arguments["closed"]])
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 1:
                raise ValueError("wanted")
            block()
        return "done"

    rank.call(fn)


@scenario
def waits_for_store(rank: Rank) -> None:
    rank.call(lambda: "done", store_kwargs={"timeout": timedelta(seconds=rank.arguments["timeout"])})


@scenario
def suspends(rank: Rank) -> None:
    """Is in a block without hang protection until the test is done; how often its monitor process has woken up before
    and behind three hard timeouts."""

    def fn(call: CallWrapper) -> tuple[int, int]:
        (monitor,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        with call.disable_hang_protection():
            pause(rank.arguments["times"]["hard_timeout"])
            before = _wake_ups(int(monitor))
            pause(2 * rank.arguments["times"]["hard_timeout"])
            return before, _wake_ups(int(monitor))

    rank.call(fn)


def _wake_ups(pid: int) -> int:
    """Of all its threads."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status")]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary"))
