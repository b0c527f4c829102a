"""One of four ranks on two nodes hangs in a job with real collectives: that rank is named, not its victims."""

from __future__ import annotations

import json
from typing import Any

import pytest
from agent_harness import CLIENT, UP, Rig

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
EXPECTED: dict[str, tuple[list[int], str]] = {
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
JOBS = [list(EXPECTED)[first::3] for first in range(3)]


@pytest.mark.torch
@pytest.mark.parametrize("kinds", JOBS, ids=lambda kinds: kinds[0])
def test_the_rank_that_the_others_wait_for_is_named(rig: Rig, kinds: list[str]) -> None:
    script = rig.script(HEAD.replace("{cycles}", repr(kinds)))
    flags = ("--nproc-per-node=2", f"--max-restarts={len(kinds)}", "--ft-rank-heartbeat-timeout=1.5")
    nodes = rig.nodes(2, "2", script, *flags, "--ft-initial-rank-heartbeat-timeout=60", "--ft-crash-loop-backoff=0")
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


def report(rig: Rig, cycle: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((rig.run_dir / f"cycle_{cycle}" / "hang.json").read_text())
    return found
