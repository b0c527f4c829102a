"""Real ranks print what known failures print: first cause, exclusion, and the end of a job that fails for ever."""

import os
import re
import textwrap
from pathlib import Path

import pytest
from agent_harness import CLIENT, UP, up

from nvrx_slurm.errors import ExitCode

pytestmark = pytest.mark.process


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


def test_a_node_that_is_certainly_bad_is_excluded(rig):
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


def test_a_line_before_heartbeats_excludes_no_node(rig):
    xid = CLIENT + "if CYCLE == 0:\n    os.write(2, b'NVRM: Xid (PCI:0:1b:00): 79')\n    os.utime(2, (1, 1))\n"
    rig.ran(rig.script(UP + xid + "    client.send_heartbeat()\n    os.kill(0, 9)\n"), "--max-restarts=1")
    assert "SIGKILL" in rig.result["restarts"][0]["cause"]
    assert not [found for found in rig.result["faults"] if found["rule"]]


@pytest.mark.parametrize("action, code, cycles", [("no-restart", 93, 3), ("log", 1, 5)])
def test_the_same_failure_three_times_ends_the_job_or_is_said(rig, action, code, cycles):
    fails = "raise ValueError(f'bad sample {time.time()}') if RANK == CYCLE % 2 else forever()\n"  # not always one rank
    flags = (f"--ft-attribution-stop-action={action}", "--ft-crash-loop-backoff=0", "--nproc-per-node=2")
    one = rig.run(rig.script(UP + fails), "--max-restarts=4", *flags)
    assert (one.wait(), one.cycles, rig.result["code"]) == (code, [*range(cycles)], code)
    cause = rig.result["first_cause"]
    assert (cause["finding"]["rule"], cause["finding"]["blame"]) == ("python-exception", "user")
    said = [line for line in one.said if re.search("the same failure [0-9]+ times.*the job goes on", line)]
    assert len(said) == (2 if action == "log" else 0)


def test_a_script_that_cannot_start_uses_no_restart(rig):
    one = rig.run(rig.script("def f(:\n"), "--max-restarts=9")
    assert (one.wait(), rig.result["cycles"]) == (ExitCode.FAILED, 1)
    assert rig.result["first_cause"]["message"].startswith("SyntaxError: ")


@pytest.mark.parametrize("bug, starts, cycles", [
    ("undefined", 2, [0, 1]), ("open('none.yaml')", 2, [0, 1]), ("{}['lr']", 0, [0, 1, 2]),
])  # fmt: skip
def test_an_exception_of_all_ranks_at_the_start_comes_twice_at_most(rig, bug, starts, cycles):
    flags = ("--max-restarts=2", "--nproc-per-node=2", f"--ft-max-failed-starts={starts}")
    nodes = rig.nodes(2, "2:2", rig.script(UP + bug), *flags)
    assert {node.wait() for node in nodes} == {ExitCode.FAILED} and nodes[0].cycles[-1:] == cycles[-1:]
    assert bool(re.search("all 4 ranks .* the same exception", rig.result["reason"])) == bool(starts)


# What Megatron-LM's rerun state machine does (core/rerun_state_machine.py), with the node's number for its GPU.
MEGATRON = """
state = os.path.join(os.environ["NVRX_TEST_GATES"], "suspect")
def end(code, said=""):
    if said and RANK == 1:
        who = f"Rank 1, node {os.uname().nodename}, device 0"
        os.write(2, f"ERROR:megatron.core.rerun_state_machine:{who}: {said}!\\n".encode())
    gate(f"cycle{CYCLE}")
    sys.exit(code)
NODE, suspect = os.environ["NVRX_INFRA_RANK"], open(state).read() if os.path.exists(state) else ""
say(" iteration ", 149, "/", 1000)
say(" iteration ", 150, "/", 1000)
if TRUTH == "transient" and CYCLE == 0:
    end(17, "Possible transient error!")
if not suspect and CYCLE == 0:
    gate("named")
    if RANK == 1:
        open(state, "w").write(NODE)
    end(16)
if CYCLE == 1 and TRUTH != "transient":
    assert suspect != NODE or RANK != 1, "rescheduled on the same GPU"
    end(17, {"persistent": "Possible persistent error!", "application":
             "Correct result (but possible Application error) (loss is NaN)"}[TRUTH])
"""


@pytest.mark.repeats("transient", "application")
@pytest.mark.parametrize(
    "truth, codes, restarts, excluded, strikes",
    [
        ("persistent", {0, ExitCode.NODE_REFUSED}, 2, 1, 1),
        ("transient", {0}, 1, 0, 1),
        ("application", {93}, 1, 0, 0),
    ],
)
def test_a_result_that_megatron_rejects_is_computed_on_other_nodes(rig, truth, codes, restarts, excluded, strikes):
    script = rig.script(f"TRUTH = {truth!r}\n" + UP + MEGATRON)
    agents = rig.nodes(3, "2:3", script, "--max-restarts=9", "--ft-crash-loop-backoff=0")
    for gate in ("named", "cycle0", "cycle1"):
        rig.open(gate)
    assert {agent.wait() for agent in agents} == codes
    found = rig.result
    assert (len(found["restarts"]), len(found["excluded_nodes"])) == (restarts, excluded)
    assert found["restarts_used"] == restarts - (truth != "transient")  # a run on other nodes uses none
    assert [one["iteration"] for one in found["restarts"]] == [150] * restarts
    file = rig.logs / "strikes.jsonl"
    assert len(file.read_text().splitlines() if file.exists() else ()) == strikes


def test_a_poisoned_checkpoint_is_left_out_once(rig):
    """The second checkpoint is damaged: whoever loads it fails six steps later."""
    trains = """
    latest = os.path.join(os.environ["NVRX_TEST_GATES"], "latest")
    before = int(os.environ.get("NVRX_RESUME_BEFORE", 1 << 30))
    begin = max(i for i in (0, 100) if i < before and (i == 0 or os.path.exists(latest)))
    say("iteration", begin + 5)
    say("iteration", begin + 6)
    if begin == 0 and not os.path.exists(latest):
        open(latest, "w").write("100")
        begin = 100
    if begin == 100:
        raise AssertionError("found NaN in local grad norm")
    """
    flags = ("--max-restarts=9", "--ft-crash-loop-backoff=0", "--ft-checkpoint-iteration-file", str(rig.dir / "latest"))
    one = rig.run(rig.script(UP + textwrap.dedent(trains)), *flags)
    assert (one.wait(), one.cycles) == (0, [0, 1, 2])
    one.line("NVRX_RESUME_BEFORE=100")


EATS = """
if CYCLE == 0 and RANK == 1:
    held = [bytearray(1 << 24) for _ in range(1 << 10)]
forever() if CYCLE == 0 else None
"""


def test_a_kill_for_lack_of_memory_is_read_from_the_cgroup(rig):
    group = Path("/sys/fs/cgroup/memory", f"nvrx_{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("500M")
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        rig.prefix = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
        one = rig.run(rig.script(UP + EATS), "--max-restarts=1", "--nproc-per-node=2")
        assert one.wait() == 0
        assert "oom_kill" in (group / "memory.oom_control").read_text()
        assert [found["rule"] for found in rig.result["faults"] if found["rank"] == 1] == ["cgroup-out-of-memory"]
        assert "oom_kill event" in rig.result["restarts"][0]["cause"]
    finally:
        group.rmdir()
