"""The ranks' side of the tests of the wrapper. Each scenario is a function of `Rank`; tests name it."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import json
import os
import runpy
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper
from nvrx_slurm.inprocess import rank_assignment as ra
from nvrx_slurm.inprocess.guard.monitor_thread import RankShouldRestart

SCENARIOS = {}
pause = time.sleep  # noqa: TID251 - a rank does what users do


def scenario(fn):
    SCENARIOS[fn.__name__] = fn
    return fn


class Rank:
    """This rank's arguments, and its way to report to the test."""

    def __init__(self, events, arguments):
        self.events = events  # a file descriptor
        self.arguments = arguments
        self.tmp = Path(arguments.get("tmp", "."))
        self.initial = int(os.environ.get("RANK", "-1"))

    def say(self, event, **fields):
        os.write(self.events, json.dumps({"event": event, "at": time.monotonic(), **fields}).encode() + b"\n")

    def call(self, fn, **more):
        """Call `fn` wrapped, with the times of the test in seconds; report its end, with the chain of causes."""
        seconds = {"last_call_wait": 0.0, **self.arguments.get("times", {})}
        times = {name: datetime.timedelta(seconds=value) for name, value in seconds.items()}
        try:
            value = inprocess.Wrapper(**times, **more)(fn)()
        except BaseException as error:
            chain = []
            one = error
            while one is not None and len(chain) < 100:
                chain.append(f"{type(one).__name__}: {one}")
                one = one.__cause__
            self.say("raised", kind=type(error).__name__, chain=chain)
            raise
        self.say("returned", value=value)
        return value

    def together(self, name, gone=0):
        """Wait until all ranks of the start are here, except `gone` of them."""
        with contextlib.suppress(FileExistsError):
            os.mknod(self.tmp / f"{name}.{self.initial}")  # touch() would leave it open if it is stopped in the middle
        while len(list(self.tmp.glob(f"{name}.*"))) < int(self.arguments["world_size"]) - gone:
            pause(0.005)

    def await_file(self, name):
        while not (self.tmp / name).exists():
            pause(0.005)

    def entered(self, call: CallWrapper, **fields):
        names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
        self.say("entered", iteration=call.iteration, **{name: os.environ[name] for name in names}, **fields)


def run(name, events, arguments):
    SCENARIOS[name](Rank(events, arguments))


def once(rank: Rank, first: Callable[[CallWrapper], Any], **more):
    """Call a function wrapped that does `first` in iteration 0, when all have entered, and returns in all others."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            first(call)
        return f"{rank.initial} done"

    rank.call(fn, **more)


def block():
    """Until stopped from outside: a wait that gives up the GIL and ends with any signal."""
    while True:
        select.select([], [], [], 0.1)


def throw(error):
    raise error


def _kill(signum):
    os.kill(os.getpid(), signum)
    block()


def _c_lock():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # without the GIL, and no signal ends it


def _until_sigterm():
    """A call in C that only SIGTERM ends, after which the rank would go on."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    signal.sigwait([signal.SIGTERM])


def _fork():
    """A child leaves the function by an exception of its own."""
    if (pid := os.fork()) == 0:
        raise ValueError("of the child")
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    raise ValueError(f"the child ended with {code}")


class _NoText(Exception):
    def __str__(self):
        raise KeyError("text")

    def __eq__(self, other):
        raise AssertionError("exceptions are compared by identity")

    __hash__ = None


FAULTS = {  # of the function, with its CallWrapper, or of a plug-in, with its state
    "raise": lambda rank, call: throw(ValueError(f"fault of rank {rank.initial} in iteration {call.iteration}")),
    "restart exception": lambda rank, call: throw(RankShouldRestart()),
    "exit": lambda rank, call: sys.exit(7),
    "abort": lambda rank, call: throw(inprocess.exception.RestartAbort("enough")),
    "os_exit": lambda rank, call: os._exit(9),
    "sigkill": lambda rank, call: _kill(signal.SIGKILL),
    "sigstop": lambda rank, call: _kill(signal.SIGSTOP),
    "gil": lambda rank, call: ctypes.PyDLL(None).sleep(1000),
    "c_lock": lambda rank, call: _c_lock(),
    "until_sigterm": lambda rank, call: _until_sigterm(),
    "once": lambda rank, state: state if (mark := rank.tmp / "once").exists() else throw(OSError(mark.touch())),
    "livelock": lambda rank, call: (call.ping(), block()),
    "fork": lambda rank, call: _fork(),
    "surrogate": lambda rank, call: throw(ValueError("bad \udce4 name \x00 nul\nsecond line")),
    "no text": lambda rank, call: throw(_NoText()),
    "never": lambda rank, call: block(),
    "met_never": lambda rank, call: (rank.together("met"), block()),  # not before the others are in the function
    "forever": lambda rank, call: pause(1000),
    "slow": lambda rank, call: ([pause(0.01) for _ in range(400)], call)[1],  # 4 s, with progress
    "go": lambda rank, call: (rank.await_file("go"), call)[1],
    "wrong": lambda rank, call: 42,
    "on file": lambda rank, call: (rank.await_file("fault"), rank.say("fault"), throw(ValueError("wanted"))),
}


def _swallow(rank):
    """With the fault "on file" of another rank: that one fails only when this one is in the block below."""
    try:
        os.mknod(rank.tmp / "fault")
        block()
    except BaseException:
        rank.say("swallowed")
    block()


WAITS = {
    "block": lambda rank: block(),
    "lock": lambda rank: [lock.acquire() for lock in [threading.Lock()] * 2],
    "swallow": _swallow,
    "return": lambda rank: None,
    "go": lambda rank: rank.await_file("go"),
}


class Plugin:
    """Reports its call; on the `victims` it does `how` in the `iteration` of the argument `plugin`."""

    def __init__(self, rank, name):
        self.rank, self.name, self.later = rank, name, 0

    def __call__(self, state):
        rank, want = self.rank, self.rank.arguments.get("plugin", {})
        rank.say(self.name, iteration=state.iteration)
        mine = want.get("name") == self.name and rank.initial in want["victims"]
        if mine and state.iteration == want["iteration"]:
            rank.say("fault")
            return FAULTS[want["how"]](rank, state)
        return state


BASES = {
    "initialize": inprocess.initialize.Initialize,
    "abort": inprocess.abort.Abort,
    "finalize": inprocess.finalize.Finalize,
    "health_check": inprocess.health_check.HealthCheck,
    "completion": inprocess.completion.Completion,
    "terminate": inprocess.terminate.Terminate,
}
PLUGINS = {name: type(name, (Plugin, base), {}) for name, base in BASES.items()}


class Assignment(Plugin, ra.RankAssignment):
    """Before the other ones: `iteration` is the one that is about to begin."""

    activates = renumbers = False

    def __call__(self, ctx):
        super().__call__(ctx.state.freeze())
        return ctx


def files(rank):
    """Arguments for the store, and for the files of the monitor processes."""
    kinds = {f"monitor_process_{kind}file": str(rank.tmp / ("monitor{rank}." + kind[:3])) for kind in ("pid", "log")}
    if rank.arguments.get("file_store"):
        own = {"store_factory": inprocess.store.FileStore, "store_kwargs": {"file_name": str(rank.tmp / "store")}}
        return {**kinds, **own}
    return {**kinds, "store_kwargs": {"timeout": datetime.timedelta(seconds=rank.arguments.get("store_timeout", 60))}}


def pairs(state):
    return str((state.initial_rank or 0) // 2)


def assignment(rank):
    first = Assignment(rank, "rank_assignment")
    if (kind := rank.arguments.get("assignment")) == "tree":
        layers = [ra.Layer(1, None, "root", ra.LayerFlag.RESERVE), ra.Layer(2, 2, pairs, ra.LayerFlag.RESERVE)]
        return ra.Tree(layers)
    filters = [ra.FilterCountGroupedByKey(pairs, lambda count: count == 2)] if kind == "pairs" else []
    return inprocess.Compose(ra.MaxActiveWorldSize(rank.arguments.get("active")), ra.ShiftRanks(), *filters, first)


@scenario
def train(rank):
    """In iteration n, when all have entered, rank r does `faults[n][r]`, the others `others`; afterwards all return.

    `gone`: ranks missing from iteration 1 on. `plugins`: use those of this file; else only what `tries` needs.
    `handler`: SIGTERM exits.
    """
    faults = [{int(r): how for r, how in one.items()} for one in rank.arguments.get("faults", [])]
    gone = rank.arguments.get("gone", 0)
    if rank.arguments.get("handler"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))

    def fn(call: CallWrapper) -> str:
        pid = (rank.tmp / f"monitor{rank.initial}.pid").read_text()
        rank.entered(call, monitor=int(pid or 0))
        if call.iteration < len(faults):
            if rank.arguments.get("plugin", {}).get("how") == "met_never":
                rank.together("met")
            elif rank.arguments.get("meet", True):
                rank.together(f"entered{call.iteration}", gone if call.iteration else 0)
            if how := faults[call.iteration].get(rank.initial):
                FAULTS[how](rank, call)
            WAITS[rank.arguments.get("others", "block")](rank)
        if rank.arguments.get("last"):
            WAITS[rank.arguments["last"]](rank)
        return f"{rank.initial} done"

    more = {}
    if rank.arguments.get("plugins"):
        more = {name: kind(rank, name) for name, kind in PLUGINS.items()}
    if tries := rank.arguments.get("tries"):
        more["initialize"] = inprocess.initialize.RetryController(max_iterations=tries)
    rank.call(fn, rank_assignment=assignment(rank), **more, **files(rank))


@scenario
def serve(rank):
    """Not a rank: the server of the store, in a process of its own, as a launcher may have one."""
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False)
    rank.say("serving")
    block()
    del server


@scenario
def leaves_at(rank):
    """Rank 2 raises in iteration 0. Between its `finalize` and its next `initialize` rank `victim` leaves."""
    mine, nth, calls = rank.initial == rank.arguments["victim"], rank.arguments["nth"], 0

    def leave(frame, event, _):
        """Raise, as a signal handler may, at the `nth` call of a function of the wrapper (0: never)."""
        nonlocal calls
        if event == "call" and "/nvrx_slurm/inprocess/" in frame.f_code.co_filename:
            calls += 1
            if calls == nth:
                sys.setprofile(None)
                rank.say("fault", where=f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
                sys.exit(5)

    class First(inprocess.finalize.Finalize):
        def __call__(self, state):
            sys.setprofile(leave if mine else None)
            return state

    class Last(inprocess.initialize.Initialize):
        def __call__(self, state):
            if mine:
                sys.setprofile(None)
                rank.say("calls", number=calls, iteration=state.iteration)
            return state

    first = FAULTS["raise"] if rank.initial == 2 else FAULTS["never"]
    once(rank, lambda call: first(rank, call), finalize=First(), initialize=Last())


@scenario
def leaves_at_entry(rank):
    """Rank `victim` leaves, or is killed, before it has reported that it is there."""
    mine = os.getpid()

    def make():
        if os.getpid() == mine and rank.initial == rank.arguments["victim"]:
            rank.say("fault")
            if rank.arguments.get("how") == "kill":
                os.kill(mine, signal.SIGKILL)
            sys.exit(5)
        return inprocess.store.TCPStore()

    rank.call(rank.entered, store_factory=make, monitor_process_logfile=str(rank.tmp / "monitor{rank}.log"))


@scenario
def script(rank):
    """`argv`, in the directory `cwd`, as the interpreter would; its output are the rank's events."""
    sys.argv = rank.arguments["argv"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    os.chdir(rank.arguments["cwd"])
    os.dup2(rank.events, 1)
    runpy.run_path(sys.argv[0], run_name="__main__")
