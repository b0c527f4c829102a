"""A monitor without a launcher, and collective calls of three real ranks over gloo."""

import json
import os

import pytest
from monitor_harness import ROOT, SOCKET
from ranks_harness import Script
from waits import WAIT_S, until

from nvrx_slurm.fault_tolerance import (
    HeartbeatTimeouts,
    RankMonitorClient,
    RankMonitorClientError,
    SectionTimeouts,
    WorkloadAction,
    WorkloadControlRequest,
)
from nvrx_slurm.monitor.distributed import device_for
from nvrx_slurm.testing import standalone_monitor

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def looks():
    """The first client of a process keeps the socket by which monitors look at it."""
    with standalone_monitor(rank_heartbeat_timeout=30.0):
        client = RankMonitorClient()
        client.init_workload_monitoring()
        client.shutdown_workload_monitoring()


@pytest.mark.parametrize("rank", [None, "5"])
def test_it_works_and_leaves_nothing_behind(monkeypatch, rank):
    monkeypatch.delenv(SOCKET, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    fds = set(os.listdir("/proc/self/fd"))
    client = RankMonitorClient()
    requests = [WorkloadControlRequest(action, f"for {action.name}") for action in WorkloadAction]
    with standalone_monitor(rank_heartbeat_timeout=30.0, rank_section_timeouts={"step": 0.2}) as monitor:
        client.init_workload_monitoring()
        assert client.rank_info.global_rank == int(rank or 0)
        assert client.cfg.rank_heartbeat_timeout == 30.0 and client.cfg.num_warmup_iterations == 5
        assert client.hb_timeouts == HeartbeatTimeouts(None, 30.0, False)
        assert client.section_timeouts == SectionTimeouts({"step": 0.2})
        with pytest.raises(TimeoutError, match="0 requests"):
            monitor.wait_for_request(0.01)
        with pytest.raises(TimeoutError, match="0 hangs"):
            monitor.wait_for_hang(0.01)
        for request in requests:
            client.send_workload_control_request(request)
        assert monitor.wait_for_request(WAIT_S, count=3) == requests[2] and monitor.requests == requests
        assert not client.should_stop()
        monitor.warn()
        assert client.should_stop() and client.should_stop_together()
        client.send_heartbeat()
        client.start_section("step")
        assert monitor.wait_for_hang(WAIT_S).startswith("in section 'step' for ")
        assert len(monitor.hangs) == 1
        pid = monitor.pid
        client.shutdown_workload_monitoring()
    assert SOCKET not in os.environ and os.environ.get("RANK") == rank
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the monitor is gone")
    assert set(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize(
    "backends, device",
    [
        ("cpu:gloo,cuda:nccl", "cpu"), ("cuda:nccl", "cuda"), ("nccl", "cuda"), ("gloo", "cpu"), ("cpu:mpi", None),
    ],
)  # fmt: skip
def test_where_the_collective_runs(backends, device):
    if device is not None:
        assert device_for(backends) == device
        return
    with pytest.raises(RankMonitorClientError, match="gloo or nccl"):
        device_for(backends)


RANKS = f"""
import json, os, sys, threading
sys.path.insert(0, {ROOT!r})
import torch.distributed as dist
from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.testing import standalone_monitor

rank = int(sys.argv[2])
wait = threading.Event().wait
said = {{}}

def heartbeats(client):
    said["too early"] = client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
    try:
        client.calculate_and_set_hb_timeouts()
    except RankMonitorClientError as error:
        said["error"] = str(error)
    wait((0.05, 0.15, 0)[rank])
    client.send_heartbeat()
    wait((0.12, 0, 0.05)[rank])
    client.send_heartbeat()
    said["done"] = client.calculate_and_set_hb_timeouts()
    said["state"] = client.state_dict()["current_timeouts"]
    wait((0, 0, 0.4)[rank])
    client.send_heartbeat()
    client.calculate_and_set_hb_timeouts()
    said["again"] = client.hb_timeouts.subsequent

def sections(client):
    calculate = client.calculate_and_set_section_timeouts
    client.start_section("a"); wait((0, 0.15, 0)[rank]); client.end_section("a")
    said["sections too early"] = calculate(skip_if_not_ready=True)
    said["a"] = calculate(["a"], calc_out_of_section=False)
    said["only a"] = client.state_dict()["current_timeouts"]["section"]
    if rank == 0:  # seen by one rank is enough
        client.start_section("step"); client.end_section("step")
        client.start_section("b"); client.end_section("b")
        wait(0.1)
    said["all"] = calculate()
    said["sections"] = client.state_dict()["current_timeouts"]["section"]
    said["valid"] = client.section_timeouts.were_calculated and client.section_timeouts.are_valid

def stops(client, monitor, **how):
    "The first step at which this rank heard yes; it is warned before its own step, and rank 1 asks for itself, too."
    for step in range(1, 100):
        if step == (9, 7, 5)[rank]:
            monitor.warn()
        alone = client.should_stop() if rank == 1 else None
        if client.should_stop_together(**how):
            break
    return [step, client.should_stop_together(**how), alone]  # it stays so, without the others

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=3)
pair = dist.new_group([0, 2])
limits = dict(rank_section_timeouts=dict(a=60, b=None, step=60), safety_factor=4.0, rank_heartbeat_timeout=60.0,
              rank_out_of_section_timeout=50.0)
hows = [dict(), dict(every=3), dict(every=4, group=pair)]
stopped, hangs = [], []
for story in (heartbeats, sections, *hows):
    if story == hows[2] and rank == 1:
        stopped.append(None)
        continue
    client = RankMonitorClient()
    with standalone_monitor(**limits) as monitor:
        client.init_workload_monitoring()
        if callable(story):
            story(client)
        else:
            stopped.append(stops(client, monitor, **story))
        hangs += monitor.hangs
        client.shutdown_workload_monitoring()
dist.destroy_process_group()
print(json.dumps([said, stopped, hangs]))
"""


@pytest.fixture(scope="module")
def results(zygote, tmp_path_factory):
    """Of three ranks: what they calculated, when they stopped together, hangs."""
    directory = tmp_path_factory.mktemp("gloo")
    program = directory / "ranks.py"
    program.write_text(RANKS)
    ranks = []
    try:
        for rank in range(3):
            argv = [str(program), str(directory / "store"), str(rank)]
            env = {"WORLD_SIZE": "3", "RANK": str(rank)}
            ranks.append(Script(zygote, argv, env, directory / f"{rank}.err"))
        ends = [script.communicate(60.0) for script in ranks]
        assert [script.returncode for script in ranks] == [0, 0, 0], ends
        return [json.loads(out) for out, _ in ends]
    finally:
        for script in ranks:
            script.close()


@pytest.mark.torch
def test_timeouts_are_the_longest_of_all_ranks_times_the_factor(results):
    said = results[0][0]
    assert all(one[0] == said and one[2] == [] for one in results)
    assert said["too early"] is False and said["done"] is True
    assert "first heartbeat" in said["error"]
    assert list(said["state"]) == ["heartbeat"]  # nothing was learned about sections
    assert 4 * 0.15 <= said["state"]["heartbeat"]["initial"] < 4 * 5
    once = said["state"]["heartbeat"]["subsequent"]
    assert 4 * 0.12 <= once < 4 * 5
    assert said["again"] >= 0.5 * once + 0.5 * 4 * 0.4 - 1e-6  # smoothed


@pytest.mark.torch
def test_section_timeouts_are_learned_for_the_selected_ones(results):
    said = results[0][0]
    assert said["sections too early"] is False and said["a"] is said["all"] is said["valid"] is True
    only, after = said["only a"], said["sections"]
    assert only["calculated_sections"] == ["a"] and list(only["section"]) == ["a"]
    assert only["section"]["a"] >= 4 * 0.15 and only["out_of_section"] is None
    assert after["calculated_sections"] == ["a", "b", "step"] and after["is_out_of_section_calculated"]
    assert after["section"]["a"] == only["section"]["a"]  # the same was seen: merged with itself
    assert after["out_of_section"] >= 4 * 0.1


@pytest.mark.torch
def test_all_ranks_stop_at_the_same_step(results):
    """Warned before steps 9, 7 and 5; asking every step, every third, and in a group of two."""
    zero, one, two = (stopped for _, stopped, _ in results)
    assert zero == two == [[5, True, None], [6, True, None], [8, True, None]]
    assert one == [[5, True, False], [6, True, False], None]  # it had not heard of it itself when all left
