"""`should_stop()`: what a rank hears of a warning, what its agent learns of the answer, and when all ranks hear it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import textwrap

import pytest
from monitor_harness import ROOT, Rig, kill_monitor

from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.testing import standalone_monitor

ASKING = """
client.init_workload_monitoring()
say(client.should_stop())
for line in sys.stdin:
    if line.strip() == "again":
        client.shutdown_workload_monitoring()
        client.init_workload_monitoring()
    say(client.should_stop())
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_warned_rank_hears_yes_until_its_end_and_its_agent_learns_of_it(killed: bool) -> None:
    """Also if the rank monitor is killed in between: it has no part in it."""

    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker(ASKING)
            assert await worker.line() == "False"
            if killed:
                await kill_monitor(rig)
            rig.monitor.warn()
            rig.monitor.warn()
            assert not rig.monitor.leaves  # it has not asked yet
            for question in ("", "again", ""):
                worker.tell(question)
                assert await worker.line() == "True"
                assert rig.monitor.leaves
            assert worker.process.stdin
            worker.process.stdin.close()
            assert await worker.ended() == 0
            assert rig.monitor.leaves  # also after its end, until unwatch()

    asyncio.run(story())


def test_the_next_life_knows_nothing_of_the_warning_of_the_last() -> None:
    async def story() -> None:
        async with Rig() as rig:
            first = rig.worker("client.init_workload_monitoring()\nsay(client.should_stop())\nsys.stdin.read()\n")
            assert await first.line() == "False"
            rig.monitor.warn()
            assert first.process.stdin
            first.process.stdin.close()
            assert await first.ended() == 0
            assert not rig.monitor.leaves  # it was warned, and never asked again
            rig.monitor.unwatch()
            second = rig.worker(ASKING, cycle=1)
            assert await second.line() == "False"
            rig.monitor.warn()
            second.tell("")
            assert await second.line() == "True"

    asyncio.run(story())


def test_a_warning_before_init_is_heard_after_it() -> None:
    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker("sys.stdin.readline()\nclient.init_workload_monitoring()\nsay(client.should_stop())\n")
            rig.monitor.warn()
            worker.tell("")
            assert await worker.line() == "True"
            assert await worker.ended() == 0

    asyncio.run(story())


def test_a_forked_child_cannot_answer_for_its_rank() -> None:
    async def story() -> None:
        async with Rig() as rig:
            worker = rig.worker("""
                client.init_workload_monitoring()
                sys.stdin.readline()
                if os.fork() == 0:
                    try:
                        client.should_stop()
                    except RankMonitorClientError as error:
                        say(error)
                    os._exit(0)
                os.wait()
            """)
            rig.monitor.warn()
            worker.tell("")
            assert (await worker.line()).startswith("should_stop() needs init_workload_monitoring() first")
            assert await worker.ended() == 0
            assert not rig.monitor.leaves

    asyncio.run(story())


def test_without_init_and_after_shutdown_it_raises() -> None:
    client = RankMonitorClient()
    with standalone_monitor() as monitor:
        for ask in (client.should_stop, client.should_stop_together):
            with pytest.raises(RankMonitorClientError, match=rf"^{ask.__name__}\(\) needs init_workload_monitoring"):
                ask()
        client.init_workload_monitoring()
        assert not client.should_stop() and not client.should_stop_together()
        monitor.warn()
        assert client.should_stop_together() and client.should_stop()
        client.shutdown_workload_monitoring()
        with pytest.raises(RankMonitorClientError, match="before shutdown_workload_monitoring"):
            client.should_stop()


@pytest.mark.parametrize("every", [0, -1, 1.0, True])
def test_a_bad_interval_is_refused(every: object) -> None:
    client = RankMonitorClient()
    with standalone_monitor():
        client.init_workload_monitoring()
        with pytest.raises(RankMonitorClientError, match="every=.* must be an integer >= 1"):
            client.should_stop_together(every=every)  # type: ignore[arg-type]
        client.shutdown_workload_monitoring()


def test_several_ranks_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    client = RankMonitorClient()
    with standalone_monitor():
        client.init_workload_monitoring()
        with pytest.raises(RankMonitorClientError, match=r"call torch.distributed.init_process_group\(\) first"):
            client.should_stop_together()
        client.shutdown_workload_monitoring()


RANKS = """
import json, os, sys
sys.path.insert(0, {root!r})
import torch.distributed as dist
from nvrx_slurm.fault_tolerance import RankMonitorClient
from nvrx_slurm.testing import standalone_monitor

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
client = RankMonitorClient()

def steps(warned_at, **how):
    "The first step at which this rank heard yes; it is warned before step `warned_at`, and asks for itself as well."
    client.init_workload_monitoring()
    for step in range(1, 100):
        if step == warned_at:
            monitor.warn()
        alone = client.should_stop() if rank == 1 else None
        if client.should_stop_together(**how):
            break
    again = client.should_stop_together(**how)  # and it stays so, without the others
    client.shutdown_workload_monitoring()
    return [step, again, alone]

said = []
for how in {hows}:
    if how.pop("pair", False):
        pair = dist.new_group([0, 2])
        how["group"] = pair
        if rank == 1:
            said.append(None)
            continue
    with standalone_monitor() as monitor:
        said.append(steps({{0: 9, 1: 7, 2: 5}}[rank], **how))
dist.destroy_process_group()
print(json.dumps(said))
"""


@pytest.mark.torch
def test_all_ranks_hear_it_at_the_same_step(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Three real gloo ranks, warned before steps 9, 7 and 5; asking every step, every third, and in a group of two."""
    pytest.importorskip("torch")
    program = RANKS.format(root=ROOT, hows=[{}, {"every": 3}, {"every": 4, "pair": True}])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "store")],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        results = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0, 0], results
    zero, one, two = (json.loads(out) for out, _ in results)
    assert zero == two == [[5, True, None], [6, True, None], [8, True, None]]
    assert one == [[5, True, False], [6, True, False], None]  # it had not heard of it itself when all left
