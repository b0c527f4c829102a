"""Where the time went in a real job: the account against what the ranks themselves have noted."""

import json
import os
from collections import defaultdict
from datetime import datetime

import pytest
from agent_harness import UP, kill, up
from click.testing import CliRunner

from nvrx_slurm.cli.toolbox import main

pytestmark = pytest.mark.process


SLACK_S = (
    0.1 if os.getloadavg()[0] < (os.cpu_count() or 1) else 0.4
)  # of each phase, in each cycle; a busy machine is late
LOADED_S = 0.9  # more for an interpreter's start, before the script's first line
IMPORT_S, INIT_S, SAVE_S, EVALUATION_S, STEP_S = 0.8, 0.4, 0.5, 0.3, 0.05
# Of each cycle: a rank exits, a rank hangs, the coordinator's node is lost, it ends well.
SCRIPT = f"""
BORN = time.time()
NOTES = open(os.path.join(os.environ["NVRX_TEST_GATES"], f"notes_{{CYCLE}}_{{RANK}}"), "a", buffering=1)
def note(what):
    NOTES.write(json.dumps([what, time.time()]) + "\\n")
NOTES.write(json.dumps(["born", BORN]) + "\\n")
from nvrx_slurm.fault_tolerance import RankMonitorClient
time.sleep({IMPORT_S})
client = RankMonitorClient()
client.init_workload_monitoring()
note("init")
time.sleep({INIT_S})
def section(name, seconds):
    note(name)
    client.start_section(name)
    time.sleep(seconds)
    client.end_section(name)
    note("/" + name)
for step in range(20):
    client.send_heartbeat()
    note("beat")
    time.sleep({STEP_S})
    if step == 8:
        section("checkpointing", {SAVE_S})
    if step == 12:
        section("evaluation", {EVALUATION_S})
    if step == 15 and (CYCLE, RANK) == (0, 0):
        note("exit")
        os._exit(3)
    if step == 15 and (CYCLE, RANK) == (1, 1):
        forever()
{UP.strip()}
if CYCLE == 2:
    while True:
        client.send_heartbeat()
        note("beat")
        time.sleep({STEP_S})
note("end")
"""


def notes(rig, cycle, rank):
    found = defaultdict(list)
    for line in (rig.dir / f"notes_{cycle}_{rank}").read_text().splitlines():
        what, at = json.loads(line)
        found[what].append(at)
    return found


def took(found, name):
    return sum(end - begin for begin, end in zip(found[name], found[f"/{name}"], strict=False))  # one is cut off


def trained(found, until):
    """Productive, and since the checkpoint."""
    saved = found["/checkpointing"][-1]
    return until - found["beat"][0] - took(found, "checkpointing") - took(found, "evaluation"), until - saved - took(
        found, "evaluation"
    )


def unix(text):
    return datetime.fromisoformat(text).timestamp()


def test_each_phase_is_what_the_ranks_have_noted(rig):
    """Five faults: slow imports, a rank that exits, one that hangs, a lost node with the coordinator, a lost spare."""
    limits = ("--ft-rank-heartbeat-timeout=2", "--ft-rank-section-timeouts=checkpointing:30,evaluation:30")
    first, second, third, fourth = rig.nodes(4, "2:4", rig.script(SCRIPT), "--max-restarts=5", *limits)
    up(first, 2)
    fourth.line("this node is a hot spare")
    kill(fourth)
    first.line("node .* left")
    kill(first, up(first, 2)[1])
    assert [second.wait(), third.wait()] == [0, 0]
    result = rig.result
    account, restarts = result["account"], result["restarts"]
    assert [one["cycle"] for one in restarts] == [0, 1, 2] and result["lost_nodes"]
    nodes = {node["node"]: node["seconds"] for node in account["nodes"]}
    ranks = {cycle: notes(rig, cycle, 1) for cycle in range(4)}  # of `second`, which is in all cycles
    mine, lost, ends = nodes["1"], 0.0, [unix(one["time"]) for one in restarts] + [0.0]
    exits, hangs = notes(rig, 0, 0)["exit"][0], ranks[1]["beat"][-1]
    ends = [exits, hangs, ends[2], ranks[3]["end"][0]]
    productive = sum(trained(ranks[cycle], ends[cycle])[0] for cycle in range(4))
    lost = sum(trained(ranks[cycle], ends[cycle])[1] for cycle in range(3))
    wanted = {
        "init": sum(found["beat"][0] - found["init"][0] for found in ranks.values()),
        "checkpoint": sum(took(found, "checkpointing") for found in ranks.values()),
        "section:evaluation": sum(took(found, "evaluation") for found in ranks.values()),
        "recomputed": lost,
        "productive": productive - lost,
        "detect": unix(restarts[0]["time"]) - exits + unix(restarts[1]["time"]) - hangs,
    }
    assert {name: mine[name] for name in wanted} == pytest.approx(wanted, abs=4 * SLACK_S)
    imports = sum(found["init"][0] - found["born"][0] for found in ranks.values())
    assert imports - SLACK_S < mine["import"] < imports + 4 * LOADED_S
    assert restarts[1]["detect_s"] == pytest.approx(unix(restarts[1]["time"]) - hangs, abs=SLACK_S)
    for cycle, one in enumerate(restarts):  # the mean of two ranks, which are not in step
        assert one["recomputed_s"] == pytest.approx(trained(ranks[cycle], ends[cycle])[1], abs=3 * SLACK_S)
        assert one["again_s"] > IMPORT_S + INIT_S
    down_s = sum(one["down_s"] for one in restarts)
    assert mine["stop"] + mine["plan"] == pytest.approx(down_s, abs=1.0)  # and until all have heard the end
    # The others: a node that was lost, the spare that took its place, a spare that was lost.
    assert min(nodes["0"]["excluded"], nodes["3"]["excluded"]) > 1.0  # since the takeover: their loss was not told
    assert nodes["2"]["spare_idle"] == pytest.approx(restarts[2]["at_s"], abs=2.0) and nodes["2"]["productive"] > 0.5
    for node in account["nodes"]:
        assert node["wall_s"] == pytest.approx(result["duration_s"], abs=0.001)
        assert node["seconds"].get("other", 0.0) < 0.01 * node["wall_s"]
    assert account["grades"]["checkpoint"] == "counted" and account["saves"] >= 7
    assert account["save_s"] == pytest.approx(SAVE_S, abs=SLACK_S)
    assert 0.0 < account["productive_share"] < account["productive_share_of_training_nodes"] < 1.0
    # The same from the event logs, as after a job that died without a word: until the last plan.
    (rig.run_dir / "result.json").unlink()
    told = CliRunner().invoke(main, ["goodput", "--json", str(rig.run_dir)])
    found = json.loads(told.output)
    assert (found["runs_without_result"], found["restarts"], found["lost_steps"]) == (1, 3, None)
    assert sum(found["node_seconds"].values()) == pytest.approx(4 * found["wall_s"], abs=0.1)
    assert found["node_seconds"]["checkpoint"] == pytest.approx(6 * SAVE_S, abs=6 * SLACK_S)
