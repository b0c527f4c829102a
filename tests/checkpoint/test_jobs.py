"""Jobs of real `nvrx-run` and gloo: a fault costs one step, and nothing of ours is left when the job is gone."""

import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from stage import free_port

pytest.importorskip("torch")
pytestmark = pytest.mark.process

REPO = Path(__file__).resolve().parents[2]
BOUND_S = 150.0
STEPS = 6
FAULT_AT = 4

TRAINING = """
import ctypes, hashlib, os, signal, sys
from functools import partial
import torch
import torch.distributed as dist
from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint import link, rank as keeping

keeping.start = partial(link.start, linger_s=2.0)
fault, fault_at, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo")
rank, cycle = dist.get_rank(), int(os.environ["NVRX_CYCLE"])
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.AdamW(model.parameters())

def state():
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

found = checkpoint.load(state())
if found is not None:
    optimizer.load_state_dict(found[0]["optimizer"])
begin = 0 if found is None else found[1]
print("begins", cycle, rank, begin, flush=True)
for step in range(begin, steps):
    if cycle < (2 if fault == "told" else 1) and step == fault_at + cycle and fault != "none":
        print("fault", rank, os.getppid(), os.getpid(), link.address(os.environ, 0), cycle, flush=True)
        dist.barrier()
        if rank == 1 and fault not in ("agent", "once", "told"):
            if fault == "in-a-save":
                keeping.tree.Mapped.views = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
                checkpoint.save(state(), step + 1)
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "in-a-save":
            checkpoint.save(state(), step + 1)  # this rank is one step further than the other
        while True:  # no Python code runs any more, as in a collective: no handler of a signal
            ctypes.CDLL(None).pause()
    torch.manual_seed(100 * rank + step)
    optimizer.zero_grad()
    model(torch.randn(8, 16)).square().mean().backward()
    for one in model.parameters():
        dist.all_reduce(one.grad)
    optimizer.step()
    assert checkpoint.save(state(), step + 1)
text = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
print("weights", rank, hashlib.sha256(text).hexdigest(), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="nvrx-kt-") as name:
        (Path(name) / "train.py").write_text(TRAINING)
        yield Path(name)


def start(directory, fault, *more):
    return launch(directory, [str(directory / "train.py"), fault, str(FAULT_AT), str(STEPS)], *more)


def launch(directory, words, *more):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "NVRX_", "PET_", "TORCHELASTIC_"))}
    env = kept | {"PYTHONPATH": str(REPO), "TMPDIR": str(directory)}
    flags = (f"--log-dir={directory / 'logs'}", "--nproc-per-node=2", "--max-restarts=1", *more)
    return subprocess.Popen(
        [sys.executable, "-m", "nvrx_slurm.cli.run", *flags, *words],
        env=env, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(directory, fault, *more):
    """Its output, and the weights of its ranks."""
    with start(directory, fault, *more) as job:
        text, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 0, text
    assert keepers(job.pid) == []
    return text, set(re.findall(r"weights \d (\w+)", text))


def keepers(launcher):
    """Those of the ranks of a launcher."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if any(word.startswith(b"nvrx-keeper-") for word in words) and str(launcher).encode() in words:
            found.append(int(path.parent.name))
    return found


def begins(text, cycle):
    return {int(one) for one in re.findall(rf"begins {cycle} \d (\d+)", text)}


def test_a_killed_rank_costs_one_step_while_the_other_waits_in_c(directory):
    _, undisturbed = run(directory, "none")
    text, weights = run(directory, "killed")
    assert len(re.findall(r"fault \d", text)) == 2
    assert begins(text, 0) == {0} and begins(text, 1) == {FAULT_AT}
    assert len(undisturbed) == 1 and weights == undisturbed


def test_all_ranks_take_the_iteration_that_each_of_them_has(directory):
    """The one that was killed in its save has not the newest of the other."""
    text, weights = run(directory, "in-a-save", "--ft-checkpoint-memory=1T")
    assert "saves may be refused" in text  # the keeper is there before the first save
    assert begins(text, 1) == {FAULT_AT}
    assert len(weights) == 1


def test_two_agents_of_one_host_have_a_keeper_each(directory):
    place = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two")
    with start(directory, "killed", *place) as one, start(directory, "killed", *place) as other:
        texts = [job.communicate(timeout=BOUND_S)[0] for job in (one, other)]
    assert one.returncode == other.returncode == 0, texts
    assert [begins(text, 1) for text in texts] == [{FAULT_AT}] * 2
    assert keepers(one.pid) == keepers(other.pid) == []


def test_the_example_loses_no_more_than_a_step(directory):
    """Its disk has nothing yet when a rank is killed."""
    ends = []
    for faulty in (False, True):
        progress, place = directory / f"progress{faulty}", directory / f"disk{faulty}"
        words = ("--steps=60", "--step-time=0.02", "--memory-every=1", "--checkpoint-every=50")
        words += (f"--progress-file={progress}", f"--checkpoint-dir={place}")
        with launch(directory, [str(REPO / "examples/ddp.py"), *words]) as job:
            step, pid = 0, 0
            while faulty and step < 10:
                step, pid = map(int, read(Path(f"{progress}.1")).split() or (0, 0))
                select.select([], [], [], 0.01)
            if faulty:
                os.kill(pid, signal.SIGKILL)
            text, _ = job.communicate(timeout=BOUND_S)
        assert job.returncode == 0, text
        resumed = re.findall(r"resumed from step (\d+), in memory", text)
        assert [int(one) >= step - 1 for one in resumed] == [True] * faulty, text
        ends += re.findall(r"weights sha256=\w+", text)
    assert len(ends) == 2 and len(set(ends)) == 1


def read(path):
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def test_the_keeper_outlives_a_killed_agent_for_a_while(directory):
    with start(directory, "agent") as job:
        for line in job.stdout:
            if re.search(r"fault \d", line):
                break
        (keeper,) = keepers(job.pid)
        pidfd = os.pidfd_open(keeper)
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert not select.select([pidfd], [], [], 1.0)[0]
        assert select.select([pidfd], [], [], BOUND_S)[0]
        os.close(pidfd)
    assert keepers(job.pid) == []
