"""Steps of scripts that import nothing of ours: counted right, weights and graphs as without, no trace of the hook."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_status_file import OFTEN, told
from waits import WAIT_S

from nvrx_slurm.core.progress import pace, progress
from nvrx_slurm.monitor import page
from nvrx_slurm.node.monitors.times import times_of
from nvrx_slurm.types import Pace, RankPace

pytestmark = [pytest.mark.process, pytest.mark.torch]
SCRIPT = Path(__file__).parents[1] / "data" / "step_kinds.py"
BOUND_S = 240.0
KINDS = (
    "sgd", "adamw", "foreach", "fused", "adafactor", "lbfgs", "scaler", "accumulation", "scheduled", "gan", "by_groups",
    "replaced", "trial", "zero", "fsdp2", "ddp", "users", "nested", "in_a_child", "closes_all", "compiled",
)  # fmt: skip


FEW = ("adamw", "nested", "closes_all")


def facts(rig, way, kinds, *flags):
    """What each kind has found."""
    out = rig.dir / way
    out.mkdir()
    flags = (f"--nproc-per-node={len(kinds)}", "--max-restarts=0", *flags)
    one = rig.run(str(SCRIPT), *flags, args=(str(out), *kinds))
    assert one.wait(BOUND_S) == 0, one.text[-2000:]
    return {path.stem: json.loads(path.read_text()) for path in out.iterdir()}


@pytest.mark.timeout(2 * BOUND_S)
def test_steps_are_counted_and_nothing_else_changes(rig):
    pytest.importorskip("torch")
    off = facts(rig, "off", KINDS, "--ft-step-hook=off", "--ft-preload=torch")
    assert {kind: one["words"] for kind, one in off.items()} == dict.fromkeys(KINDS)
    ways = {"forked": (KINDS, "--ft-preload=torch"), "executed": (FEW, "--ft-warm=off")}
    for way, (kinds, flag) in ways.items():
        found = facts(rig, way, kinds, flag)
        assert {kind: one["forked"] for kind, one in found.items()} == dict.fromkeys(kinds, way == "forked")
        for kind, one in found.items():
            assert (kind, one["traces"]) == (kind, [])
            step_ns, steps, first_ns, second_ns, longest_ns = one["words"]
            assert (kind, steps) == (kind, one["made"])
            assert 0 < first_ns < second_ns <= step_ns and 0 < longest_ns <= step_ns - first_ns
            same = ("kind", "made", "weights", "graphs")
            assert {name: one[name] for name in same} == {name: off[kind][name] for name in same}


TRAINS = """
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(30 * (sys.argv[1] == "trains")):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
gate("end")
"""


def test_steps_are_in_the_status_and_in_the_account(rig):
    pytest.importorskip("torch")
    rig.before = OFTEN
    one = rig.run(rig.script(TRAINS), "--nproc-per-node=2", args=("trains",))
    found = told(rig, "step 30 of this cycle")
    assert found["progress"]["step_s"] > 0.02
    rig.open("end")
    assert one.wait(BOUND_S) == 0
    seconds = rig.result["account"]["nodes"][0]["seconds"]
    assert seconds["productive"] > 0.5 and seconds["import"] > 0.0 and seconds["init"] > 0.0
    assert rig.result["account"]["grades"]["productive"] == "counted"


@pytest.mark.parametrize("told", [None, page.BEATS, page.TIMES])
def test_what_a_script_tells_replaces_the_steps_of_its_optimizer(told):
    """Heartbeats, or sections "step"."""
    words = [0] * page.WORDS
    at_s = {page.STEPS_SINCE: 2, page.FIRST_STEP: 3, page.SECOND_STEP: 4, page.STEP: 9, page.FIRST_INIT: 1}
    at_s |= {page.FIRST_BEAT: 5, page.SECOND_BEAT: 6, page.HEARTBEAT: 8}
    for word, seconds in at_s.items():
        words[word] = seconds * 10**9
    words[page.STEPS] = 7
    if told is not None:
        words[told] = 3
    times = times_of(words, ["step"], 0.0, 10.0)
    found = times.init_s, times.first_s, times.second_s, times.last_s
    assert found == ((1.0, 3.0, 4.0, 9.0) if told is None else (1.0, 5.0, 6.0, 8.0))
    assert times.beats == {None: 7, page.BEATS: 3, page.TIMES: 0}[told]


def test_no_step_for_long_is_told():
    def told(step_s, still_s):
        ranks = tuple(RankPace(rank, 50, step_s, "", 0.0, still_s + 5.0 * rank) for rank in (0, 1))
        found = progress([Pace(1, 0, ranks)])
        return [one for one in pace({"progress": found, "allocation_ends": 0.0}) if "no step" in one]

    assert told(0.5, 59.0) == told(30.0, 299.0) == []
    assert told(0.5, 61.0) == ["no step for 1 min 1 s"]
    assert len(told(30.0, 301.0)) == 1


def test_a_job_that_never_trains_is_not_productive(rig):
    pytest.importorskip("torch")
    rig.before = OFTEN
    one = rig.run(rig.script(TRAINS), "--nproc-per-node=2", args=("waits",))
    told(rig, "0 of 2 ranks have begun to train")
    rig.open("end")
    assert one.wait(BOUND_S) == 0
    account = rig.result["account"]
    assert account["productive_share"] == 0.0 and account["nodes"][0]["seconds"]["init"] > 0.0


HANGS = """
import torch
def wait_for_ever():
    say("up")
    gate("end")
def work():
    wait_for_ever()
if sys.argv[1] == "closes":
    os.closerange(3, 4096)
    mine = open(sys.argv[2], "w")
work()
"""


@pytest.mark.parametrize("way", ["keeps", "closes"])
@pytest.mark.parametrize("warm", ["--ft-preload=torch", "--ft-warm=off"])
def test_stacks_of_a_rank_that_never_called_us(rig, warm, way):
    """A script that closes descriptors has no stack, and nothing is written to its files."""
    pytest.importorskip("torch")
    own = rig.dir / "own"
    one = rig.run(rig.script(HANGS), "--nproc-per-node=1", warm, args=(way, str(own)))
    one.line("up$", BOUND_S)
    one.monitored()
    ask = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "stacks", str(rig.run_dir)]
    said = subprocess.run(ask, env=rig.env(), capture_output=True, text=True, timeout=WAIT_S, check=True).stdout
    assert ("in wait_for_ever" in said and "in work" in said) == (way == "keeps"), said
    assert way == "keeps" or own.read_text() == ""
    rig.open("end")
    assert one.wait(BOUND_S) == 0
