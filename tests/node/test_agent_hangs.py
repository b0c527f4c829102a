"""One of four ranks on two nodes hangs in a job with real collectives: that rank is named, not its victims."""

import json
import re
import subprocess
import sys

import pytest
from agent_harness import CLIENT, UP

from nvrx_slurm.cli import stacks
from nvrx_slurm.types import RankEvidence

pytestmark = pytest.mark.process


HEAD = (
    UP
    + CLIENT
    + """
import multiprocessing, re
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one, other = dist.new_group([0, 2]), dist.new_group([0, 2])
HERE = f"fifo.{os.getpid()}"
def step(count=4, group=None):
    client.send_heartbeat()
    dist.all_reduce(torch.ones(count), group=group)
def vfork_that_waits():  # the parent is in state D until the child has replaced its program
    os.mkfifo(HERE)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, HERE, os.O_RDONLY, 0)])
def fifo():
    os.mkfifo(HERE)
    open(HERE).read()
def slow():
    for _ in range(10**6):
        time.sleep(0.01)
def dead_loader():
    multiprocessing.get_context("spawn").Queue().get()
def holds_the_interpreter():
    re.match("(a+)+$", "a" * 60 + "b")
def stops():
    os.kill(os.getpid(), signal.SIGSTOP)
def skips_a_barrier():
    step()
def other_size():
    step(1)
KINDS = {
    "sleeps": lambda: time.sleep(600),
    "spins": lambda: exec("while True: pass"),
    **{each.__name__: each for each in (vfork_that_waits, fifo, slow, dead_loader, stops)},
    **{each.__name__: each for each in (holds_the_interpreter, other_size)},
}
def hang(kind):
    if kind == "skips_a_barrier":
        if RANK != 2:
            dist.barrier()
        step()
    elif kind == "other_order":
        if RANK == 0:
            step(group=one), step(group=other)
        elif RANK == 2:
            step(group=other), step(group=one)
    elif kind == "other_collective" and RANK == 2:
        dist.broadcast(torch.ones(4), src=1)
    elif RANK == 2:
        KINDS[kind]()
    for _ in range(5):
        step()
cycles = {cycles}
for _ in range(3):
    step()
if CYCLE < len(cycles):
    hang(cycles[CYCLE])
dist.barrier()
os._exit(0)
"""
)
# What is known of each hang: the culprits, and a word of the verdict.
EXPECTED = {
    "sleeps": ([2], "sleeps"),
    "spins": ([2], "moves"),
    "vfork_that_waits": ([2], "kernel"),
    "fifo": ([2], "in fifo"),
    "slow": ([2], "in slow"),
    "dead_loader": ([2], "in dead_loader"),
    "stops": ([2], "stopped"),
    "holds_the_interpreter": ([2], "in holds_the_interpreter"),
    "skips_a_barrier": ([2], "gloo:all_reduce"),
    "other_collective": ([2], "gloo:broadcast"),
    "other_size": ([2], "number 5"),
    "other_order": ([], "in 3 groups"),
}
MORE = ("--ft-crash-loop-backoff=0", "--ft-preload=torch")
FIRST = ["sleeps", "stops", "other_collective"]
JOBS = [FIRST, *([kind for kind in EXPECTED if kind not in FIRST][first::2] for first in range(2))]


@pytest.mark.repeats("spins", "vfork")
@pytest.mark.torch
@pytest.mark.parametrize("kinds", JOBS, ids=lambda kinds: kinds[0])
def test_the_rank_that_the_others_wait_for_is_named(rig, kinds):
    script = rig.script(HEAD.replace("{cycles}", repr(kinds)))
    flags = ("--nproc-per-node=2", f"--max-restarts={len(kinds)}", "--ft-rank-heartbeat-timeout=1.5")
    nodes = rig.nodes(2, "2", script, *flags, "--ft-initial-rank-heartbeat-timeout=60", *MORE)
    assert [node.wait(120.0) for node in nodes] == [0, 0], nodes[0].text
    found = {kind: report(rig, cycle) for cycle, kind in enumerate(kinds)}
    wrong = {
        kind: seen["why"]
        for kind, seen in found.items()
        if seen["culprits"] != EXPECTED[kind][0] or EXPECTED[kind][1] not in seen["why"]
    }
    assert not wrong, json.dumps(found, indent=1)
    for kind, restart in zip(kinds, rig.result["restarts"], strict=True):
        if EXPECTED[kind][0]:
            assert restart["rank"] == 2, restart


def report(rig, cycle):
    found = json.loads((rig.run_dir / f"cycle_{cycle}" / "hang.json").read_text())
    return found


@pytest.mark.parametrize(
    "deed, other, why",
    [("client.shutdown_workload_monitoring()", "forever()", "after shutdown_"), ("pass", "", "after most other ranks")],
)
def test_a_rank_that_does_not_end_is_named(rig, deed, other, why):
    script = rig.script(f"{CLIENT}\nif RANK == 1:\n    {deed}\n    forever()\n{other}")
    one = rig.run(script, "--nproc-per-node=2", "--ft-rank-exit-timeout=0.5")
    assert one.wait() == 1
    cause = rig.result["first_cause"]
    assert (cause["kind"], cause["rank"]) == ("hang", 1) and why in cause["message"]


LIVE = """
import torch
def wait_for_ever():
    say("up")
    gate("end")
def work():
    wait_for_ever()
if sys.argv[1] == "closes":
    os.closerange(3, 4096)
    mine = open(sys.argv[2], "w")
work()
"""
STACK = re.compile(r"work.py\W+line \d+ in wait_for_ever\n.*work.py\W+line \d+ in work$", re.M)


@pytest.mark.torch
@pytest.mark.parametrize("way", ["calls", "keeps", "closes"])
@pytest.mark.parametrize("warm", ["--ft-preload=torch", "--ft-warm=off"])
def test_live_ranks_are_looked_at_and_go_on(rig, warm, way):
    """Also those that never call us. One that closes descriptors has no stack, and nothing gets into its files."""
    own = rig.dir / "own"
    own.touch()
    script = rig.script(CLIENT * (way == "calls") + LIVE)
    one = rig.run(script, "--nproc-per-node=2", warm, args=(way, str(own)))
    one.ranks("up")
    one.monitored()
    ask = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "stacks", str(rig.run_dir)]
    shown = [subprocess.run(ask, env=rig.env(), capture_output=True, text=True) for _ in range(2)]
    for told in shown:
        assert told.returncode == 0 and len(STACK.findall(told.stdout)) == 2 * (way != "closes"), told
        assert [f"rank {rank} on node" in told.stdout for rank in (0, 1)] == [True, True]
    assert own.read_text() == ""
    rig.ends_well("end", one)
    assert "10 min without a step" in one.text
    ended = subprocess.run(ask, env=rig.env(), capture_output=True, text=True)
    assert ended.returncode == 2 and "no rank of" in ended.stderr


@pytest.mark.fast
def test_a_stopped_rank_has_no_stack_and_its_section_is_named_once():
    ranks = [
        RankEvidence(0, 0, "n1", "S", frames=("work.py:2 in work",), section="section 'step'"),
        RankEvidence(1, 1, "n2", "T", section="section 'step'"),
    ]
    _, first, _, second, no_stack = stacks._tell(ranks)
    assert all(line.count("section") == 1 for line in (first, second))
    assert "stopped" in no_stack and "torch" not in no_stack
