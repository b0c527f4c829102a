"""Checkpoints in memory on a real Slurm: one keeper on each node, a fault costs a step, nothing is left of the job."""

import socket

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.slurm

TRAINING = """
import torch
import torch.distributed as dist
from nvrx_slurm import checkpoint
from nvrx_slurm.checkpoint import link

dist.init_process_group("gloo")
found = checkpoint.load()
begin = 0 if found is None else int(found[0]["weights"][0])
mark(f"begin{begin}")
with open("keepers", "a") as file:
    file.write(link.address(os.environ, 0) + "\\n")
weights = torch.full((1000,), float(begin))
for step in range(begin, 6):
    if CYCLE == 0 and step == 4:
        dist.barrier()
        if RANK == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    dist.all_reduce(one := torch.ones(1))
    weights += one / dist.get_world_size()
    assert checkpoint.save({"weights": weights}, step + 1)
mark(f"end{int(weights[0])}")
dist.destroy_process_group()
"""


def test_a_killed_rank_on_one_of_two_nodes_costs_a_step(jobs):
    job = jobs.submit(TRAINING, "--nnodes=2 --nproc-per-node=2 --max-restarts=1")
    kept = job.wait_marks("begin4", 4, cycle=1)
    assert {mark.node for mark in kept} == {"n1", "n2"}
    job.ends("COMPLETED", 0)
    assert len(job.marks("begin0", 0)) == len(job.marks("end6", 1)) == 4
    names = (job.directory / "keepers").read_text().split()
    assert len(set(names)) == 2  # one for each node
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one, pytest.raises(ConnectionRefusedError):
            one.connect(f"\0{name}")


# Nodes of the cluster are on one host, so a rank can ask the keepers of both.
LOSES_AN_AGENT = TRAINING.replace(
    "os.kill(os.getpid(), signal.SIGKILL)",
    """
            names = set(open("keepers").read().split())
            while any(sum(one.iteration == 4 for one in kept(name)) < 4 for name in names):
                pass
            mark("kept")
            os.kill(link.launcher_pid(os.environ), signal.SIGKILL)
""",
).replace(
    'dist.init_process_group("gloo")',
    """
from nvrx_slurm.checkpoint import messages as m

def kept(name):
    with link.connect(name) as connection:
        connection.send(m.requests.encode(m.AskKept()))
        return m.answers.decode(connection.recv(m.MAX_PACKET_BYTES)).kept

dist.init_process_group("gloo")
""",
)


def test_a_spare_goes_on_with_the_copies_of_a_node_whose_agent_was_killed(jobs):
    words = "--nnodes=2:3 --nproc-per-node=2 --max-restarts=1 --ft-checkpoint-interface=lo"
    job = jobs.submit(LOSES_AN_AGENT, words)
    job.wait_marks("kept", 1, cycle=0)
    begun = job.wait_marks("begin4", 4, cycle=1)
    assert len({mark.node for mark in begun}) == 2
    job.ends("COMPLETED", 0)
    assert len(job.marks("end6", 1)) == 4
