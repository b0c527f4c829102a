"""Real ranks print what known failures print: first cause, exclusion, and the end of a job that fails for ever."""

from __future__ import annotations

import re

import pytest
from agent_harness import CLIENT, UP, Rig, up

from nvrx_slurm.errors import ExitCode

ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
SICK = (
    UP
    + """
if CYCLE == 0:
    if RANK == 1:
        gate("fail")
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
    forever()
gate(f"end{CYCLE}")
"""
)


def test_a_node_that_is_certainly_bad_is_excluded(rig: Rig) -> None:
    first, second, spare = rig.nodes(3, "2:3", rig.script(SICK), "--max-restarts=3")
    spare.line("this node is a hot spare")
    up(first, 0), up(second, 0)
    rig.open("fail")
    assert {up(first, 1)[0], up(spare, 1)[0]} == {0, 1}
    rig.open("end1")
    assert [first.wait(), second.wait(), spare.wait()] == [0, ExitCode.NODE_REFUSED, 0]
    first.line(r"rule: gpu-ecc \(node, certain\)")
    assert len(rig.result["excluded_nodes"]) == 1
    assert rig.result["restarts"][0]["rank"] == 1 and ECC in rig.result["restarts"][0]["cause"]


def test_a_line_before_heartbeats_excludes_no_node(rig: Rig) -> None:
    xid = CLIENT + "if CYCLE == 0:\n    os.write(2, b'NVRM: Xid (PCI:0:1b:00): 79')\n    os.utime(2, (1, 1))\n"
    one = rig.run(rig.script(UP + xid + "    client.send_heartbeat()\n    os.kill(0, 9)\n"), "--max-restarts=1")
    assert one.wait() == 0 and "SIGKILL" in rig.result["restarts"][0]["cause"]
    assert not [found for found in rig.result["faults"] if found["rule"]]


@pytest.mark.parametrize(("action", "code", "cycles"), [("no-restart", 93, 3), ("log", 1, 5)])
def test_the_same_failure_three_times_ends_the_job_or_is_said(rig: Rig, action: str, code: int, cycles: int) -> None:
    fails = "raise ValueError(f'bad sample {time.time()}') if RANK == CYCLE % 2 else forever()\n"  # not always one rank
    flags = (f"--ft-attribution-stop-action={action}", "--ft-crash-loop-backoff=0", "--nproc-per-node=2")
    one = rig.run(rig.script(UP + fails), "--max-restarts=4", *flags)
    assert (one.wait(), one.cycles, rig.result["code"]) == (code, [*range(cycles)], code)
    cause = rig.result["first_cause"]
    assert (cause["finding"]["rule"], cause["finding"]["blame"]) == ("python-exception", "user")
    said = [line for line in one.said if re.search("the same failure [0-9]+ times.*the job goes on", line)]
    assert len(said) == (2 if action == "log" else 0)


def test_a_script_that_cannot_start_uses_no_restart(rig: Rig) -> None:
    one = rig.run(rig.script("def f(:\n"), "--max-restarts=9")
    assert (one.wait(), rig.result["cycles"]) == (ExitCode.FAILED, 1)
    assert rig.result["first_cause"]["message"].startswith("SyntaxError: ")
