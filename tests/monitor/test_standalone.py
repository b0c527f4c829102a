"""A monitor without a launcher, and what ranks learn together (gloo, two real processes)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest
from monitor_harness import ROOT, WAIT_S, until

from nvrx_slurm.errors import UsageError
from nvrx_slurm.fault_tolerance import (
    FaultToleranceConfig,
    HeartbeatTimeouts,
    RankMonitorClient,
    RankMonitorClientError,
    SectionTimeouts,
)
from nvrx_slurm.monitor.collective import device_for
from nvrx_slurm.testing import standalone_monitor

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"


def test_the_exports():
    assert FaultToleranceConfig().safety_factor == 5.0
    assert SectionTimeouts().section == {}
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        import nvrx_slurm.fault_tolerance

        nvrx_slurm.fault_tolerance.Nonsense  # noqa: B018


@pytest.mark.parametrize("rank", [None, "5"])
def test_it_works_and_leaves_nothing_behind(monkeypatch, rank):
    monkeypatch.delenv(SOCKET, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    fds = set(os.listdir("/proc/self/fd"))
    client = RankMonitorClient()
    with standalone_monitor(rank_heartbeat_timeout=30.0, rank_section_timeouts={"step": 0.5}) as monitor:
        client.init_workload_monitoring()
        assert client.rank_info.global_rank == int(rank or 0)
        assert client.cfg.rank_heartbeat_timeout == 30.0 and client.cfg.num_warmup_iterations == 5
        assert client.hb_timeouts == HeartbeatTimeouts(None, 30.0, False)
        assert client.section_timeouts == SectionTimeouts({"step": 0.5})
        client.send_heartbeat()
        client.start_section("step")
        assert monitor.wait_for_hang(WAIT_S).startswith("in section 'step' for 0.5")
        assert len(monitor.hangs) == 1
        pid = monitor.pid
        client.shutdown_workload_monitoring()
    assert SOCKET not in os.environ and os.environ.get("RANK") == rank
    until(lambda: not os.path.exists(f"/proc/{pid}"), "the monitor is gone")
    assert set(os.listdir("/proc/self/fd")) == fds


def test_without_a_hang_it_says_so():
    with standalone_monitor() as monitor, pytest.raises(TimeoutError, match="found no hang within 0.01 s"):
        monitor.wait_for_hang(0.01)


def test_wrong_settings_are_refused():
    with pytest.raises(UsageError, match="did you mean rank_heartbeat_timeout"), standalone_monitor(rank_heartbeat=1):
        pass


def test_without_torch_distributed_there_is_nothing_to_calculate():
    with standalone_monitor():
        client = RankMonitorClient()
        for calculate in (client.calculate_and_set_hb_timeouts, client.calculate_and_set_section_timeouts):
            with pytest.raises(RankMonitorClientError, match=r"\(\) needs init_workload_monitoring\(\) first"):
                calculate()
        client.init_workload_monitoring()
        for calculate in (client.calculate_and_set_hb_timeouts, client.calculate_and_set_section_timeouts):
            with pytest.raises(RankMonitorClientError, match="call torch.distributed.init_process_group"):
                calculate(skip_if_not_ready=True)
        with pytest.raises(RankMonitorClientError, match="section 'x' is not in rank_section_timeouts"):
            client.calculate_and_set_section_timeouts(["x"])
        client.shutdown_workload_monitoring()


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cuda:nccl", "cuda"),
        ("nccl", "cuda"),
        ("gloo", "cpu"),
        ("cpu:mpi", None),
        ("undefined", None),
        ("", None),
    ],
)
def test_where_the_collective_runs(backends, device):
    if device is not None:
        assert device_for(backends) == device
        return
    with pytest.raises(RankMonitorClientError, match="over gloo or nccl, but the process group has"):
        device_for(backends)


RANKS = """
import json, os, sys, threading
sys.path.insert(0, {root!r})
import torch.distributed as dist
from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
from nvrx_slurm.testing import standalone_monitor

rank = int(os.environ["RANK"])
wait = threading.Event().wait
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
client = RankMonitorClient()
said = {{}}
with standalone_monitor(rank_section_timeouts={{"a": 60, "b": None, "step": 60}}, safety_factor=4.0,
                        rank_heartbeat_timeout=60.0, rank_out_of_section_timeout=50.0) as monitor:
    client.init_workload_monitoring()
{code}
    said["hangs"] = monitor.hangs
    client.shutdown_workload_monitoring()
dist.destroy_process_group()
print(json.dumps(said))
"""


def two_ranks(tmp_path, code: str) -> list[dict]:
    program = RANKS.format(root=ROOT, code=textwrap.indent(textwrap.dedent(code), "    "))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "store")],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        results = [process.communicate(timeout=60) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], results
    return [json.loads(out) for out, _ in results]


@pytest.mark.torch
def test_heartbeat_timeouts_are_the_longest_of_all_ranks_times_the_factor(tmp_path):
    pytest.importorskip("torch")
    first, second = two_ranks(
        tmp_path,
        """
        said["too early"] = client.calculate_and_set_hb_timeouts(skip_if_not_ready=True)
        try:
            client.calculate_and_set_hb_timeouts()
        except RankMonitorClientError as error:
            said["error"] = str(error)
        wait(0.1 if rank == 0 else 0.3)
        client.send_heartbeat()
        wait(0.25 if rank == 0 else 0.05)
        client.send_heartbeat()
        said["done"] = client.calculate_and_set_hb_timeouts()
        said["state"] = client.state_dict()
        wait(0.8 if rank == 1 else 0.0)
        client.send_heartbeat()
        client.calculate_and_set_hb_timeouts()
        said["again"] = client.hb_timeouts.subsequent
        said["enforced"] = client.state_dict()["current_timeouts"]["heartbeat"]["subsequent"]
        """,
    )
    assert first == second
    assert first["too early"] is False and first["done"] is True and first["hangs"] == []
    assert "cannot be calculated yet: no rank has sent a first heartbeat" in first["error"]
    timeouts = first["state"]["current_timeouts"]
    assert list(timeouts) == ["heartbeat"]  # nothing was learned about sections
    assert 4 * 0.3 <= timeouts["heartbeat"]["initial"] < 4 * 5
    once = timeouts["heartbeat"]["subsequent"]
    assert 4 * 0.25 <= once < 4 * 5
    assert first["again"] >= 0.5 * once + 0.5 * 4 * 0.8 - 1e-6  # smoothed: neither the old nor the new one alone


@pytest.mark.torch
def test_section_timeouts_are_learned_for_the_selected_ones(tmp_path):
    pytest.importorskip("torch")
    first, second = two_ranks(
        tmp_path,
        """
        calculate = client.calculate_and_set_section_timeouts
        client.start_section("a"); wait(0.3 if rank else 0.05); client.end_section("a")
        said["too early"] = calculate(skip_if_not_ready=True)
        said["a"] = calculate(["a"], calc_out_of_section=False)
        said["only a"] = client.state_dict()["current_timeouts"]["section"]
        if rank == 0:  # seen by one rank is enough
            client.start_section("step"); client.end_section("step")
            client.start_section("b"); client.end_section("b")
            wait(0.2)
        said["all"] = calculate()
        said["state"] = client.state_dict()["current_timeouts"]["section"]
        said["valid"] = client.section_timeouts.were_calculated and client.section_timeouts.are_valid
        """,
    )
    assert first == second
    assert first["too early"] is False and first["a"] is True and first["all"] is True and first["valid"]
    only = first["only a"]
    assert only["calculated_sections"] == ["a"] and list(only["section"]) == ["a"]
    assert only["section"]["a"] >= 4 * 0.3 and only["out_of_section"] is None
    state = first["state"]
    assert state["calculated_sections"] == ["a", "b", "step"] and state["is_out_of_section_calculated"]
    assert state["section"]["a"] == only["section"]["a"]  # the same was seen: merged with itself
    assert state["out_of_section"] >= 4 * 0.2
    assert first["hangs"] == []
