"""status.json of real jobs: from waiting to running, over a restart and a takeover, to the end and to silence."""

import json
import os
import signal
import time

import pytest
from agent_harness import QUICK, UNTIL_TOLD, kill, says, up
from toolbox import nvrx, nvrx_json
from waits import until

from nvrx_slurm.views import status
from nvrx_slurm.views.status import CANNOT_TELL, ENDED, HEALTHY, NEEDS_A_PERSON

pytestmark = pytest.mark.process


OFTEN = "from nvrx_slurm.node.publish import publisher\npublisher.INTERVAL_S, publisher._SOON_S = 0.5, 0.05"


def told(rig, *parts, code=HEALTHY):
    """Wait until `nvrx status` says these parts, with that code; the content of status.json."""
    last = status.Seen(-1, "", "")

    def right():
        nonlocal last
        if list(rig.logs.glob("*/r0/events")):
            last = status.observe(rig.run_dir, time.time(), ranks=True)
        said = "\n".join((last.head, last.verdict, *last.lines))
        return last.code == code and all(part in said for part in parts)

    try:
        until(right, f"{parts} with code {code}")
    except AssertionError:
        pytest.fail(f"{parts} with code {code}: {last}")
    return dict(last.found.get("status", {}))


def test_from_waiting_to_the_end(rig):
    rig.before = OFTEN
    progress = rig.dir / "progress"
    progress.write_text("41\n")
    flags = ("--max-restarts=3", f"--ft-checkpoint-iteration-file={progress}", "--ft-rank-heartbeat-timeout=60")
    flags += ("--ft-preload=colorsys",)
    script = rig.script(UNTIL_TOLD)
    nodes = [rig.node(0, "2:3", script, *flags)]
    told(rig, "waiting", "1 of at least 2 nodes are here; missing: node rank 1", "1 here, 2 missing")
    nodes += [rig.node(rank, "2:3", script, *flags) for rank in (1, 2)]
    pids = [up(one, 0)[1] for one in nodes[:2]]
    told(
        rig, "running", "cycle 0", "2 active, 1 spare, 0 missing", "iteration 41", "hangs are watched for", "ranks 1-1"
    )
    told(rig, "ranks 0-0  busy  warm: colorsys", "ranks 1-1  busy  warm: colorsys", "spare  warm: colorsys")
    os.kill(pids[1], signal.SIGKILL)
    found = told(rig, "running", "cycle 1", "1 of 3 used", "cycle 0, ", "SIGKILL")
    assert len(found["incidents"]) == 1
    rig.ends_well("end1", *nodes)
    told(rig, "code 0", "1 restart", code=ENDED)
    last = json.loads((rig.run_dir / "status.json").read_text())
    assert (last["state"], last["end"]["code"]) == ("ended", 0)


def test_goodput_of_a_job_that_runs_is_what_its_status_estimates(rig):
    rig.before = OFTEN + "\nfrom nvrx_slurm.core.account import figures\nfigures.START_GRACE_S = 0.1"
    nodes = rig.nodes(3, "2:3", rig.script(UNTIL_TOLD))
    up(nodes[0], 0)
    until(lambda: (told(rig, "2 active, 1 spare")["account"] or {}).get("productive_s", 0.0) > 2.0, "it is productive")
    before = told(rig)["account"]
    found = nvrx_json("goodput", rig.run_dir, "--json")
    after = told(rig)["account"]
    productive_s = found["node_seconds"]["productive"]
    allocated_s = sum(found["node_seconds"].values())
    rounded_s = 0.001 * len(found["node_seconds"])
    assert before["productive_s"] - 0.001 <= productive_s <= after["productive_s"] + 0.001
    assert before["allocated_s"] - rounded_s <= allocated_s <= after["allocated_s"] + rounded_s
    assert found["node_seconds"]["spare_idle"] > 1.0
    assert found["job_ettr"] == pytest.approx(productive_s / 2 / found["wall_s"], abs=1e-3)
    assert (found["runs_without_result"], found["grades"]["productive"]) == (1, "estimated")
    rig.ends_well("end0", *nodes)
    assert nvrx_json("goodput", rig.run_dir, "--json")["runs_without_result"] == 0


PACED = """
from nvrx_slurm.fault_tolerance import RankMonitorClient
monitor = RankMonitorClient()
monitor.init_workload_monitoring()
for _ in range(3):
    monitor.start_section("step")
    monitor.end_section("step")
monitor.start_section("save")
"""


STEPS_AT_ITS_END = """
monitor.end_section("save")
for _ in range(2):
    monitor.start_section("step")
    monitor.end_section("step")
"""


def test_how_far_ranks_are_is_told_also_at_the_end_and_long_waits_are_said(rig):
    rig.before = OFTEN + "\npublisher._SAY_S = 0.6"
    flags = ("--ft-rank-section-timeouts=step:90,save:90", "--max-restarts=1")
    first = rig.node(0, "2", script := rig.script(PACED + UNTIL_TOLD + STEPS_AT_ITS_END), *flags)
    first.line("waiting for .*missing: node rank 1")
    nodes = [first, rig.node(1, "2", script, *flags)]
    found = told(rig, "step 3 of this cycle", "ranks 0-0  busy  0 in save for", "ranks 1-1  busy  1 in save for")
    assert {rank: name for rank, name, _ in found["progress"]["open"]} == {0: "save", 1: "save"}
    rig.ends_well("end0", *nodes)
    _, row = nvrx("list", "--log-dir", rig.logs).output.splitlines()
    *_, step, restarts, _, _ = row.split()
    assert (step, restarts) == ("5", "0")


@pytest.mark.matrix
def test_a_candidate_says_that_it_waits_for_votes(rig):
    rig.before = OFTEN
    script = rig.script(UNTIL_TOLD)
    nodes = rig.step((0,), 4, "3:4", script)
    told(rig, "electing", "1 of at least 3 nodes are here; missing: 127.0.0.2, 127.0.0.3, 127.0.0.4", "3 missing")
    nodes += rig.step((1, 2), 4, "3:4", script)
    assert told(rig, "running", "3 active, 0 spare, 1 missing", code=NEEDS_A_PERSON)["term"] == 1
    rig.ends_well("end0", *nodes)


def test_after_the_loss_of_a_coordinator(rig):
    """The next one goes on with the file."""
    rig.before = OFTEN
    first, second, third = rig.nodes(3, "2:3", rig.script(UNTIL_TOLD), "--max-restarts=3", *QUICK)
    pid = up(first, 0)[1]
    assert told(rig, "running", "2 active, 1 spare")["term"] == 1
    kill(first, pid)
    says("cycle 1: ", second, third)
    found = told(rig, "running", "cycle 1", "1 of 3 used", "2 active, 0 spare, 1 missing", code=NEEDS_A_PERSON)
    assert int(str(found["term"])) > 1
    rig.ends_well("end1", second, third)
    told(rig, "code 0", code=ENDED)


@pytest.mark.matrix
def test_a_stopped_coordinator_does_not_take_the_file_back(rig):
    rig.before = OFTEN
    first, second, third = rig.nodes(3, "2:3", rig.script(UNTIL_TOLD), "--max-restarts=3", *QUICK)
    up(first, 0)
    told(rig, "running", "2 active, 1 spare")
    first.signal(signal.SIGSTOP)
    says("cycle 1: ", second, third)
    term = told(rig, "running", "cycle 1", code=NEEDS_A_PERSON)["term"]
    writer = json.loads((rig.run_dir / "status.json").read_text())["writer"]
    first.signal(signal.SIGCONT)
    first.line("cycle 1: this node is a hot spare")
    found = told(rig, "running", "cycle 1", "2 active, 1 spare")
    assert (found["term"], found["writer"]) == (term, writer)
    rig.ends_well("end1", first, second, third)


def test_a_coordinator_that_is_gone_is_silent(rig):
    rig.before = OFTEN
    one = rig.run(rig.script(UNTIL_TOLD))
    pid = up(one, 0)[1]
    told(rig, "running")
    kill(one, pid)
    told(rig, "silent", code=CANNOT_TELL)


def test_one_event_has_one_time_wherever_it_is_told(rig):
    """Here a job begins some time before its coordinator, as in a batch script."""
    rig.before = OFTEN
    script = rig.script("if CYCLE == 0:\n    sys.exit(3)\n" + UNTIL_TOLD)
    one = rig.run(script, "--max-restarts=9", NVRX_BEGAN=str(time.time() - 40.0))
    at = one.line(r"(\+4\d\.\d)s .*exited with code 3; restart 1")[1]
    told(rig, "running", "cycle 1", f"{at}s", "exited with code 3")
    rig.ends_well("end1", one)
    assert f"{at}s  cycle 0 failed" in nvrx("why", rig.run_dir).stdout
    assert f"{rig.result['restarts'][0]['at_s']:+.1f}" == at
