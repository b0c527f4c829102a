"""Who uses it: DCP, the in-process wrapper, and the job that does not."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from test_jobs import keepers, launch

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
BOUND_S = 240.0  # torch is imported, perhaps on a busy machine

# Two ranks with a DTensor in two parts, one that is whole on both, and objects; a rank is killed.
DCP = """
import os, signal, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint.dcp import MemoryReader, MemoryWriter

dist.init_process_group("gloo")
rank, cycle = dist.get_rank(), int(os.environ["NVRX_CYCLE"])
mesh = init_device_mesh("cpu", (2,))
full = torch.arange(42.0).reshape(7, 6)

def state(factor):
    parts = [distribute_tensor(full * factor, mesh, [place]) for place in (Shard(0), Shard(1), Replicate())]
    return {"parts": parts, "plain": torch.ones(3) * factor, "own": {"step": factor, "name": f"of {factor}"}}

if cycle == 0:
    for iteration in (1, 2):
        writer = MemoryWriter(iteration)
        dcp.save(state(iteration), storage_writer=writer)
        assert writer.is_kept
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
assert checkpoint.available() == 2
found, reader = state(0), MemoryReader()
dcp.load(found, storage_reader=reader)
expected = state(2)
same = [torch.equal(one.to_local(), other.to_local()) for one, other in zip(found["parts"], expected["parts"])]
same += [torch.equal(found["plain"], expected["plain"])]
print("loaded", rank, reader.iteration, all(same), found["own"], flush=True)
dist.destroy_process_group()
"""

# One rank raises: all begin again in their processes.
IN_PROCESS = """
import os
import re
import torch
import torch.distributed as dist
from nvrx_slurm import checkpoint, inprocess

@inprocess.Wrapper(
    abort=inprocess.abort.AbortTorchDistributed(),
    initialize=inprocess.initialize.RetryController(max_iterations=3),
    soft_timeout=__import__("datetime").timedelta(seconds=60),
    hard_timeout=__import__("datetime").timedelta(seconds=90),
)
def train(call: inprocess.CallWrapper = None):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    weights = torch.zeros(100)
    found = checkpoint.load({"weights": weights})
    begin = 0 if found is None else found[1]
    print("begins", call.iteration, rank, begin, bool((weights == begin).all()), flush=True)
    for step in range(begin, 6):
        if call.iteration == 0 and step == 4:
            if rank == 1:
                raise ValueError("a fault")
            checkpoint.save({"weights": weights + 1}, step + 1)  # one step further than the other
        one = torch.ones(1)
        dist.all_reduce(one)
        weights += one / 2
        assert checkpoint.save({"weights": weights}, step + 1)
    dist.barrier()
    print("weights", rank, float(weights.sum()), flush=True)
    dist.destroy_process_group()

train()
"""

UNUSED = """
import os, sys
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
names = [name for name in sys.modules if name.startswith("nvrx_slurm.checkpoint")]
launcher = os.getppid()
maps = open(f"/proc/{launcher}/maps").read() + open("/proc/self/maps").read()
commands = []
for pid in filter(str.isdecimal, os.listdir("/proc")):
    try:
        commands.append(open(f"/proc/{pid}/cmdline").read())
    except OSError:
        pass
mine = [one for one in commands if "nvrx-keeper-" in one and str(launcher) in one.split("\\0")]
print("found", names, "nvrx-checkpoint" in maps, mine, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="nvrx-ku-") as name:
        yield Path(name)


def run(directory, program, *flags):
    (directory / "train.py").write_text(program)
    with launch(directory, [str(directory / "train.py")], *flags) as job:
        text, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 0, text
    assert keepers(job.pid) == []
    return text


def test_dcp_loads_what_each_rank_has_kept(directory):
    text = run(directory, DCP)
    for rank in (0, 1):
        assert f"loaded {rank} 2 True {{'step': 2, 'name': 'of 2'}}" in text
    assert len(re.findall(r"loaded \d 2", text)) == 2


def test_ranks_that_begin_again_in_their_processes_load_what_all_have(directory):
    text = run(directory, IN_PROCESS)
    for rank in (0, 1):
        assert f"begins 0 {rank} 0 True" in text and f"begins 1 {rank} 4 True" in text
        assert f"weights {rank} 600.0" in text


@pytest.mark.parametrize("flags", [(), ("--ft-checkpoint-dir=.",)], ids=["plain", "watched"])
def test_a_job_that_does_not_use_it_has_nothing_of_it(directory, flags):
    """No module, no memory, no process, in ranks and in the launcher."""
    text = run(directory, UNUSED, *flags)
    assert text.count("found [] False []") == 2


LAUNCHER = """
import sys
import nvrx_slurm.cli.run, nvrx_slurm.node.program
print([name for name in sys.modules if name.startswith("nvrx_slurm.checkpoint") or name.endswith("workers.memory")])
"""


def test_the_launcher_does_not_import_it():
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER], capture_output=True, text=True, timeout=BOUND_S, env=os.environ
    )
    assert done.stdout.strip() == "[]", done.stderr
