"""AbortTorchDistributed unblocks real gloo calls; no abort raises, hangs or loads anything."""

import logging
import multiprocessing
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from ranks_harness import WITHOUT_TORCH, Script
from stage import free_port
from waits import WAIT_S

from nvrx_slurm.inprocess.plugins import abort
from nvrx_slurm.inprocess.plugins.compose import Compose
from nvrx_slurm.inprocess.state import State

pytestmark = pytest.mark.process


STATE = State(rank=0, world_size=2, iteration=3).freeze()
ABORT, DESTROY = "_abort_process_group", "destroy_process_group"

PRELUDE = """
import datetime, os, sys, threading
import torch, torch.distributed as dist
from nvrx_slurm.inprocess.plugins import abort
from nvrx_slurm.inprocess.state import State

wait = threading.Event().wait
LONG = datetime.timedelta(seconds=600)

def abort_torch():
    abort.AbortTorchDistributed()(State(0, 2).freeze())

def abort_when_stuck(name, end):
    # from another thread, when the main one has been in that torch function for a while
    main = threading.main_thread().ident
    seen = 0
    while seen < 10:
        frame, names = sys._current_frames()[main], set()
        while frame:
            names.add(frame.f_code.co_name)
            frame = frame.f_back
        seen = seen + 1 if name in names else 0
        wait(0.01)
    end()

def unblocked(name, call, end=abort_torch):
    thread = threading.Thread(target=abort_when_stuck, args=(name, end), daemon=True)
    thread.start()
    try:
        call()
    except Exception as error:
        print("unblocked", name, type(error).__name__, flush=True)
    thread.join(10)
    assert not thread.is_alive() and not dist.is_initialized()
"""

CALLS = {
    "all_reduce": "dist.all_reduce(total)",
    "barrier": "dist.barrier(group=other)",
    "monitored_barrier": "dist.monitored_barrier()",
}
COLLECTIVES = (
    PRELUDE
    + f"""
rank, directory = int(sys.argv[1]), sys.argv[2]
held = []
for turn, (name, call) in enumerate({CALLS}.items()):
    dist.init_process_group(
        "gloo", init_method=f"file://{{directory}}/{{turn}}", rank=rank, world_size=2, timeout=LONG
    )
    other = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2
    done = f"{{directory}}/done{{turn}}"
    if rank == 0:
        unblocked(name, lambda: eval(call))
        open(done, "w").close()
    else:
        while not os.path.exists(done):
            wait(0.005)
        abort_torch()
    del other
    abort.release_groups()
    held.append([len(os.listdir(f"/proc/self/{{kind}}")) for kind in ("task", "fd")])
assert held[-1] <= held[0] and held[-1][1] <= held[0][1], held
"""
)
RENDEZVOUS = (
    PRELUDE
    + """
own = dist.TCPStore("127.0.0.1", 0, is_master=True)
os.environ.update(
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(own.port), TORCHELASTIC_USE_AGENT_STORE="True", RANK="0", WORLD_SIZE="2",
    TORCHELASTIC_RESTART_COUNT="0",
)
abort.keep_connections()
end = abort_torch
if sys.argv[1] == "again":  # the first abort comes too early
    abort_torch()
    end = abort.cut_again
unblocked("init_process_group", lambda: dist.init_process_group("gloo", timeout=LONG), end)
own.set("key", "value")
assert own.get("key") == b"value"
"""
)
RELEASED = (
    PRELUDE
    + """
import weakref
from nvrx_slurm import inprocess
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1], RANK="0", WORLD_SIZE="1")

class Report(abort.Abort, inprocess.finalize.Finalize):
    def __call__(self, state):
        print("held" if group() else "released", flush=True)
        return state

@inprocess.Wrapper(abort=inprocess.Compose(Report(), abort.AbortTorchDistributed()), finalize=Report())
def train(call: inprocess.CallWrapper):
    global group
    if call.iteration == 0:
        dist.init_process_group("gloo")
        group = weakref.ref(dist.group.WORLD)
        raise ValueError

train()
"""
)
DUMP = (
    PRELUDE
    + """
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
abort._DUMP_TIMEOUT_S = 50.0  # on a loaded machine the recorder takes its time
dist.all_reduce(torch.ones(1))
abort.AbortTorchDistributed(torch_fr_trace_path=sys.argv[2] or None)(State(0, 1, iteration=3).freeze())
assert not dist.is_initialized()
print(hasattr(torch._C._distributed_c10d, "_dump_fr_trace"))
"""
)


@pytest.fixture
def spawn(zygote, tmp_path):
    """Start a program; returns a function that waits for its good end and returns its output."""
    started = []

    def start(code, *args, **env):
        program = tmp_path / f"program{len(started)}.py"
        program.write_text(code)
        env = {"TORCH_CPP_LOG_LEVEL": "FATAL", **env}
        process = Script(zygote, [str(program), *args], env, program.with_suffix(".err"))
        started.append(process)

        def ended():
            out, err = process.communicate(WAIT_S)
            assert process.returncode == 0, err
            return out

        return ended

    yield start
    for process in started:
        process.close()


@pytest.mark.torch
def test_a_main_thread_in_a_gloo_call_is_unblocked_and_can_start_again(spawn, tmp_path):
    """The peer lives and does not come; each group has a timeout of 10 min. No thread or descriptor is left over."""
    stuck, absent = (spawn(COLLECTIVES, str(rank), str(tmp_path)) for rank in (0, 1))
    assert [line.split()[:2] for line in stuck().splitlines()] == [["unblocked", name] for name in CALLS]
    absent()


@pytest.mark.torch
@pytest.mark.parametrize("how", ["kept", "again"])
def test_a_wait_for_others_in_init_process_group_ends_and_the_wrappers_own_store_stays(spawn, how):
    assert spawn(RENDEZVOUS, how)().split()[:2] == ["unblocked", "init_process_group"]


@pytest.mark.torch
def test_aborted_groups_are_held_until_the_frames_of_the_function_are_free(spawn):
    """The Reducer of a DistributedDataParallel in such a frame would destroy its group with the GIL held."""
    assert spawn(RELEASED, str(free_port()))().split() == ["held", "released"]


@pytest.mark.torch
def test_the_flight_recorder_is_written_before_the_abort(spawn, tmp_path):
    """To the argument's directory, which takes precedence over the environment's."""
    given, env = tmp_path / "a" / "given", {"NVRX_FR_TRACE_PATH": str(tmp_path / "env")}
    all_backends = spawn(DUMP, str(tmp_path), str(given), TORCH_FR_BUFFER_SIZE="100", **env)() == "True\n"
    (file,) = given.iterdir()
    assert file.name == "rank_0_iteration_3"
    # Before torch 2.8 only NCCL's collectives are recorded.
    assert (b"all_reduce" if all_backends else b"entries") in file.read_bytes()


def test_nothing_is_imported_where_nothing_is_in_use():
    code = (
        "from nvrx_slurm.inprocess import abort\n"
        "from nvrx_slurm.inprocess.state import State\n"
        "before = set(sys.modules)\n"
        "for one in (abort.AbortTorchDistributed('/nowhere'), abort.AbortTransformerEngine(),\n"
        "            abort.AbortPersistentCheckpointProcesses()):\n"
        "    state = State(0, 1).freeze()\n"
        "    assert one(state) is state\n"
        "assert set(sys.modules) == before and 'torch' not in before\n"
    )
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH + code], check=True, timeout=WAIT_S)


def fake(monkeypatch, module, **attributes):
    """An imported module."""
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**attributes))
    return sys.modules[module]


def fake_c10d(monkeypatch, **deeds):
    """torch.distributed with these functions, which end its groups if they return. Returns the names as called."""
    calls = []
    c10d = fake(monkeypatch, abort._C10D, live=True, is_initialized=lambda: c10d.live)

    def do(name):
        calls.append(name)
        deeds[name]()
        c10d.live = False

    for name in deeds:
        setattr(c10d, name, lambda name=name: do(name))
    return calls


def test_groups_that_were_being_made_are_forgotten(monkeypatch):
    """torch numbers groups: with one group there and none here, the ranks would not meet any more."""
    world = SimpleNamespace(pg_names={"half": "made"}, group_count=1)
    unregistered = []
    end_all = {"_unregister_all_process_groups": lambda: unregistered.append("all")}
    fake(monkeypatch, abort._C10D, _world=world, is_initialized=lambda: False, **end_all)
    abort.forget_half_made_groups()
    assert (world.pg_names, world.group_count, unregistered) == ({}, 0, ["all"])


def warnings_in(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fail():
    raise RuntimeError("NCCL said no")


@pytest.mark.parametrize(
    "aborts, destroys, calls",
    [
        (fail, lambda: None, [ABORT, DESTROY]),
        (None, lambda: None, [DESTROY]),  # torch 2.5
        (fail, fail, [ABORT, DESTROY]),
    ],
)
def test_an_abort_that_fails_is_followed_by_a_destroy_and_nothing_is_raised(
    monkeypatch, caplog, aborts, destroys, calls
):
    deeds = {DESTROY: destroys} | ({ABORT: aborts} if aborts else {})
    made = fake_c10d(monkeypatch, **deeds)
    assert abort.AbortTorchDistributed()(STATE) is STATE
    assert made == calls
    warned = warnings_in(caplog)
    assert len(warned) == (aborts is destroys is fail) and all("NCCL said no" in line for line in warned)


def test_an_abort_that_hangs_is_abandoned_and_said_once(monkeypatch, caplog):
    over = threading.Event()
    fake_c10d(monkeypatch, **{ABORT: over.wait, DESTROY: fail})
    monkeypatch.setattr(abort, "_ABORT_TIMEOUT_S", 0.05)
    assert abort.AbortTorchDistributed()(STATE) is STATE
    assert warnings_in(caplog) == ["abort: aborting the process groups did not end within 0.05 s and is abandoned"]
    (left,) = (thread for thread in threading.enumerate() if "process groups" in thread.name)
    assert left.daemon
    over.set()
    left.join(WAIT_S)
    assert not left.is_alive()


def test_transformer_engine_is_freed_after_torch(monkeypatch):
    order = fake_c10d(monkeypatch, **{ABORT: lambda: None})
    engine = "transformer_engine.pytorch"
    fake(monkeypatch, f"{engine}.module.base", destroy_ub=lambda: order.append("destroy_ub"))
    fake(monkeypatch, f"{engine}.fp8", FP8GlobalStateManager=SimpleNamespace(reset=lambda: order.append("reset")))
    both = Compose(abort.AbortTransformerEngine(), abort.AbortTorchDistributed())
    assert isinstance(both, abort.Abort) and both(STATE) is STATE
    assert order == [ABORT, "destroy_ub", "reset"]


def test_the_checkpoint_process_is_killed_and_another_can_be_started(monkeypatch):
    process = multiprocessing.get_context("spawn").Process(target=signal.pause, daemon=True)
    process.start()
    module = fake(monkeypatch, abort._DCP_PROCESS, _CHECKPOINT_PROCESS=SimpleNamespace(_save_process=process))
    for _ in range(2):
        assert abort.AbortPersistentCheckpointProcesses()(STATE) is STATE
        assert module._CHECKPOINT_PROCESS is None and process.exitcode == -9
