"""Saving and loading as a training script does, with a real keeper and torch on CPUs."""

import math
import os
import re
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from waits import WAIT_S

torch = pytest.importorskip("torch")

from nvrx_slurm import checkpoint  # noqa: E402
from nvrx_slurm.checkpoint import link, rank  # noqa: E402
from nvrx_slurm.checkpoint.link import CheckpointError, address, start  # noqa: E402

pytestmark = pytest.mark.process


class Job:
    """A launcher that does nothing; this process is its rank."""

    def __init__(self):
        self.launcher = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def keeper_pid(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
            one.connect("\0" + address(os.environ, self.launcher.pid))
            return int(struct.unpack("iII", one.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])

    def kill_keeper(self):
        pidfd = os.pidfd_open(self.keeper_pid())
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], WAIT_S)[0]
        os.close(pidfd)

    def close(self):
        self.launcher.kill()
        self.launcher.communicate()


@pytest.fixture
def job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NVRX_RUN_DIR", "NVRX_INFRA_RANK", "NVRX_RESUME_BEFORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", secrets.token_hex(8))
    one = Job()
    monkeypatch.setattr(rank, "launcher_pid", lambda environ: one.launcher.pid)
    monkeypatch.setattr(rank, "start", partial(start, linger_s=0.2))
    monkeypatch.setattr(rank, "_keeper", rank._Keeper())
    yield one
    rank._keeper.drop()
    one.close()


def equal(one, other):
    if isinstance(one, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and raw(one) == raw(other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


def raw(tensor):
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"),
)


def bits(dtype, *shape):
    """Any bits, also NaNs with payloads; of bool only 0 and 1."""
    kind = getattr(torch, dtype)
    high = 2 if dtype == "bool" else 256
    count = math.prod(shape) * kind.itemsize
    return torch.randint(0, high, (count,), dtype=torch.uint8).view(kind).view(shape)


def any_state():
    return {
        **{dtype: bits(dtype, 3, 5) for dtype in DTYPES},
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 7),
        "transposed": torch.randn(4, 6).t(),
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(1, 3).expand(2, 3),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "nested": [{"a": (1, [2.5, None, True]), 7: "text"}, (), {}, [torch.ones(2)]],
        "large": [1 << 62, -(1 << 63), 1 << 200, -(1 << 90)],
        "bytes": b"\0\xff",
        ("odd" * 3): float("inf"),
        "nan": float("nan"),
        None: -0.0,
        True: "yes",
    }


def test_what_is_loaded_is_equal_bit_by_bit(job):
    assert checkpoint.load() is None and checkpoint.available() is None
    state = any_state()
    assert checkpoint.save(state, 7)
    assert checkpoint.available() == 7
    found = checkpoint.load()
    assert found[1] == 7
    assert equal(found[0], state)


def test_tensors_are_overwritten_in_place(job):
    state = {"w": torch.nn.Parameter(torch.randn(4, 6)), "t": torch.randn(6, 4).t(), "l": [1, {"x": torch.ones(2)}]}
    before = {"w": state["w"].detach().clone(), "t": state["t"].clone()}
    assert checkpoint.save(state, 1)
    with torch.no_grad():
        state["w"].zero_(), state["t"].zero_()
    state["l"][0] = 5
    parts = state["w"], state["t"], state["l"], state["l"][1]["x"]
    found = checkpoint.load(state)
    assert found[0] is state
    assert equal(state["w"].detach(), before["w"]) and equal(state["t"], before["t"]) and state["l"][0] == 1
    after = state["w"], state["t"], state["l"], state["l"][1]["x"]
    assert list(map(id, after)) == list(map(id, parts))


def train(model, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().sum().backward()
        optimizer.step()


def fresh():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1))
    return model, torch.optim.AdamW(model.parameters())


def test_training_goes_on_as_if_nothing_had_happened(job):
    model, optimizer = fresh()
    train(model, optimizer, range(5))
    assert checkpoint.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, 5)
    train(model, optimizer, range(5, 10))
    again, its_optimizer = fresh()
    found = checkpoint.load({"model": again.state_dict(), "optimizer": its_optimizer.state_dict()})
    its_optimizer.load_state_dict(found[0]["optimizer"])
    train(again, its_optimizer, range(found[1], 10))
    assert equal(dict(again.state_dict()), dict(model.state_dict()))


def test_memory_is_a_copy(job):
    weights = torch.zeros(1000)
    for iteration in range(1, 6):
        assert checkpoint.save({"w": weights.fill_(iteration)}, iteration)
    weights.fill_(99)
    found = checkpoint.load()
    assert found[1] == 5 and bool((found[0]["w"] == 5).all())
    for iteration in (6, 7):
        assert checkpoint.save({"w": weights}, iteration)
    assert bool((found[0]["w"] == 5).all())


def test_a_state_that_grows_or_shrinks(job):
    for iteration, size in enumerate((10, 100_000, 20, 1_000_000, 0, 3_000_000)):
        state = {"w": torch.full((size,), float(iteration))}
        assert checkpoint.save(state, iteration)
        found = checkpoint.load()
        assert equal(found[0], state)
    mapped = re.findall(r"memfd:nvrx-checkpoint", Path("/proc/self/maps").read_text())
    assert 1 <= len(mapped) <= 2  # what the keeper has let go is free


BAD = {
    "set": ({"a": [1, {2}]}, "state['a'][1] is a builtins.set"),
    "key": ({"a": {(1, 2): 3}}, "a key of state['a']"),
    "object": ([object()], "state[0]"),
    "sparse": ({"s": torch.eye(3).to_sparse()}, "sparse"),
    "meta": ({"m": torch.empty(3, device="meta")}, "meta"),
    "complex": ({"c": 1j}, "state['c']"),
    "surrogate": ({"s": "\udcff"}, "not valid Unicode"),
}


@pytest.mark.parametrize("state, told", BAD.values(), ids=BAD)
def test_what_cannot_be_saved_is_named_with_its_place(job, state, told):
    with pytest.raises(CheckpointError, match=re.escape(told)):
        checkpoint.save(state, 1)


def test_a_state_in_itself_is_refused(job):
    state = []
    state.append(state)
    with pytest.raises(CheckpointError, match="deep"):
        checkpoint.save(state, 1)


@pytest.mark.parametrize("iteration", [-1, 1 << 63, 1.5, None])
def test_an_iteration_is_a_number(job, iteration):
    with pytest.raises(CheckpointError, match="iteration"):
        checkpoint.save({}, iteration)


MISFITS = {
    "shape": ({"w": torch.zeros(3), "l": [1]}, "state['w']"),
    "dtype": ({"w": torch.zeros(2, dtype=torch.float64), "l": [1]}, "float64"),
    "missing": ({"w": torch.zeros(2), "l": [1], "more": 1}, "state['more'] was not saved"),
    "kind": ({"w": {}, "l": [1]}, "state['w']"),
    "length": ({"w": torch.zeros(2), "l": [1, 2]}, "state['l'] has 2 items"),
    "root": (torch.zeros(2), "state is no dict"),
}


@pytest.mark.parametrize("target, told", MISFITS.values(), ids=MISFITS)
def test_a_state_that_does_not_fit_is_left_as_it_is(job, caplog, target, told):
    assert checkpoint.save({"w": torch.ones(2), "l": [7]}, 1)
    assert checkpoint.load(target) is None
    assert told in caplog.text and "read the disk" in caplog.text
    if isinstance(target, dict) and isinstance(target["w"], torch.Tensor):
        assert not target["w"].any() and target["l"][0] == 1


def test_too_little_memory_costs_no_training(job, caplog, monkeypatch):
    monkeypatch.setenv("NVRX_KEEPER_BYTES", "8000000")
    small = {"w": torch.ones(1000)}
    assert checkpoint.save(small, 1)
    for iteration in (2, 3):
        assert not checkpoint.save({"w": torch.ones(4_000_000)}, iteration)
    assert caplog.text.count("--ft-checkpoint-memory") == 1  # not with each step
    found = checkpoint.load()
    assert found[1] == 1 and equal(found[0], small)


def test_a_killed_keeper_costs_what_it_held(job):
    state = {"w": torch.ones(10)}
    assert checkpoint.save(state, 1)
    job.kill_keeper()
    assert checkpoint.load() is None
    assert checkpoint.save(state, 2) and checkpoint.save(state, 3)
    job.kill_keeper()
    assert checkpoint.save(state, 4)
    assert checkpoint.available() == 4


def test_a_keeper_that_does_not_answer_is_not_asked_with_each_step(job, monkeypatch, caplog):
    assert checkpoint.save({"i": 1}, 1)
    keeper = job.keeper_pid()
    monkeypatch.setattr(rank, "_keeper", rank._Keeper())
    monkeypatch.setattr(link, "_ANSWER_S", 0.2)
    os.kill(keeper, signal.SIGSTOP)
    try:
        assert not any(checkpoint.save({"i": 2}, iteration) for iteration in range(2, 100))
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert caplog.text.count("timed out") == 1
    rank._keeper.retry_at = 0.0
    monkeypatch.setattr(link, "_ANSWER_S", WAIT_S)
    assert checkpoint.save({"i": 3}, 100) and checkpoint.load() == ({"i": 3}, 100)


def test_of_another_number_of_ranks(job, monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert checkpoint.save({"w": torch.ones(10)}, 1)
    with pytest.raises(CheckpointError, match="init_process_group"):
        checkpoint.load()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert checkpoint.load() is None
    assert "is of 2 ranks, not of 1" in caplog.text


def test_only_older_ones_after_a_poisoned_one(job, monkeypatch):
    assert checkpoint.save({"i": 1}, 1) and checkpoint.save({"i": 2}, 2)
    monkeypatch.setenv("NVRX_RESUME_BEFORE", "2")
    assert checkpoint.load() == ({"i": 1}, 1)


def test_what_is_done_again_after_a_load_is_another_save(job):
    """As after a restart in the process: an old copy on another node is no part of the newer state."""
    for weight in (1.0, 2.0):
        assert checkpoint.load() is None or weight == 2.0
        assert checkpoint.save({"w": weight}, 5)
    held, _ = rank._held()
    assert held == [(1, 5)]
    assert checkpoint.load() == ({"w": 2.0}, 5)


def test_a_process_that_comes_later_saves_what_is_newer(job, monkeypatch):
    """As under torchrun, which tells no cycle: the one before had been restarted in itself."""
    for iteration in (1, 2, 3):
        checkpoint.load()
        assert checkpoint.save({"i": iteration}, iteration)
    rank._keeper.drop()
    monkeypatch.setattr(rank, "_keeper", rank._Keeper())
    assert checkpoint.load() == ({"i": 3}, 3)
    assert checkpoint.save({"i": 4}, 4)
    assert checkpoint.load() == ({"i": 4}, 4)


KILLED_IN_A_SAVE = """
import os, signal, sys
import torch
from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint import rank, tree

rank.launcher_pid = lambda environ: int(sys.argv[1])
state = {name: torch.full((100_000,), 1.0) for name in "abc"}
assert checkpoint.save(state, 1)
assert checkpoint.save({name: one + 1 for name, one in state.items()}, 2)
views = tree.Mapped.views

def dying(*args):
    for index, one in enumerate(views(*args)):
        if index == 2:
            print("in the middle", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        yield one

tree.Mapped.views = dying
checkpoint.save({name: one + 2 for name, one in state.items()}, 3)
"""


def test_a_rank_that_is_killed_in_a_save_loses_that_one(job):
    assert checkpoint.save({"i": 0}, 0)  # starts the keeper
    argv = [sys.executable, "-c", KILLED_IN_A_SAVE, str(job.launcher.pid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == -signal.SIGKILL and "in the middle" in done.stdout, done.stderr
    rank._keeper.drop()
    found = checkpoint.load()
    assert found[1] == 2
    assert equal(found[0], {name: torch.full((100_000,), 2.0) for name in "abc"})


def test_an_exception_in_a_save_costs_that_one(job, monkeypatch):
    """As an in-process restart raises it."""
    state = {"w": torch.ones(10), "v": torch.ones(10)}
    assert checkpoint.save(state, 1) and checkpoint.save(state, 2)

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rank.tree.Mapped, "views", interrupted)
        checkpoint.save(state, 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(socket, "recv_fds", interrupted)  # between a request and its answer
        checkpoint.save(state, 3)
    assert checkpoint.available() == 2
    assert checkpoint.save(state, 3) and checkpoint.load() is not None


def test_a_forked_process_is_not_the_rank(job):
    assert checkpoint.save({"i": 1}, 1)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if rank._of_this_process()._link is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert checkpoint.save({"i": 2}, 2)


def test_the_local_part_of_a_dtensor(job, caplog):
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        full = torch.randn(4, 6)
        assert checkpoint.save({"w": distribute_tensor(full, mesh, [Shard(0)])}, 1)
        target = {"w": distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)])}
        assert checkpoint.load(target) is not None
        assert equal(target["w"].to_local(), full)
        assert checkpoint.load() is None and "DTensor" in caplog.text
        other = {"w": distribute_tensor(torch.zeros(4, 6), mesh, [Replicate()])}
        assert checkpoint.load(other) is None and "Replicate" in caplog.text
    finally:
        dist.destroy_process_group()
