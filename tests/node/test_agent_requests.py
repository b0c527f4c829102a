"""What ranks ask of the job and what their checkpoints say of it: exclusion, shutdown, no progress, the hook."""

import pytest
from agent_harness import CLIENT
from waits import WAIT_S

from nvrx_slurm.errors import ExitCode

pytestmark = pytest.mark.process


# Every worker is monitored; `ask("ExcludeThisNode", why)` returns when its agent has been told.
ASKING = CLIENT + """
from nvrx_slurm.fault_tolerance import WorkloadAction, WorkloadControlRequest
NODE = int(os.environ["NVRX_INFRA_RANK"])
def ask(action, why):
    client.send_workload_control_request(WorkloadControlRequest(WorkloadAction[action], why))
def saved(iteration):
    with open(f"latest.{RANK}", "w") as file:
        file.write(str(iteration))
    os.replace(f"latest.{RANK}", "latest")
say("up", CYCLE, "group", GROUP)
"""  # fmt: skip
# Each cycle fails, and on another rank than the one before (else it is a crash loop, which is slowed down).
FAILS = """
if RANK == CYCLE % 2:
    raise ValueError("again")
forever()
"""
PROGRESS = ("--ft-checkpoint-iteration-file=latest", "--max-restarts=20", "--nproc-per-node=2")


@pytest.mark.matrix
def test_an_excluded_node_that_comes_back_is_refused(rig):
    script = rig.script(ASKING + "if NODE == 1:\n    ask('ExcludeThisNode', 'x')\nforever() if CYCLE == 0 else gate()")
    first, excluded, spare = rig.nodes(3, "2:3", script, "--max-restarts=1")
    assert excluded.wait() == ExitCode.NODE_REFUSED
    assert excluded.said[-1].endswith("was excluded on request of its rank 1: x")
    spare.line(r"up 1 group 1$")
    back = rig.node(1, "2:3", script, "--max-restarts=1")
    assert back.wait() == ExitCode.NODE_REFUSED
    assert "was excluded from this job" in back.said[-1] and "[rank" not in back.text
    rig.ends_well("go", first, spare)


def test_shutdown_from_one_node_ends_all_with_the_chosen_code(rig):
    """The usual way: ask, then die of the same exception. The request was first, so it decides."""
    asks = "if RANK == 2:\n    ask('ShutdownWorkload', 'loss is NaN')\n    raise ValueError('loss is NaN')\nforever()"
    script = rig.script(ASKING + asks)
    nodes = rig.nodes(3, "3", script, "--max-restarts=5", "--ft-no-restart-exit-code=7")
    assert [one.wait() for one in nodes] == [7] * 3
    for one in nodes:
        assert "asked to shut down the workload: loss is NaN" in one.said[-1] and one.cycles in ([], [0])
    assert rig.result["code"] == 7 and rig.result["reason"].endswith("asked to shut down the workload: loss is NaN")


def test_cycles_without_progress_end_the_job(rig):
    """Cycle 0 saves 10, the cycles after it nothing new: the third of these is one too many.
    (The file is read while the next cycle may begin already.)
    """
    one = rig.run(rig.script(ASKING + "saved(10)" + FAILS), *PROGRESS)
    assert one.wait() == ExitCode.NO_RESTART
    assert one.cycles[-1] in (3, 4)
    why = rig.result
    assert why["code"] == 93
    assert why["reason"].startswith("no progress in 3 cycles: the last checkpoint is of iteration 10")


def test_a_rank_with_the_exception_hook_is_gone_at_once(rig):
    """Without it, this job would hang: the rank waits for its thread."""
    waits = "import threading\nthreading.Thread(target=time.sleep, args=(1000,)).start()\nraise ValueError('x')"
    script = rig.script(ASKING + waits)
    one = rig.run(script, "--ft-install-exception-hook=true")
    assert one.wait(WAIT_S) == ExitCode.FAILED
    cause = rig.result["first_cause"]
    assert cause["kind"] == "exit" and cause["exit_code"] == 1 and "ValueError: x" in cause["traceback"]
