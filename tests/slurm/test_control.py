"""What nvrx-run asks Slurm, where tools are missing, fail or hang, and on a real cluster."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from minicluster import MiniCluster

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import nodelist
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import NoAnswer
from nvrx_slurm.slurm.api.tools import Tools
from nvrx_slurm.slurm.control import Control, seconds


@pytest.fixture
def control() -> Control:
    """Without the back-off after what earlier tests did."""
    return Control("cli")


def test_time_left_from_the_environment_needs_no_tool(control: Control) -> None:
    left_s = control.time_left_s(1, {"SLURM_JOB_END_TIME": f"{time.time() + 100:.0f}"})
    assert left_s is not None and 90 < left_s < 102
    assert control.time_left_s(1, {"SLURM_JOB_END_TIME": "1700000100"}) == 0.0


@pytest.mark.parametrize(("value", "found"), [("17 sec", 17.0), ("90", 90.0), ("", 30.0), ("x", 30.0)])
def test_kill_wait(value: str, found: float) -> None:
    assert seconds({"KillWait": value}, "KillWait", 30.0) == found


def _tool(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_without_slurm(control: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert control.time_left_s(1, {}) is None
    assert control.kill_wait_s() == 30.0
    assert control.job_nodes(1) is None and control.step_id(1, "x") is None
    assert control.node_address("localhost") == "localhost"
    with pytest.raises(UsageError, match=r"node no-such-node\.invalid: .* NodeAddr"):
        control.node_address("no-such-node.invalid")


def test_node_addr_where_the_name_does_not_resolve(
    control: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _tool(tmp_path, "scontrol", "echo NodeName=$3 NodeAddr=127.0.0.1 State=IDLE")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert control.node_address("no-such-node.invalid") == "127.0.0.1"


def test_slow_tools_are_not_asked_again_and_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _tool(tmp_path, "scontrol", f"echo asked >> {tmp_path}/asked; exec sleep 60")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm = Slurm(Tools(timeout_s=0.2))
    for _ in range(5):
        with pytest.raises(NoAnswer):
            slurm.job(1)
    assert (tmp_path / "asked").read_text() == "asked\n"


def test_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two at once would find the lock directory there."""
    _tool(tmp_path, "squeue", f"mkdir {tmp_path}/one || exit 9; sleep 0.05; rmdir {tmp_path}/one; echo '7.0|x'")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    slurm = Slurm()
    with ThreadPoolExecutor(4) as pool:
        assert [len(steps) for steps in pool.map(slurm.steps, range(8))] == [1] * 8


@pytest.mark.slurm
def test_against_a_real_cluster(control: Control, minicluster: MiniCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in minicluster.env().items():
        monkeypatch.setenv(name, value)
    assert control.kill_wait_s() == 8.0
    assert control.node_address("n3") == "127.0.0.1"
    job = minicluster.submit("#!/bin/sh\nsleep 60\n", "--time=10")
    minicluster.wait_job(job, 20, until="RUNNING")
    left = control.time_left_s(job, {})
    assert left is not None and 500 < left <= 600
    minicluster.run("scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=test")
    assert "DOWN" in control.slurm.nodes(["n4"])["n4"].states
    for text in ("n[01-03,7]-ib[0-1]", "a[8-11],b,c[9-10]", "n[08-12]", "x[1-2]y[03-04]", "n1,n1"):
        assert nodelist.expand(text) == minicluster.run("scontrol", "show", "hostnames", text).split()
