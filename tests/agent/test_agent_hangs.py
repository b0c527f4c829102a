"""Ranks that wait for a hung rank in a real collective: the hung one is the first cause, not its victims."""

from __future__ import annotations

import pytest
from agent_harness import CLIENT, UP, Rig

HEAD = (
    UP
    + CLIENT
    + """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def hang_here():
    {hang}
def step():
    client.send_heartbeat()
    if RANK == 1 and CYCLE == 0:
        hang_here()
    dist.all_reduce(torch.ones(4))
if CYCLE == 0:
    for _ in range(3000):
        step()
"""
)
HANGS = {
    "sleep": "time.sleep(600)",
    "spin": "exec('while True: pass')",
    "fifo": "os.mkfifo(f'{os.getpid()}.fifo'); open(f'{os.getpid()}.fifo').read()",
    "lock": "import threading; threading.Lock().acquire() and threading.Event().wait()",
}


@pytest.mark.torch
@pytest.mark.parametrize("kind", HANGS)
def test_the_rank_that_hangs_after_its_heartbeat_is_named(rig: Rig, kind: str) -> None:
    script = rig.script(HEAD.replace("{hang}", HANGS[kind]))
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--ft-rank-heartbeat-timeout=1")
    one = rig.run(script, *flags, "--ft-initial-rank-heartbeat-timeout=60")
    assert one.wait() == 0
    [restart] = rig.result["restarts"]
    assert restart["rank"] == 1 and "hung" in restart["cause"]


@pytest.mark.torch
def test_the_victim_falls_silent_first(rig: Rig) -> None:
    """Both ranks time out within milliseconds; the one that waits does so first."""
    script = rig.script(
        HEAD.replace("{hang}", "time.sleep(600)").replace(
            "send_heartbeat()", "send_heartbeat(); RANK and (time.sleep(0.002), client.send_heartbeat())"
        )
    )
    flags = ("--nproc-per-node=2", "--max-restarts=1", "--ft-rank-heartbeat-timeout=1")
    one = rig.run(script, *flags, "--ft-initial-rank-heartbeat-timeout=60")
    assert one.wait() == 0
    [restart] = rig.result["restarts"]
    assert restart["rank"] == 1, one.text
    assert "1 ranks wait for it" in one.text
