"""Each fault that a CPU allows strikes a child process, and nothing else does."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.testing import inject_fault as faults
from nvrx_slurm.testing.inject_fault import Fault

WAIT_S = 60.0
SILENCE_S = 0.5

VICTIM = """
import faulthandler, os, resource, sys, threading
from nvrx_slurm.testing import inject_fault
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
struck = lambda: os.write(1, b"struck ")
try:
    inject_fault.inject_fault(
        (inject_fault.Fault[sys.argv[1]],), num_faults=1, keep_alive=0, delay=0.01, seed=1, callback=struck
    )
    while True:
        inject_fault.maybe_raise_workload_exception()
        threading.Event().wait(0.001)
except inject_fault.InjectedException:
    print("caught", flush=True)
    sys.exit(7)
"""

ENDS = {
    "WORKLOAD_EXC": (7, "struck caught\n"),
    "ASYNC_EXC": (7, "struck caught\n"),
    "SIGNAL_EXC": (7, "struck caught\n"),
    "OS_ABORT": (-signal.SIGABRT, "struck "),
    "SEGFAULT": (-signal.SIGSEGV, "struck "),
    "SIGKILL": (-signal.SIGKILL, "struck "),
    "SIGTERM": (-signal.SIGTERM, "struck "),
    "SIGINT": (-signal.SIGINT, "struck "),
}


def victim(fault: str, code: str = VICTIM) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        [sys.executable, "-c", code, fault], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def test_each_fault_that_ends_the_process_does() -> None:
    """All at once."""
    victims = {fault: victim(fault) for fault in ENDS}
    ends = {fault: (process.communicate(timeout=WAIT_S)[0], process.returncode) for fault, process in victims.items()}
    assert {fault: (code, out) for fault, (out, code) in ends.items()} == ENDS


LOCKED = """
import os, signal, sys, threading
from nvrx_slurm.testing import inject_fault
signal.signal(signal.SIGTERM, lambda signum, frame: os.write(1, b"handled "))
inject_fault.dispatch_fault_injection(inject_fault.Fault.LOCK_GIL, 0.01, lambda: os.write(1, b"struck "))
def tick():
    while True:
        os.write(1, b".")
threading.Thread(target=tick, daemon=True).start()
threading.Event().wait()
"""


def test_a_locked_gil_stops_all_python_and_sigkill_ends_it() -> None:
    """After the strike the ticks end, and a handled SIGTERM is handled no more; nothing at all is written."""
    process = victim("LOCK_GIL", LOCKED)
    assert process.stdout and process.stderr
    out = process.stdout.fileno()
    try:
        seen = ""
        while "struck" not in seen:
            seen += os.read(out, 1 << 16).decode()
        while select.select([out], [], [], SILENCE_S)[0]:  # ticks already written
            os.read(out, 1 << 16)
        os.kill(process.pid, signal.SIGTERM)
        assert not select.select([out], [], [], SILENCE_S)[0]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()
        process.stderr.close()


def test_gpu_faults_without_a_gpu_are_refused() -> None:
    code = (
        "import sys\nfrom types import SimpleNamespace\n"
        "sys.modules['torch'] = SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False))\n"
        "from nvrx_slurm.testing import inject_fault\n"
        "for fault in (inject_fault.Fault.GPU_ERROR, inject_fault.Fault.GPU_SLEEP):\n"
        "    try:\n"
        "        inject_fault.dispatch_fault_injection(fault, 0.0, None)\n"
        "    except inject_fault.UsageError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout.count("need a GPU, and torch sees none here") == 2


# --- who is hit, with what, when --------------------------------------------------------------------------------------


@pytest.fixture
def dispatched(monkeypatch) -> list[tuple[str, float]]:
    """Faults that struck this rank are noted instead."""
    noted: list[tuple[str, float]] = []
    for fault in Fault:
        monkeypatch.setitem(faults._handlers, fault.name, lambda delay, _, name=fault.name: noted.append((name, delay)))
    return noted


def everywhere(monkeypatch, world_size: int, **arguments) -> tuple[set[tuple[int, ...]], list[int]]:
    """What all ranks returned, and the ranks on which something was dispatched."""
    hit: list[int] = []
    returned = set()
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    for rank in range(world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setitem(faults._handlers, "SIGTERM", lambda delay, callback, rank=rank: hit.append(rank))
        returned.add(faults.inject_fault((Fault.SIGTERM,), **arguments))
    return returned, hit


@pytest.mark.parametrize(("keep_alive", "num_faults"), [(1, 2), (6, 5), (0, 8), (8, 1), (20, 1), (2, 0), (3, (1, 4))])
def test_the_same_seed_hits_the_same_ranks_everywhere(monkeypatch, keep_alive: int, num_faults) -> None:
    fewest, most = num_faults if isinstance(num_faults, tuple) else (num_faults, num_faults)
    able = max(0, 8 - keep_alive)
    for seed in range(20):
        returned, hit = everywhere(monkeypatch, 8, num_faults=num_faults, keep_alive=keep_alive, delay=1.0, seed=seed)
        assert returned == {tuple(hit)}
        assert min(fewest, able) <= len(hit) <= min(most, able)
        assert all(rank >= keep_alive for rank in hit)


def test_seeds_differ_and_delays_stay_within_their_bounds(monkeypatch, dispatched) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    for seed in range(50):
        assert faults.inject_fault((Fault.SIGINT, "SIGTERM"), 1, 0, (2.0, 3.0), seed) == (0,)
    faults.inject_fault((Fault.SIGKILL,), 1, 0, 5, 0)
    *many, (_, exact) = dispatched
    assert {name for name, _ in many} == {"SIGINT", "SIGTERM"}
    assert all(2.0 <= delay <= 3.0 for _, delay in many) and len({delay for _, delay in many}) == 50
    assert exact == 5


def test_a_fault_of_ones_own_by_a_new_name(monkeypatch) -> None:
    assert list(faults._handlers) == [fault.name for fault in Fault]
    monkeypatch.setattr(faults, "_handlers", dict(faults._handlers))
    seen: list[object] = []
    own = faults.register_fault("POWER_OUTAGE", lambda delay, callback: seen.append((delay, callback())))
    assert own == "POWER_OUTAGE"
    assert faults.inject_fault((own,), 1, 0, 2.0, 0, callback=lambda: "called") == (0,)
    assert seen == [(2.0, "called")]
    assert faults.register_fault("SIGKILL", lambda delay, callback: seen.append("mine")) is Fault.SIGKILL
    assert faults.register_fault(Fault.SIGTERM, lambda delay, callback: seen.append("mine")) is Fault.SIGTERM
    faults.dispatch_fault_injection(Fault.SIGKILL, 0.0, None)
    faults.dispatch_fault_injection(Fault.SIGTERM, 0.0, None)
    assert seen[1:] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (((), 1, 0, 1.0, 0), "faults is empty"),
        (((Fault.SIGKILL,), -1, 0, 1.0, 0), "num_faults=-1"),
        (((Fault.SIGKILL,), (3, 2), 0, 1.0, 0), "the first is the lower"),
        (((Fault.SIGKILL,), 1, -1, 1.0, 0), "keep_alive=-1"),
        (((Fault.SIGKILL,), 1, 0, -1.0, 0), "delay=-1.0"),
        ((("METEORITE",), 0, 0, 1.0, 0), "no fault is called 'METEORITE'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(arguments, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        faults.inject_fault(*arguments)


def test_a_workload_exception_is_raised_once_and_can_be_forgotten() -> None:
    faults.maybe_raise_workload_exception()
    faults._workload_exception_due.set()
    with pytest.raises(faults.InjectedException):
        faults.maybe_raise_workload_exception()
    faults.maybe_raise_workload_exception()
    faults._workload_exception_due.set()
    faults.clear_workload_exception()
    faults.maybe_raise_workload_exception()
