"""Each fault that a CPU allows strikes a child process, and nothing else does."""

import os
import select
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from waits import WAIT_S

from nvrx_slurm.errors import UsageError
from nvrx_slurm.testing import inject_fault as faults
from nvrx_slurm.testing.inject_fault import Fault

pytestmark = pytest.mark.process


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
    **dict.fromkeys(("WORKLOAD_EXC", "ASYNC_EXC", "SIGNAL_EXC"), (7, "struck caught\n")),
    "OS_ABORT": (-signal.SIGABRT, "struck "),
    "SEGFAULT": (-signal.SIGSEGV, "struck "),
    **{name: (-signal.Signals[name], "struck ") for name in ("SIGKILL", "SIGTERM", "SIGINT")},
}


def victim(fault, code=VICTIM):
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", code, fault], stdout=pipe, stderr=pipe, text=True, env=env)


def test_each_fault_that_ends_the_process_does():
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


def test_a_locked_gil_stops_all_python_and_sigkill_ends_it():
    """After the strike the ticks end, and a handled SIGTERM is handled no more; nothing at all is written."""
    with victim("LOCK_GIL", LOCKED) as process:
        out, seen = process.stdout.fileno(), ""
        try:
            while "struck" not in seen:
                seen += os.read(out, 1 << 16).decode()
            while select.select([out], [], [], SILENCE_S)[0]:  # ticks already written
                os.read(out, 1 << 16)
            os.kill(process.pid, signal.SIGTERM)
            assert not select.select([out], [], [], SILENCE_S)[0]
            assert process.poll() is None
        finally:
            process.kill()


def test_gpu_faults_without_a_gpu_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(UsageError, match="need a GPU, and torch sees none here"):
        faults.dispatch_fault_injection(Fault.GPU_SLEEP, 0.0, None)


@pytest.mark.parametrize("keep_alive, num_faults", [(6, 5), (20, 1), (3, (1, 4))])
def test_the_same_seed_hits_the_same_ranks_everywhere(monkeypatch, keep_alive, num_faults):
    fewest, most = num_faults if isinstance(num_faults, tuple) else (num_faults, num_faults)
    able = max(0, 8 - keep_alive)
    hit = []
    monkeypatch.setitem(faults._handlers, "SIGTERM", lambda *_: hit.append(int(os.environ["RANK"])))
    monkeypatch.setenv("WORLD_SIZE", "8")
    for seed in range(5):
        hit.clear()
        returned = set()
        for rank in range(8):
            monkeypatch.setenv("RANK", str(rank))
            returned.add(faults.inject_fault((Fault.SIGTERM,), num_faults, keep_alive, 1.0, seed))
        assert returned == {tuple(hit)}
        assert min(fewest, able) <= len(hit) <= min(most, able) and all(rank >= keep_alive for rank in hit)


def test_seeds_differ_and_delays_stay_within_their_bounds(monkeypatch):
    delays = []
    monkeypatch.setitem(faults._handlers, "SIGINT", lambda delay, _: delays.append(delay))
    for seed in range(9):
        assert faults.inject_fault((Fault.SIGINT,), 1, 0, (2.0, 3.0), seed) == (0,)
    assert all(2.0 <= delay <= 3.0 for delay in delays) and len(set(delays)) == 9


def test_a_fault_of_ones_own_by_a_new_name(monkeypatch):
    assert list(faults._handlers) == [fault.name for fault in Fault]
    monkeypatch.setattr(faults, "_handlers", dict(faults._handlers))
    seen = []
    own = faults.register_fault("POWER_OUTAGE", lambda delay, callback: seen.append((delay, callback())))
    assert own == "POWER_OUTAGE"
    assert faults.inject_fault((own,), 1, 0, 2.0, 0, callback=lambda: "called") == (0,)
    assert seen.pop() == (2.0, "called")
    assert faults.register_fault("SIGKILL", lambda delay, callback: seen.append("mine")) is Fault.SIGKILL
    faults.dispatch_fault_injection(Fault.SIGKILL, 0.0, None)
    assert seen.pop() == "mine"


@pytest.mark.parametrize(
    "bad, why",
    [
        ({"faults": ()}, "faults is empty"),
        ({"num_faults": -1}, "num_faults=-1"),
        ({"num_faults": (3, 2)}, "the first is the lower"),
        ({"keep_alive": -1}, "keep_alive=-1"),
        ({"delay": -1.0}, "delay=-1.0"),
        ({"faults": ("METEORITE",), "num_faults": 0}, "no fault is called 'METEORITE'"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(bad, why):
    good = {"faults": (Fault.SIGKILL,), "num_faults": 1, "keep_alive": 0, "delay": 1.0, "seed": 0}
    with pytest.raises(UsageError, match=why):
        faults.inject_fault(**{**good, **bad})


def test_a_workload_exception_is_raised_once_and_can_be_forgotten():
    faults._workload_exception_due.set()
    with pytest.raises(faults.InjectedException):
        faults.maybe_raise_workload_exception()
    faults.maybe_raise_workload_exception()
    faults._workload_exception_due.set()
    faults.clear_workload_exception()
    faults.maybe_raise_workload_exception()
