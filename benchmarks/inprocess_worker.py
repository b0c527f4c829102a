"""The user's script of the in-process figures. It tells the harness, through a FIFO, what happened and when.

Says "ready" when everything is imported, waits for SIGUSR1, says "calling" and calls the wrapped function, which says
"entered" each time, and after it "left".

inprocess_worker.py run [last_call_wait=S]   in the function: SIGUSR1 = say "raising" and raise, SIGUSR2 = return
inprocess_worker.py busy           the same, computing all the time instead of waiting for a signal
inprocess_worker.py soft | hard    SIGUSR1 = ping, say "hanging"; then run without a ping, or sleep with the GIL
inprocess_worker.py idle           blocked in the kernel
inprocess_worker.py ping           say "took" (median of a ping in us)
inprocess_worker.py leak COUNT     rank 0 raises COUNT times, says "early" and "late" (MB of it and its children)

"threads" says how many the process has in the function that it did not have before. BENCH_CLIENT=nvrx: NVRx's wrapper.
"""

import ctypes
import datetime
import os
import signal
import sys
import time
from pathlib import Path
from statistics import median

SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}
mode = sys.argv[1]
deaf = {signal.SIGTERM} if mode == "hard" else set()
signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS | deaf)  # before there are other threads, which would inherit less

import torch  # noqa: E402 - it has threads

if os.environ["BENCH_CLIENT"] == "nvrx":
    from nvidia_resiliency_ext import inprocess
else:
    from nvrx_slurm import inprocess

LIFE_S = float(os.environ["BENCH_LIFE_S"])  # nobody stays for ever, even if the harness was killed
INITIAL_RANK = os.environ["RANK"]
BATCH, BATCHES = 200, 200
SETTLED = 20  # restarts before the first look at the memory
TIMES_S = {
    "soft": {"soft_timeout": 1.5, "hard_timeout": 60.0},
    "hard": {
        "soft_timeout": 1.5,
        "hard_timeout": 2.0,
        "termination_grace_time": 0.5,
        "progress_watchdog_interval": 0.01,  # so that the last sign of life is hardly older than the hang
    },
    "leak": {"last_call_wait": 0.0},
}


def tell(what, value=None):
    """One short line; writes up to PIPE_BUF to a FIFO are not mixed up with others."""
    at_s = time.monotonic() if value is None else value
    fd = os.open(os.environ["BENCH_FIFO"], os.O_WRONLY)
    os.write(fd, f"{what} {INITIAL_RANK} {os.getpid()} {at_s:.6f}\n".encode())
    os.close(fd)


def threads():
    """Of this process, not only Python's."""
    return set(os.listdir("/proc/self/task"))


def memory_mb():
    """Private memory of this process and of those it has started."""
    pids = [os.getpid()]
    for children in Path("/proc/self/task").glob("*/children"):
        pids += map(int, children.read_text().split())
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / 1e6


class Told(inprocess.plugins.abort.Abort):
    """Says when it is called."""

    def __call__(self, state):
        tell("aborted")
        return state


def run(call: inprocess.CallWrapper):
    """Wait in Python code, as a training that polls does; the same for both wrappers."""
    until_s = time.monotonic() + LIFE_S
    while time.monotonic() < until_s:
        asked = signal.sigtimedwait(SIGNALS, 0.0 if mode == "busy" else 0.01)
        if asked is None:
            compute(100 if mode == "busy" else 0)
            continue
        if asked.si_signo == signal.SIGUSR2:
            tell("returning")
            return
        react(call)


def compute(times):
    for _ in range(times):
        small.add_(1)


def react(call: inprocess.CallWrapper):
    if mode in ("run", "busy"):
        tell("raising")
        raise RuntimeError("as asked")
    call.ping()
    tell("hanging")
    if mode == "hard":
        ctypes.PyDLL(None).sleep(int(LIFE_S))


def time_pings(call: inprocess.CallWrapper):
    took_s = []
    for _ in range(BATCHES):
        before_s = time.perf_counter()
        for _ in range(BATCH):
            call.ping()
        took_s.append((time.perf_counter() - before_s) / BATCH)
    tell("took", 1e6 * median(took_s))


def leak(call: inprocess.CallWrapper):
    if INITIAL_RANK != "0":
        run(call)
    if call.iteration == SETTLED:
        tell("early", memory_mb())
    if call.iteration < SETTLED + int(sys.argv[2]):
        raise RuntimeError("once more")
    tell("late", memory_mb())


def function(call: inprocess.CallWrapper = None):
    """NVRx's wrapper wants the default, and knows no annotations that are strings."""
    tell("entered")
    tell("threads", len(threads() - before))
    if mode == "idle":
        signal.sigtimedwait(SIGNALS, LIFE_S)
    elif mode == "ping":
        time_pings(call)
    elif mode == "leak":
        leak(call)
    else:
        run(call)


torch.set_num_threads(1)
small = torch.zeros(8)  # each operation hands over the GIL, for microseconds
before = threads()
seconds = {"barrier_timeout": 120.0, **TIMES_S.get(mode, {})}
seconds.update((name, float(value)) for name, _, value in (word.partition("=") for word in sys.argv[2:]) if value)
times = {name: datetime.timedelta(seconds=value) for name, value in seconds.items()}
wrapped = inprocess.Wrapper(**times, **({"abort": Told()} if mode in ("soft", "hard") else {}))(function)
tell("ready")
if "NVRX_BOARD" in os.environ or signal.sigtimedwait({signal.SIGUSR1}, LIFE_S):
    tell("calling")
    wrapped()
    tell("left")
