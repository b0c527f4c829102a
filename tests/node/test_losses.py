"""--ft-loss-action with real workers: a wrong loss is said, restarts all before the next save, or ends the job."""

import pytest
from agent_harness import CLIENT, UP

pytestmark = pytest.mark.process


TRAINS = """
saved = os.path.join(os.environ["NVRX_TEST_GATES"], f"saved{CYCLE}")
for step in range(200):
    wrong = CYCLE == 0 and step >= 150 and RANK == 1
    loss = {"nan": float("nan"), "bits": 2.0 + 1e-15}[KIND] if wrong else 2.0
    client.report(step, loss, 1.0)
    time.sleep(0.002)
client.start_section("checkpointing")
open(saved, "w").close()
client.end_section("checkpointing")
if WAITS:
    gate("said")
"""


@pytest.mark.repeats("warn", "stop")
@pytest.mark.parametrize(
    "action, kind, code, cycles, saved",
    [
        ("warn", "nan", 0, [0], True),
        ("restart", "nan", 0, [0, 1], False),
        ("restart", "bits", 0, [0, 1], False),
        ("stop", "nan", 93, [0], False),
    ],
)
def test_a_wrong_loss(rig, action, kind, code, cycles, saved):
    rig.before = "from nvrx_slurm.node.monitors import losses\nlosses._EVERY_S['warn'] = 0.1"
    script = rig.script(f"KIND, WAITS = {kind!r}, {action == 'warn'}\n" + UP + CLIENT + TRAINS)
    flags = ("--nproc-per-node=2", f"--ft-loss-action={action}", "--ft-rank-section-timeouts=checkpointing:none")
    one = rig.run(script, *flags, "--max-restarts=2", "--ft-crash-loop-backoff=0")
    one.line("the loss is nan at iteration 15" if kind == "nan" else "the loss of iteration 15. has other bits")
    rig.open("said")
    assert (one.wait(), one.cycles) == (code, cycles)
    assert (rig.dir / "saved0").exists() == saved
    if action == "restart":
        (restart,) = rig.result["restarts"]
        assert rig.result["faults"][0]["kind"] == "loss" and "wrong loss" in restart["cause"]
