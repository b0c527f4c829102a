"""The preflight in real jobs: unfit nodes, nodes that fall sick; memory; broken files."""

import os
import re
import select
import signal
from pathlib import Path

import pytest
from agent_harness import UP, stat, up
from standin import StandIn
from waits import until

from nvrx_slurm.core.event_log import replay
from nvrx_slurm.errors import ExitCode

pytestmark = pytest.mark.process


# Rank 0 fails in cycle 0, the others wait for that; cycle 1 ends well.
FAILS_ONCE = UP + "if CYCLE == 0:\n    sys.exit(3) if RANK == 0 else forever()\n"
WAITS_ONCE = UP + "if CYCLE == 0:\n    forever()\n"
INJECTED = "is not healthy: a failure was injected for cycle {} (NVRX_INJECT_GPU_FAILURE)"
WELL = ("count 2", "links 0")
OFF = "--ft-node-health-checks=false"
OFTEN = "--ft-node-health-check-interval=0.2"


def events(rig):
    """The coordinator's event log, which replays."""
    lines = (rig.run_dir / "events" / "coordinator.jsonl").read_text().splitlines()
    assert replay(lines) == []
    return "\n".join(lines)


def said_of(one, node, sentence):
    return any(re.match(rf"node {node} \(\S+\) {re.escape(sentence)}", line) for line in one.said)


@pytest.mark.parametrize("cycle", [0, 1])
def test_a_node_that_fails_the_preflight_is_replaced_by_the_spare(rig, cycle):
    """In cycle 0 that costs no restart."""
    script, fails = rig.script(FAILS_ONCE if cycle else UP), f"{cycle}:1"
    nodes = rig.nodes(3, "2:3", script, "--max-restarts=1", NVRX_INJECT_GPU_FAILURE=fails)
    assert [one.wait() for one in nodes] == [0, ExitCode.NODE_REFUSED, 0], nodes[0].text
    assert said_of(nodes[0], 1, INJECTED.format(cycle)) and nodes[1].said[-1].endswith(INJECTED.format(cycle))
    assert f"a failure was injected for cycle {cycle}" in events(rig)
    assert up(nodes[2], cycle)[0] == 1 and nodes[1].cycles in ([], [0])
    assert nodes[0].text.count("restart 1 of 1") == cycle and rig.result["code"] == 0


def test_the_only_node_that_is_not_fit_ends_the_job_with_the_reason(rig):
    one = rig.run(rig.script(UP), "--ft-storage-health-check-path=/nonexistent")
    assert one.wait() == ExitCode.TOO_FEW_NODES
    why = rig.result
    assert (why["code"], why["first_cause"]["kind"]) == (ExitCode.TOO_FEW_NODES, "unhealthy")
    assert "/nonexistent" in why["first_cause"]["message"] and "storage-paths" in why["first_cause"]["message"]
    assert "is not healthy: storage-paths: " in one.text and one.cycles == []


@pytest.fixture
def gpus(nvml_standin, tmp_path):
    """Two GPUs, which are well."""
    stand_in = StandIn(nvml_standin, tmp_path / "state")
    stand_in.say(*WELL)
    return stand_in


def with_gpus(rig, gpus, which, *flags):
    """Two nodes and a spare, of which one sees the GPUs; all are up."""
    script = rig.script(WAITS_ONCE)
    nodes = [rig.node(rank, "2:3", script, *flags, **(gpus.env if rank == which else {})) for rank in range(3)]
    assert [up(nodes[rank], 0)[0] for rank in (0, 1)] == [0, 1]
    nodes[2].line("this node is a hot spare")
    return nodes


def test_a_gpu_that_breaks_in_a_cycle_costs_its_node_the_place(rig, gpus):
    nodes = with_gpus(rig, gpus, 1, "--max-restarts=1", OFTEN)
    gpus.say(*WELL, "action.1 1")
    assert [one.wait() for one in nodes] == [0, ExitCode.NODE_REFUSED, 0], nodes[0].text
    why = "is not healthy: gpu-recovery: GPU 1 (GPU-1000) needs GPU_RESET"
    assert said_of(nodes[0], 1, f"{why}; restart 1 of 1") and nodes[1].said[-1].endswith(why)
    assert "needs GPU_RESET" in events(rig)
    assert up(nodes[2], 1)[0] == 1 and nodes[1].cycles == [0]


def crashed(rig, gpus, *flags, facts="used.0 70000"):
    """A node whose worker has just crashed, and left its GPUs with `facts`."""
    one = rig.run(rig.script(WAITS_ONCE), "--max-restarts=1", "--ft-gpu-memory-poll-interval=0.05", *flags, **gpus.env)
    _, pid = up(one, 0)
    gpus.say(*WELL, facts)
    os.kill(pid, signal.SIGKILL)
    return one


@pytest.mark.parametrize("checked", [True, False])
def test_the_next_cycle_waits_for_the_memory_of_the_last_one(rig, gpus, checked):
    """Without checks, a GPU that a check would refuse is no reason for anything."""
    sick = [] if checked else ["action.1 1"]
    one = crashed(rig, gpus, *([] if checked else [OFF]), facts="\n".join(["used.0 70000", *sick]))
    one.line("restart 1 of 1")
    assert not select.select([one.process.stdout], [], [], 0.5)[0], "it did not wait for the memory"
    gpus.say(*WELL, "used.0 5", *sick)
    assert one.wait() == 0 and one.cycles == [0, 1]
    assert re.search(r"GPU memory was free after [\d.]+ s: GPU 0 \(GPU-0000\) \d+ -> 5 MiB, GPU 1 ", one.text)


def test_a_driver_that_hangs_holds_neither_the_restart_nor_the_agent(rig, gpus):
    """The agent never has NVML in it, so that nothing of it can be blocked in the driver when it ends."""
    one = crashed(rig, gpus, "--ft-gpu-memory-reclaim-timeout=1", facts="nvmlDeviceGetMemoryInfo_v2 hang")
    until(lambda: gpus.met(), "that the driver hangs")
    assert "libnvidia-ml" not in Path(f"/proc/{one.pid}/maps").read_text()
    assert one.wait() == 0 and one.cycles == [0, 1]
    why = r"GPU memory cannot be read: timed out after \d\.\d s, asking NVML for the memory in use of GPU 0; going on"
    assert re.search(why, one.text), one.text


def test_neither_signals_for_the_step_end_the_checks_nor_does_a_stopped_process_delay_the_end(rig):
    one = rig.run(rig.script(UP + "gate()"))
    up(one, 0)
    (pid,) = [pid for pid in one.children if b"nvrx_slurm.health" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    until(lambda: b"trampoline" not in Path(f"/proc/{pid}/cmdline").read_bytes(), "the process that checks")
    for signum in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGSTOP):
        os.kill(pid, signum)
    until(lambda: stat(pid)[1] == "T", "that it is stopped")
    rig.ends_well("go", one)
    assert "health" not in one.text


@pytest.mark.parametrize("which", [0, 1])
def test_a_broken_site_file_on_one_node_of_two_ends_both(rig, which):
    file = rig.dir / "root" / "etc" / "nvrx" / "health.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("checks: {mouts: {on_fail: warn}}\n")
    script, short = rig.script(UP), "--rdzv-conf=join_timeout=2,last_call_timeout=0.1"
    flag = [f"--sysroot={rig.dir / 'root'}"]
    nodes = [rig.node(rank, "2", script, short, *(flag if rank == which else [])) for rank in range(2)]
    codes = [one.wait(60.0) for one in nodes]  # one that had registered looks for another coordinator for 30 s
    assert codes[which] == ExitCode.USAGE and "there is no check 'mouts'; did you mean mounts?" in nodes[which].text
    assert "Traceback" not in nodes[which].text and nodes[which].cycles == []
    if which:  # a spare could take its place until the join timeout is over
        assert codes[0] == ExitCode.TOO_FEW_NODES
    else:
        assert codes[1] in (ExitCode.USAGE, ExitCode.COORDINATOR_LOST)  # it was told, or came too late for that
