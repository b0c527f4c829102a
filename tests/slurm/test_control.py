"""Slurm's tools: parsers on output of several versions, and the edge with missing, failing and slow tools."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
from minicluster import MiniCluster

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import control, nodelist

NODE_22_05 = (
    "NodeName=n1 Arch=x86_64 CoresPerSocket=1  CPUAlloc=0 CPUTot=16 CPULoad=0.13 AvailableFeatures=(null) "
    "NodeAddr=127.0.0.1 NodeHostName=localhost Port=12369 Version=22.05.8 OS=Linux 6.1 #1 SMP Debian = 1 "
    "RealMemory=1 State=IDLE ThreadsPerCore=1 Reason=test [root@2026-11-21T08:29:45]\n"
)
NODE_24_11 = (
    "NodeName=gpu-7 Arch=aarch64 NodeAddr=10.0.0.7 NodeHostName=gpu-7 Version=24.11.5 "
    "State=IDLE+DRAIN+NOT_RESPONDING ThreadsPerCore=1 Partitions=a,b BootTime=Unknown Comment=(null) "
    "Reason=NHC: State=broken disk [root@2026-11-21T08:29:45]\n"
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1-02:03:04\n", 93784.0), ("02:03:04", 7384.0), ("3:04", 184.0), ("0:00", 0.0), ("UNLIMITED\n", math.inf),
        ("INVALID", None), ("NOT_SET", None), ("", None), ("N/A", None), ("nonsense", None),
        ("INVALID\n10:00\n", 600.0), ("365-00:00:00", 31536000.0),
    ],
)  # fmt: skip
def test_time_left(text: str, seconds: float | None) -> None:
    assert control.parse_time_left(text) == seconds


def test_time_left_from_the_environment_needs_no_tool() -> None:
    left_s = control.time_left_s(1, {"SLURM_JOB_END_TIME": f"{time.time() + 100:.0f}"})
    assert left_s is not None and 90 < left_s < 102
    assert control.time_left_s(1, {"SLURM_JOB_END_TIME": "1700000100"}) == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("KillOnBadExit           = 0\nKillWait                = 17 sec\n", 17.0), ("KillWait = 90", 90.0),
        ("", 30.0), ("MaxKillWait = 3 sec\n", 30.0), ("KillWait = (null)", 30.0),
    ],
)  # fmt: skip
def test_kill_wait(text: str, seconds: float) -> None:
    assert control.parse_kill_wait(text) == seconds


def test_fields_and_node_states_of_several_versions() -> None:
    assert control.parse_fields(NODE_22_05)["OS"] == "Linux 6.1 #1 SMP Debian = 1"
    text = NODE_22_05 + NODE_24_11 + "NodeName=n3 State=DOWN*+DRAIN\nnonsense\n"
    found = control.parse_node_states(text)
    drained = {"DRAIN", "NOT_RESPONDING"}
    assert found == {"n1": {"IDLE"}, "gpu-7": {"IDLE", *drained}, "n3": {"DOWN", *drained}}
    assert [control.is_gone(states) for states in found.values()] == [False, False, True]


def _tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert control.time_left_s(1, {}) is None
    assert control.kill_wait_s() == 30.0
    assert control.node_states(["n1"]) is None
    assert control.node_address("localhost") == "localhost"
    with pytest.raises(UsageError, match=r"node no-such-node\.invalid: .* NodeAddr"):
        control.node_address("no-such-node.invalid")


def test_node_addr_where_the_name_does_not_resolve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _tool(tmp_path, "scontrol", "echo NodeName=$3 NodeAddr=127.0.0.1 State=IDLE")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert control.node_address("no-such-node.invalid") == "127.0.0.1"


def test_failing_and_slow_tools_answer_nothing_in_bounded_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _tool(tmp_path, "squeue", "echo 10:00; exit 1")
    _tool(tmp_path, "scontrol", "exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert control.time_left_s(1, {}) is None
    assert control.node_states(["n1"], timeout_s=0.1) is None


@pytest.mark.slurm
def test_against_a_real_cluster(minicluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in minicluster.env().items():
        monkeypatch.setenv(name, value)
    assert control.kill_wait_s() == 5.0
    assert control.node_address("n3") == "127.0.0.1"
    assert control.node_states(["n1", "n2"]) == {"n1": {"IDLE"}, "n2": {"IDLE"}}
    job = minicluster.submit("#!/bin/sh\nsleep 60\n", "--time=10")
    minicluster.wait_job(job, 20, until="RUNNING")
    left = control.time_left_s(job, {})
    assert left is not None and 500 < left <= 600
    minicluster.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=test")
    states = control.node_states(["n4"])
    assert states is not None and control.is_gone(states["n4"])
    for text in ("n[01-03,7]-ib[0-1]", "a[8-11],b,c[9-10]", "n[08-12]", "x[1-2]y[03-04]", "n1,n1"):
        assert nodelist.expand(text) == minicluster.run("scontrol", "show", "hostnames", text).split()
