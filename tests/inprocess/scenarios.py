"""What ranks do in the tests of the wrapper. Each scenario is a function of `Rank`; tests name it."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper

SCENARIOS: dict[str, Callable[[Rank], None]] = {}
pause = time.sleep


def scenario(fn: Callable[[Rank], None]) -> Callable[[Rank], None]:
    SCENARIOS[fn.__name__] = fn
    return fn


class Rank:
    """This rank's arguments, and its way to tell the test something."""

    def __init__(self, events: int, arguments: dict[str, Any]) -> None:
        self.events = events  # a file descriptor
        self.arguments = arguments
        self.initial = int(os.environ.get("RANK", "-1"))

    def say(self, event: str, **fields: Any) -> None:
        os.write(self.events, json.dumps({"event": event, "at": time.monotonic(), **fields}).encode() + b"\n")

    def wrapper(self, **more: Any) -> inprocess.Wrapper:
        """With `last_call_wait` of 0 and the times of the test, in seconds."""
        seconds = {"last_call_wait": 0.0, **self.arguments.get("times", {})}
        times = {name: datetime.timedelta(seconds=value) for name, value in seconds.items()}
        return inprocess.Wrapper(**times, **more)

    def call(self, fn: Callable[..., Any], **more: Any) -> Any:
        """Call `fn` wrapped; the end is told: returned, or raised with the chain of causes."""
        try:
            value = self.wrapper(**more)(fn)()
        except BaseException as error:
            chain: list[str] = []
            one: BaseException | None = error
            while one is not None and len(chain) < 100:
                chain.append(f"{type(one).__name__}: {one}")
                one = one.__cause__
            self.say("raised", kind=type(error).__name__, chain=chain)
            raise
        self.say("returned", value=value)
        return value

    def together(self, name: str, gone: int = 0) -> None:
        """Wait until all ranks of the start are here, except `gone` of them."""
        place = Path(self.arguments["tmp"])
        with contextlib.suppress(FileExistsError):
            os.mknod(place / f"{name}.{self.initial}")  # touch() would leave it open if it is stopped in the middle
        while len(list(place.glob(f"{name}.*"))) < int(self.arguments["world_size"]) - gone:
            pause(0.001)

    def entered(self, call: CallWrapper, **fields: Any) -> None:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        self.say("entered", iteration=call.iteration, **{name: os.environ[name] for name in names}, **fields)


def run(name: str, events: int, arguments: dict[str, Any]) -> None:
    SCENARIOS[name](Rank(events, arguments))


def block() -> None:
    """Until stopped from outside: in Python code that gives up the GIL."""
    while True:
        pause(0.01)


@scenario
def fault_once(rank: Rank) -> None:
    """In iteration 0 the rank `victim` does `how` when all have entered, the others wait; then all return."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial in rank.arguments["victims"]:
                FAULTS[rank.arguments["how"]](rank, call)
            WAITS[rank.arguments.get("others", "block")](rank, call)
        return f"{rank.initial} done"

    rank.call(fn)


def _raise(rank: Rank, call: CallWrapper) -> None:
    raise ValueError(f"fault of rank {rank.initial}")


def _exit(rank: Rank, call: CallWrapper) -> None:
    sys.exit(7)


def _os_exit(rank: Rank, call: CallWrapper) -> None:
    os._exit(9)


def _signal(signum: int) -> Callable[[Rank, CallWrapper], None]:
    def kill(rank: Rank, call: CallWrapper) -> None:
        os.kill(os.getpid(), signum)
        block()

    return kill


def _keyboard(rank: Rank, call: CallWrapper) -> None:
    raise KeyboardInterrupt


def _abort(rank: Rank, call: CallWrapper) -> None:
    raise inprocess.exception.RestartAbort("enough")


def _gil(rank: Rank, call: CallWrapper) -> None:
    import ctypes

    ctypes.PyDLL(None).sleep(1000)


def _sleep(rank: Rank, call: CallWrapper) -> None:
    pause(1000)


def _c_lock(rank: Rank, call: CallWrapper) -> None:
    import ctypes

    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # without the GIL, and whatever signal comes


def _swallow(rank: Rank, call: CallWrapper) -> None:
    first = True
    while True:
        try:
            block()
        except BaseException:
            if not first:
                raise
            first = False
            rank.say("swallowed")


def _livelock(rank: Rank, call: CallWrapper) -> None:
    call.ping()
    block()


def _lock(rank: Rank, call: CallWrapper) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


FAULTS: dict[str, Callable[[Rank, CallWrapper], None]] = {
    "raise": _raise,
    "exit": _exit,
    "os_exit": _os_exit,
    "sigkill": _signal(signal.SIGKILL),
    "sigterm": _signal(signal.SIGTERM),
    "sigstop": _signal(signal.SIGSTOP),
    "keyboard": _keyboard,
    "abort": _abort,
    "gil": _gil,
    "c_lock": _c_lock,
    "livelock": _livelock,
    "wait": lambda rank, call: block(),
}
WAITS: dict[str, Callable[[Rank, CallWrapper], None]] = {
    "block": lambda rank, call: block(),
    "sleep": _sleep,
    "lock": _lock,
    "swallow": _swallow,
    "return": lambda rank, call: None,
}


# --- plug-ins ---------------------------------------------------------------------------------------------------------


class Plugin:
    """Tells that it was called; on the victims it fails in the iteration given, in the way given."""

    def __init__(self, rank: Rank, name: str) -> None:
        self.rank, self.name = rank, name

    def __call__(self, state: inprocess.FrozenState) -> Any:
        rank, want = self.rank, self.rank.arguments.get("plugin", {})
        rank.say(self.name, iteration=state.iteration, mode=state.mode.name, rank=state.rank)
        mine = want.get("name") == self.name and rank.initial in want.get("victims", [])
        if mine and state.iteration == want["iteration"]:
            rank.say("fault")
            return PLUGIN_FAULTS[want["how"]](rank)
        return state


def _plugin_raise(rank: Rank) -> None:
    raise ValueError("plug-in")


def _plugin_restart_abort(rank: Rank) -> None:
    raise inprocess.exception.RestartAbort("plug-in")


def _plugin_kill(rank: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _plugin_term_handler(rank: Rank) -> None:
    """SIGTERM is handled as launchers' users do, and comes from outside while the barrier is waited for."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))


PLUGIN_FAULTS: dict[str, Callable[[Rank], Any]] = {
    "raise": _plugin_raise,
    "abort": _plugin_restart_abort,
    "kill": _plugin_kill,
    "never": lambda rank: block(),
    "met_never": lambda rank: (rank.together("met"), block()),  # not before the others are in the function
    "wrong": lambda rank: 42,
    "none": lambda rank: None,
}


class Initialize(Plugin, inprocess.plugins.initialize.Initialize): ...


class Abort(Plugin, inprocess.plugins.abort.Abort): ...


class Finalize(Plugin, inprocess.plugins.finalize.Finalize): ...


class HealthCheck(Plugin, inprocess.plugins.health_check.HealthCheck): ...


class Completion(Plugin, inprocess.plugins.completion.Completion): ...


class Terminate(Plugin, inprocess.plugins.terminate.Terminate): ...


class Assignment(Plugin, inprocess.plugins.rank_assignment.RankAssignment):
    """Before the default one: `iteration` is the one that is about to begin."""

    activates = False
    renumbers = False

    def __call__(self, ctx: Any) -> Any:
        super().__call__(ctx.state.freeze())
        return ctx


PLUGINS: dict[str, type[Plugin]] = {
    "initialize": Initialize,
    "abort": Abort,
    "finalize": Finalize,
    "health_check": HealthCheck,
    "completion": Completion,
    "terminate": Terminate,
}


def plugins(rank: Rank) -> dict[str, Any]:
    made: dict[str, Any] = {name: kind(rank, name) for name, kind in PLUGINS.items()}
    ranks = inprocess.plugins.rank_assignment
    assignment = Assignment(rank, "rank_assignment")
    made["rank_assignment"] = inprocess.Compose(ranks.ActivateAllRanks(), ranks.ShiftRanks(), assignment)
    return made


@scenario
def with_plugins(rank: Rank) -> None:
    """As `fault_once`, with all plug-ins; rank `victims` raises in iteration 0."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0 and rank.arguments["victims"]:
            if rank.arguments.get("plugin", {}).get("how") == "met_never":
                rank.together("met")
            if rank.arguments.get("together"):
                rank.together("entered")
            if rank.initial in rank.arguments["victims"]:
                raise ValueError(f"fault of rank {rank.initial}")
            block()
        return f"{rank.initial} done"

    rank.call(fn, **plugins(rank))


@scenario
def always_fails(rank: Rank) -> None:
    """Rank 1 raises in every iteration; after two of them no more is allowed."""

    def fn(call: CallWrapper) -> None:
        if rank.initial == 1:
            raise ValueError(f"fault of rank 1 in iteration {call.iteration}")
        block()

    rank.call(fn, initialize=inprocess.plugins.initialize.RetryController(max_iterations=2))
