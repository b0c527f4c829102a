"""More of what ranks do in the tests: ways to use the wrapper besides failing."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from scenarios import Assignment, Rank, block, pause, scenario

from nvrx_slurm import inprocess
from nvrx_slurm.inprocess import CallWrapper, iteration_end


def collective(rank: Rank, call: CallWrapper) -> float:
    """As a user does it: a process group from the environment, in every iteration."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    value = torch.tensor([1.0])
    dist.all_reduce(value)
    total = float(value)
    rank.say("reduced", iteration=call.iteration, total=total)
    return total


@scenario
def gloo(rank: Rank) -> None:
    """A collective in every iteration; in the first ones a rank dies before it."""

    def fn(call: CallWrapper) -> float:
        import torch.distributed as dist

        rank.entered(call)
        total = collective(rank, call)
        rank.together(f"reduced{call.iteration}", gone=call.iteration)
        victims = rank.arguments["victims"]
        if call.iteration < len(victims):
            if rank.initial == victims[call.iteration]:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()
        dist.destroy_process_group()
        return total

    rank.call(fn)


@scenario
def after_the_wrapper(rank: Rank) -> None:
    """The environment is as it was, MASTER_PORT is free, and a second call works."""
    import torch.distributed as dist

    def fn(call: CallWrapper) -> float:
        total = collective(rank, call)
        dist.destroy_process_group()
        return total

    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank.call(fn)
    rank.say("environment", same=before == {name: os.environ.get(name) for name in before})
    rank.call(fn)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    dist.barrier()
    dist.destroy_process_group()
    rank.say("threads", names=[thread.name for thread in threading.enumerate()])


@scenario
def reserve(rank: Rank) -> None:
    """At most two ranks are active; one of them dies in iteration 0."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            if rank.initial in rank.arguments["victims"]:
                os.kill(os.getpid(), signal.SIGKILL)
            block()
        return f"{rank.initial} done"

    ranks = inprocess.plugins.rank_assignment
    rank.call(fn, rank_assignment=inprocess.Compose(ranks.MaxActiveWorldSize(2), ranks.ShiftRanks()))


@scenario
def file_store(rank: Rank) -> None:
    """No server; rank 1 raises once, then rank 0 is killed."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            if rank.initial == 1:
                raise ValueError("first")
            block()
        if call.iteration == 1:
            rank.together("entered twice")
            if rank.initial == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            block()
        return "done"

    place = os.path.join(rank.arguments["tmp"], "store")
    rank.call(fn, store_factory=inprocess.meeting.store.FileStore, store_kwargs={"file_name": place})


@scenario
def pidfile(rank: Rank) -> None:
    """Waits in iteration 0; tells the pid of its monitor process."""
    path = os.path.join(rank.arguments["tmp"], "monitor{rank}.pid")
    log = os.path.join(rank.arguments["tmp"], "monitor{rank}.log")

    def fn(call: CallWrapper) -> str:
        rank.entered(call, monitor=Path(path.replace("{rank}", str(rank.initial))).read_text())
        if call.iteration == 0:
            block()
        return "done"

    rank.call(fn, monitor_process_pidfile=path, monitor_process_logfile=log)


@scenario
def bad_logfile(rank: Rank) -> None:
    """In a directory that is not there."""
    rank.call(lambda: "done", monitor_process_logfile="/nonexistent/directory/log")


@scenario
def bad_store(rank: Rank) -> None:
    """Cannot be made, and says so in a text that is no UTF-8, and too long."""

    def make() -> None:
        raise ValueError("bad \udce4 name" + 3000 * "\u00e4")

    rank.call(lambda: "done", store_factory=make)


@scenario
def atomic(rank: Rank) -> None:
    """Rank 1 raises while rank 0 is in an atomic block; rank 0 tells what it did after that."""

    def fn(call: CallWrapper) -> str:
        rank.together(f"atomic{call.iteration}")
        if call.iteration == 0:
            if rank.initial == 1:
                rank.together("in the block")
                raise ValueError
            with call.atomic(), call.atomic():
                rank.together("in the block")
                for _ in range(30):
                    pause(0.01)
                rank.say("whole")
            for _ in range(1000):
                pause(0.01)
                with call.atomic():
                    pass
            rank.say("too late")
        return "done"

    rank.call(fn)


@scenario
def unprotected(rank: Rank) -> None:
    """Longer in C than the hard timeout, but that is wanted."""
    import ctypes

    def fn(call: CallWrapper) -> str:
        call.ping()
        with call.disable_hang_protection():
            ctypes.PyDLL(None).usleep(1500000)
        return f"iteration {call.iteration}"

    rank.call(fn)


@scenario
def late_signal(rank: Rank) -> None:
    """Rank 0 waits at the iteration barrier for rank 1, which is slow to finalize, when SIGTERM comes."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))

    class Slow(inprocess.plugins.finalize.Finalize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            rank.say("finalize")
            if rank.initial == 1:
                while not (Path(rank.arguments["tmp"]) / "go").exists():
                    pause(0.005)
            return state

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            raise ValueError
        return "done"

    rank.call(fn, finalize=Slow())


@scenario
def slow_return(rank: Rank) -> None:
    """Rank 0 returns at once, rank 1 never in iteration 0."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0 and rank.initial == 1:
            block()
        return "done"

    rank.call(fn)


@scenario
def many_restarts(rank: Rank) -> None:
    """Tells after some and after all restarts what this process holds."""
    import gc

    import torch.distributed as dist

    rounds, alive = rank.arguments["rounds"], []
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    stores: list[dist.TCPStore] = []
    keys = [0]

    class Big:
        pass

    def held(call: CallWrapper) -> None:
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
            uss=sum(_uss_kb(pid) for pid in monitor),
            keys=keys_left() if rank.initial == 0 else 0,
        )

    def keys_left() -> int:
        """In the store; those of the last rounds are being deleted while we look."""
        deadline_s = time.monotonic() + 10.0
        while (count := stores[0].num_keys()) > keys[0] and time.monotonic() < deadline_s:
            pause(0.01)
        return count

    def fn(call: CallWrapper) -> str:
        import weakref

        big = Big()
        alive.append(weakref.ref(big))
        if call.iteration == rank.arguments["settled"] and rank.initial == 0:
            stores.append(dist.TCPStore(host, port, is_master=False, wait_for_workers=False))
            keys[0] = stores[0].num_keys()
            rank.say("settled", keys=keys[0])
        if call.iteration in (rounds // 2, rounds):
            held(call)
            rank.together(f"held{call.iteration}")  # nobody has returned, or raised, while the store is looked at
        if call.iteration < rounds:
            rank.together(f"round{call.iteration}")
            if rank.initial == call.iteration % 2:
                raise ValueError("once more")
            block()
        return "done"

    ranks = inprocess.plugins.rank_assignment
    assignments = {
        "default": inprocess.Compose(ranks.ActivateAllRanks(), ranks.ShiftRanks()),
        "filter": inprocess.Compose(ranks.ShiftRanks(), ranks.FilterCountGroupedByKey("all", bool)),
        "tree": ranks.Tree([ranks.Layer()]),
    }
    rank.call(fn, rank_assignment=assignments[rank.arguments["assignment"]])


def _uss_kb(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Private_"))


@scenario
def outlived(rank: Rank) -> None:
    """A thread that the function started is still there in the next iteration, and later."""
    seen: list[int] = []
    over = threading.Event()

    def background() -> None:
        while not over.wait(0.001):
            seen.append(1)

    def fn(call: CallWrapper) -> str:
        if call.iteration == 0:
            threading.Thread(target=background, daemon=True).start()
            raise ValueError
        before = len(seen)
        while len(seen) == before:
            pause(0.001)
        return "done"

    rank.call(fn)
    over.set()


@scenario
def profiled(rank: Rank) -> None:
    """Under a profiler: Python 3.11 never gets on if something looks pending that nobody takes."""
    import cProfile

    def fn(call: CallWrapper) -> str:
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 0:
                raise ValueError
            block()
        return "done"

    cProfile.Profile().runcall(rank.call, fn)


@scenario
def filtered(rank: Rank) -> None:
    """Groups of two; a rank dies while ranks are being assigned for iteration 1, before it gives its key."""
    ranks = inprocess.plugins.rank_assignment
    groups = ranks.FilterCountGroupedByKey(lambda state: str(state.initial_rank // 2), lambda count: count == 2)
    victim = Assignment(rank, "rank_assignment")

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 0:
                raise ValueError
            block()
        return "done"

    rank.call(fn, rank_assignment=inprocess.Compose(ranks.ShiftRanks(), groups, victim))


@scenario
def too_early(rank: Rank) -> None:
    """torch.distributed is initialized before the wrapped function is called; then it is not any more."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        rank.wrapper()(lambda: None)()
    except RuntimeError as error:
        rank.say("refused", text=str(error))
    dist.destroy_process_group()
    rank.call(lambda: "done")


@scenario
def nested(rank: Rank) -> None:
    """A wrapped function calls another one."""

    def outer() -> str:
        rank.wrapper()(lambda: None)()
        return "nested"

    rank.call(outer)


@scenario
def exits(rank: Rank) -> None:
    """The interpreter is ended from another thread in the middle of a restart."""

    class Exit(inprocess.plugins.finalize.Finalize):
        def __call__(self, state: inprocess.FrozenState) -> inprocess.FrozenState:
            if rank.initial == 1:
                threading.Thread(target=os._exit, args=(3,)).start()
                block()
            return state

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            raise ValueError
        return "done"

    rank.call(fn, finalize=Exit())


@scenario
def timed(rank: Rank) -> None:
    """Rank 1 holds the GIL for ever; says when it began."""
    import ctypes

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 1:
                rank.say("hangs")
                ctypes.PyDLL(None).sleep(1000)
            block()
        return "done"

    rank.call(fn)


# --- exceptions that are hard to tell others about --------------------------------------------------------------------


def _surrogate() -> BaseException:
    return ValueError("bad \udce4 name \x00 nul\nsecond line")


def _text_of(how: str) -> Callable[[], BaseException]:
    class NoText(Exception):
        def __str__(self) -> str:
            if how == "exits":
                sys.exit(5)
            if how == "raises":
                raise RuntimeError("no text")
            return None  # type: ignore[return-value]

    return NoText


def _circle() -> BaseException:
    ends, one, other = SystemExit(4), ValueError("one"), ValueError("other")
    ends.__cause__, one.__cause__, other.__cause__ = one, other, one
    return ends


ODD: dict[str, Callable[[], BaseException]] = {
    "surrogate": _surrogate,
    "circle": _circle,
    "raises": _text_of("raises"),
    "exits": _text_of("exits"),
    "none": _text_of("none"),
}


@scenario
def odd_exception(rank: Rank) -> None:
    """Rank 1 raises one of them in iteration 0, the others wait."""

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            rank.together("entered")
            if rank.initial == 1:
                rank.say("fault")
                raise ODD[rank.arguments["how"]]()
            block()
        return f"{rank.initial} done"

    rank.call(fn)


@scenario
def cleans_up(rank: Rank) -> None:
    """Rank 1 raises while rank 0 is in a collective, which then raises; rank 0 needs a while to clean up after it."""
    import torch.distributed as dist

    iteration_end._UNWIND_S = 20.0  # what it needs is no matter of how loaded this machine is

    def fn(call: CallWrapper) -> str:
        rank.entered(call)
        if call.iteration == 0:
            dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
            rank.together("met")
            if rank.initial == 1:
                raise ValueError("first")
            try:
                dist.barrier()
            finally:
                rank.say("cleaning")
                pause(0.5)
                rank.say("cleaned")
        return "done"

    rank.call(fn)
