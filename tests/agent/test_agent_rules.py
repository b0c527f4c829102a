"""Real ranks print what known failures print: first cause, exclusion, and the end of a job that fails for ever."""

from __future__ import annotations

from agent_harness import UP, Rig, up

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


def test_two_sick_nodes_of_two_are_kept(rig: Rig) -> None:
    """Without a spare an exclusion would end the job."""
    first, second = rig.nodes(2, "2", rig.script(SICK), "--max-restarts=3")
    up(first, 0), up(second, 0)
    rig.open("fail")
    assert {up(first, 1)[0], up(second, 1)[0]} == {0, 1}
    rig.open("end1")
    assert [first.wait(), second.wait()] == [0, 0]
    assert rig.result["excluded_nodes"] == []


def test_the_same_failure_three_times_ends_the_job_if_the_user_asks_for_that(rig: Rig) -> None:
    script = rig.script(UP + "raise ValueError(f'bad sample {time.time()}')\n")
    one = rig.run(script, "--max-restarts=9", "--ft-attribution-stop-action=no-restart", "--ft-crash-loop-backoff=0")
    assert one.wait() == ExitCode.NO_RESTART
    assert one.cycles == [0, 1, 2] and rig.result["code"] == 93
    cause = rig.result["first_cause"]
    assert (cause["finding"]["rule"], cause["finding"]["blame"]) == ("python-exception", "user")


def test_the_same_failure_uses_the_restarts_up_otherwise(rig: Rig) -> None:
    script = rig.script(UP + "raise ValueError('bad sample')\n")
    one = rig.run(script, "--max-restarts=3", "--ft-crash-loop-backoff=0")
    assert one.wait() == ExitCode.FAILED
    assert one.cycles == [0, 1, 2, 3]
