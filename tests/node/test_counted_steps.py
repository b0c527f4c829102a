"""Steps of scripts that import nothing of ours: counted right, weights and graphs as without, no trace of the hook."""

import json
from pathlib import Path

import pytest
from test_status_file import OFTEN, told

from nvrx_slurm.core.progress import pace, progress
from nvrx_slurm.monitor import page
from nvrx_slurm.node.monitors.times import times_of
from nvrx_slurm.types import Pace, RankPace

pytestmark = [pytest.mark.process, pytest.mark.torch]
SCRIPT = Path(__file__).parents[1] / "data" / "step_kinds.py"
BOUND_S = 240.0
KINDS = 21
FEW = ("adamw", "nested", "closes_all")


def facts(rig, way, kinds, *flags):
    """What each of these kinds has found; no kinds: of all."""
    out = rig.dir / way
    out.mkdir()
    count = len(kinds) or KINDS
    one = rig.run(str(SCRIPT), f"--nproc-per-node={count}", "--max-restarts=0", *flags, args=(str(out), *kinds))
    assert one.wait(BOUND_S) == 0, one.text[-2000:]
    found = {path.stem: json.loads(path.read_text()) for path in out.iterdir()}
    assert len(found) == count
    return found


@pytest.mark.timeout(2 * BOUND_S)
def test_steps_are_counted_and_nothing_else_changes(rig):
    off = facts(rig, "off", (), "--ft-step-hook=off", "--ft-preload=torch")
    assert [kind for kind, one in off.items() if one["words"] or one["traces"]] == []
    forked = facts(rig, "forked", (), "--ft-preload=torch")
    executed = facts(rig, "executed", FEW, "--ft-warm=off")
    for kind, one in (*forked.items(), *executed.items()):
        step_ns, steps, first_ns, second_ns, longest_ns = one["words"]
        assert (kind, steps) == (kind, one["made"])
        assert 0 < first_ns < second_ns <= step_ns and 0 < longest_ns <= step_ns - first_ns
        changed = {"words": one["words"], "forked": one is forked[kind]}
        assert (kind, one) == (kind, off[kind] | changed)


TRAINS = """
import torch
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for _ in range(int(sys.argv[1])):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.02)
gate("end")
"""


@pytest.mark.parametrize("steps", [0, 30])
def test_steps_are_in_the_status_and_in_the_account(rig, steps):
    """A job that never trains is not productive."""
    rig.before = OFTEN
    one = rig.run(rig.script(TRAINS), "--nproc-per-node=2", args=(str(steps),))
    found = told(rig, f"step {steps} of this cycle" if steps else "0 of 2 ranks have begun to train")
    rig.open("end")
    assert one.wait(BOUND_S) == 0
    account = rig.result["account"]
    seconds = account["nodes"][0]["seconds"]
    assert seconds["import"] > 0.0 and seconds["init"] > 0.0
    if steps:
        assert found["progress"]["step_s"] > 0.02 and seconds["productive"] > 0.5
        assert account["grades"]["productive"] == "counted"
    else:
        assert account["productive_share"] == 0.0


STEPPED = ("FIRST_INIT", "STEPS_SINCE", "FIRST_STEP", "SECOND_STEP")
BEATEN = ("FIRST_BEAT", "SECOND_BEAT", "HEARTBEAT", "STEP")


@pytest.mark.parametrize("told, beats", [(page.STEPS, 7), (page.BEATS, 7), (page.TIMES, 0)])
def test_what_a_script_tells_replaces_the_steps_of_its_optimizer(told, beats):
    """Heartbeats, or sections "step"."""
    words = [0] * page.WORDS
    for seconds, name in enumerate((*STEPPED, *BEATEN), 1):
        words[getattr(page, name)] = seconds * 10**9
    words[page.STEPS] = 3
    words[told] = 7
    times = times_of(words, ["step"], 0.0, 10.0)
    found = times.init_s, times.first_s, times.second_s, times.last_s
    assert found == ((1.0, 3.0, 4.0, 8.0) if told == page.STEPS else (1.0, 5.0, 6.0, 7.0))
    assert times.beats == beats


@pytest.mark.parametrize("step_s, limit_s", [(0.5, 60.0), (30.0, 300.0)])
@pytest.mark.parametrize("over_s", [-1.0, 1.0])
def test_no_step_for_long_is_told(step_s, limit_s, over_s):
    still_s = (limit_s + over_s, limit_s + 5.0)
    ranks = tuple(RankPace(rank, 50, step_s, "", 0.0, still_s[rank]) for rank in (0, 1))
    found = {"progress": progress([Pace(1, 0, ranks)]), "allocation_ends": 0.0}
    assert ("no step for" in str([*pace(found)])) == (over_s > 0.0)
