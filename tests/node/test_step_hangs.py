"""Scripts that import nothing of ours and make no step for long: a hang is ended, a pause is told and goes on."""

import json
import re

import pytest

pytestmark = [pytest.mark.process, pytest.mark.torch]
BOUND_S = 150.0
OFTEN = "from nvrx_slurm.node.monitors import paces\npaces.EVERY_S = 0.5"
SCRIPT = """
import multiprocessing, torch, torch.distributed as dist
dist.init_process_group("gloo")
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
def train(steps):
    for _ in range(steps):
        net(torch.ones(2, 4)).sum().backward()
        for one in net.parameters():
            dist.all_reduce(one.grad)
        optimizer.step()
def until(condition):
    while not condition():
        pass
def told():  # by the launcher, that nothing proves a hang
    return os.path.exists(os.path.join(os.environ["NVRX_TEST_GATES"], "told"))
def in_processes():
    one = multiprocessing.get_context("fork").Process(target=until, args=(told,))
    one.start()
    one.join()
def reads():
    while not told():
        with open(__file__, "rb") as file:
            file.read()
        time.sleep(0.1)
def sleeps():
    time.sleep(600)
def stops():
    os.kill(os.getpid(), signal.SIGSTOP)
def all_wait():
    gate("end")
kind = sys.argv[1]
train(25)
if CYCLE == 0 and (RANK == 1 or kind.startswith("all")):
    globals()[kind]()
train(5)
dist.barrier()
os._exit(0)
"""
FLAGS = ("--nproc-per-node=3", "--max-restarts=1", "--ft-step-timeout-min=3", "--ft-preload=torch")


@pytest.mark.parametrize("kind", ["sleeps", "stops"])
def test_a_rank_that_does_nothing_while_others_wait_is_ended(rig, kind):
    rig.before = OFTEN
    one = rig.run(rig.script(SCRIPT), *FLAGS, "--ft-crash-loop-backoff=0", args=(kind,))
    assert one.wait(BOUND_S) == 0
    (restart,) = rig.result["restarts"]
    assert restart["rank"] == 1
    found = json.loads((rig.run_dir / "cycle_0" / "hang.json").read_text())
    assert found["culprits"] == [1]


PAUSES = {
    "in_processes": r"rank 1 computes",
    "reads": r"rank 1 (reads or writes|computes)",
    "all_wait": "rank 0 sleeps",
}


@pytest.mark.parametrize("kind", PAUSES)
def test_a_rank_that_may_go_on_is_told_and_left_alone(rig, kind):
    rig.before = OFTEN
    one = rig.run(rig.script(SCRIPT), *FLAGS, args=(kind,))
    said = one.line("made no step for (.*) but nothing proves a hang: (.*)$", BOUND_S)
    assert re.search(f"{PAUSES[kind]} at .*work.py", said[2])
    (rig.dir / "told").touch()
    rig.open("end") if kind == "all_wait" else None
    assert one.wait(BOUND_S) == 0 and not rig.result["restarts"]
