"""Jobs without health checks, and a GPU driver that does not answer: what is no check goes on as always."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from agent_harness import Launcher, Rig, until
from standin import StandIn
from test_agent_nodes import up
from test_agent_preflight import WAITS_ONCE, WELL
from test_agent_requests import cycles

OFF = "--ft-node-health-checks=false"


@pytest.fixture
def gpus(nvml_standin: Path, tmp_path: Path) -> StandIn:
    """Two GPUs, which are well."""
    stand_in = StandIn(nvml_standin, tmp_path / "state")
    stand_in.say(*WELL)
    return stand_in


def crashed(rig: Rig, gpus: StandIn, facts: str, *flags: str) -> Launcher:
    """A node whose worker has just crashed, and left its GPUs with `facts`."""
    one = rig.run(rig.script(WAITS_ONCE), "--max-restarts=1", "--ft-gpu-memory-poll-interval=0.05", *flags, **gpus.env)
    _, pid = up(one, 0)
    gpus.say(*WELL, facts)
    os.kill(pid, signal.SIGKILL)
    return one


def checks(pid: int) -> bool:
    """Whether a process is that of the checks; it may be gone."""
    try:
        return b"nvrx_slurm.health" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_without_checks_memory_is_waited_for_all_the_same(rig: Rig, gpus: StandIn) -> None:
    """By a process that is there only from now on; a GPU that a check would refuse is no reason for anything."""
    one = crashed(rig, gpus, "used.0 70000\naction.1 1", OFF)
    until(lambda: any(map(checks, one.children)), "a process that reads GPU memory")
    assert cycles(one) == [0]
    gpus.say(*WELL, "used.0 5", "action.1 1")
    assert one.wait() == 0 and cycles(one) == [0, 1]
    assert re.search(r"GPU memory was free after [\d.]+ s: GPU 0 \(GPU-0000\) \d+ -> 5 MiB, GPU 1 ", one.text)


def test_without_checks_and_without_a_wait_there_is_no_process_at_all(rig: Rig, gpus: StandIn) -> None:
    one = crashed(rig, gpus, "used.0 70000", OFF, "--ft-gpu-memory-reclaim-timeout=0")
    one.line("restart 1 of 1")
    assert one.wait() == 0 and cycles(one) == [0, 1]
    assert "GPU memory" not in one.text and gpus.met() == []


def test_a_driver_that_hangs_holds_neither_the_restart_nor_the_agent(rig: Rig, gpus: StandIn) -> None:
    """The agent never has NVML in it, so that nothing of it can be blocked in the driver when it ends."""
    one = crashed(rig, gpus, "nvmlDeviceGetMemoryInfo_v2 hang", "--ft-gpu-memory-reclaim-timeout=1")
    until(lambda: gpus.met(), "that the driver hangs")
    assert "libnvidia-ml" not in Path(f"/proc/{one.pid}/maps").read_text()
    assert one.wait() == 0 and cycles(one) == [0, 1]
    why = (
        r"GPU memory cannot be read: timed out after \d\.\d s, asking NVML for the memory in use of GPU 0; going on all"
    )
    assert re.search(why, one.text), one.text
