"""The ranks' side of the tests of process groups, several calls, `CallWrapper`, and how calls are stopped."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from scenarios import FAULTS, block, files, once, pause, scenario, throw
from scenarios import run as run  # noqa: F401 - the zygote calls it

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess import rank_assignment as ra
from nvrx_slurm.inprocess.guard import monitor_thread
from nvrx_slurm.inprocess.guard.monitor_process import MonitorProcess


def join():
    """As users do, in every iteration."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=100))


def reduced():
    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


@scenario
def gloo(rank):
    """A collective in every iteration; in the first ones a rank dies before it."""

    def fn(call: CallWrapper) -> float:
        rank.entered(call)
        join()
        total = reduced()
        rank.say("reduced", iteration=call.iteration, total=total)
        victims = rank.arguments["victims"]
        rank.together(f"reduced{call.iteration}", gone=call.iteration)
        if call.iteration < len(victims):
            if rank.initial == victims[call.iteration]:
                FAULTS["sigkill"](rank, call)
            dist.barrier()
        dist.destroy_process_group()
        return total

    rank.call(fn)


@scenario
def after_the_wrapper(rank):
    """In order: a call with a group made before it, two calls, a group of the user's own, and a nested call."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with contextlib.suppress(RuntimeError):
        rank.call(lambda: None)
    dist.destroy_process_group()
    hook, before = sys.excepthook, dict(os.environ)

    def fn(call: CallWrapper) -> float:
        hooked = sys.excepthook is hook
        join()
        rank.say("hooked", iteration=call.iteration, at_start=hooked, wrapped=sys.excepthook is not hook)
        total = reduced()
        rank.together(f"reduced{call.iteration}")
        if call.iteration < 2:
            raise ValueError("once more")
        dist.destroy_process_group()
        return total

    rank.call(fn)
    rank.say("environment", same=before == dict(os.environ) and sys.excepthook is hook)
    leave = MonitorProcess.leave
    if os.environ["RANK"] == "0":  # its server ends later than the others return
        MonitorProcess.leave = lambda *given: (pause(0.5), leave(*given))[1]
    rank.call(lambda: "second")
    MonitorProcess.leave = leave
    join()
    rank.say("threads", names=[thread.name for thread in threading.enumerate()])
    dist.barrier()
    dist.destroy_process_group()
    with contextlib.suppress(inprocess.exception.RestartAbort):
        rank.call(lambda: inprocess.Wrapper()(lambda: None)())


class Turned(ra.RankAssignment):
    """As by default, but another rank is rank 0 of iteration 0: not that of the store and the barrier server."""

    def __init__(self, shift):
        self._shift, self._default = shift, inprocess.Compose(ra.ActivateAllRanks(), ra.ShiftRanks())

    def __call__(self, ctx):
        ctx = self._default(ctx)
        if ctx.state.iteration == 0:
            ctx.state.rank = ctx.state.active_rank = (ctx.state.rank + self._shift) % ctx.state.active_world_size
        return ctx


@scenario
def fails_before_meeting(rank):
    """Rank `victim` does `how` in iteration 0 before it calls `init_process_group`, while the others are in it."""
    victim, own = rank.arguments["victim"], c10d._process_group_name

    def name(*args, **kwargs):
        value = own(*args, **kwargs)
        (rank.tmp / f"in.{rank.initial}").touch()  # torch has counted the group
        return value

    c10d._process_group_name = name

    def fn(call: CallWrapper) -> float:
        rank.entered(call, groups=c10d._world.group_count)
        if call.iteration == 0 and rank.initial == victim:
            for other in {0, 1, 2} - {victim}:
                rank.await_file(f"in.{other}")
            rank.say("fault")
            FAULTS[rank.arguments["how"]](rank, call)
        join()
        return reduced()

    rank.call(fn, rank_assignment=Turned(rank.arguments.get("shift", 0)), **files(rank))


@scenario
def cleans_up(rank):
    """Rank 1 raises while rank 0 is in a collective, which then raises; rank 0 needs a while to clean up after it."""
    monitor_thread._UNWIND_S = 20.0  # the length of the clean-up must not depend on the load of the machine

    def clean_up(call: CallWrapper):
        join()
        rank.together("met")
        if rank.initial == 1:
            raise ValueError("first")
        try:
            dist.barrier()
        finally:
            rank.say("cleaning")
            pause(0.3)
            rank.say("cleaned")

    once(rank, clean_up)


@scenario
def many_restarts(rank):
    """Reports the resources of this process after half of the restarts and after all."""
    rounds, alive = rank.arguments["rounds"], []

    class Big:
        pass

    def held(call: CallWrapper):
        gc.collect()
        monitor = [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
        rank.say(
            "held",
            iteration=call.iteration,
            fds=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            monitor_fds=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in monitor),
            children=len(monitor),
            objects=sum(1 for one in alive if one() is not None),
        )

    def fn(call: CallWrapper) -> str:
        big = Big()
        alive.append(weakref.ref(big))
        if call.iteration in (rounds // 2, rounds):
            held(call)
        if call.iteration < rounds:
            rank.together(f"round{call.iteration}")
            throw(ValueError("once more")) if rank.initial == call.iteration % 2 else block()
        return "done"

    rank.call(fn)


@scenario
def atomic(rank):
    """Rank 1 raises while rank 0 is in an atomic block; rank 0 reports its steps after that."""

    def enter(call: CallWrapper):
        if rank.initial == 1:
            rank.together("in the block")
            raise ValueError
        with call.atomic(), call.atomic():
            rank.together("in the block")
            pause(0.2)
            rank.say("whole")
        for _ in range(1000):
            pause(0.01)
            with call.atomic():
                pass
        rank.say("too late")

    once(rank, enter)


@scenario
def unprotected(rank):
    """Three hard timeouts in C without hang protection."""

    def fn(call: CallWrapper) -> int:
        call.ping()
        with call.disable_hang_protection():
            ctypes.PyDLL(None).usleep(int(3e6 * rank.arguments["times"]["hard_timeout"]))
            return call.iteration

    rank.call(fn)


@scenario
def refused(rank):
    """Calls that cannot begin: a log file in a missing directory, a store with an odd error text, no MASTER_ADDR."""

    def make():
        raise ValueError("bad \udce4 name" + 3000 * "\u00e4")

    for more in ({"monitor_process_logfile": "/nonexistent/directory/log"}, {"store_factory": make}, {}):
        if not more:
            del os.environ["MASTER_ADDR"]
        with contextlib.suppress(Exception):
            rank.call(lambda: "done", **more)


@scenario
def stopped_while_leaving(rank):
    """Rank 0 raises when rank 1 is about to leave."""

    def first(call: CallWrapper):
        if rank.initial == 0:
            rank.await_file("leaving")
            raise ValueError("fault of rank 0")
        try:
            sys.exit(5)
        finally:
            (rank.tmp / "leaving").touch()
            block()

    once(rank, first)


def _lock_is_free(lock):
    """Asked by a thread that does not hold it, as RLocks want."""
    with ThreadPoolExecutor(1) as other:
        free = other.submit(lock.acquire, False).result()
        if free:
            other.submit(lock.release).result()
    return free


class _Logs:
    def __init__(self):
        self.logger, self.came = logging.getLogger("of the user"), []
        self.logger.propagate = False
        self.logger.setLevel(logging.INFO)
        self.logger.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115

    def __call__(self):
        self.logger.info("on we go")

    def left(self):
        return self.came if _lock_is_free(self.logger.handlers[0].lock) else ["the handler's lock"]


class _LogsWithSigurg(_Logs):
    """Which the user handles, so that it is not ours to raise."""

    def __init__(self):
        super().__init__()
        signal.signal(signal.SIGURG, lambda *_: self.came.append("SIGURG"))


@scenario
def over_and_over(rank):
    """Rank 0 fails, at some moment while rank 1 logs, in each of the first `rounds` iterations."""
    kind = _LogsWithSigurg if rank.arguments["handled"] else _Logs
    do = kind() if rank.initial == 1 else None
    left = []

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
