"""The warning signal: every rank hears of it once, on every node; what ends early says so in its exit code."""

import signal
import time

import pytest
from agent_harness import CLIENT

pytestmark = pytest.mark.process


# Says how often the signal came (`got`) and what should_stop() said; `step()` waits for either without polling hard.
ASKS = CLIENT + """
import select
def train_until_told():
    while not client.should_stop():
        select.select([], [], [], 0.02)
    say("told")
"""  # fmt: skip


def start(rig, code, *flags, **env):
    return rig.run(rig.script(ASKS + code), "--nproc-per-node=2", *flags, **env)


def both_up(one):
    one.ranks("up")


def test_a_warning_to_a_spare_reaches_every_rank_once(rig):
    """Ranks with a handler get the signal once, those without do not die of it."""
    script = rig.script(ASKS + """
if RANK == 0:
    signal.signal(signal.SIGUSR1, lambda *_: say("got it"))
say("up", signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)
train_until_told()
gate()
""")  # fmt: skip
    nodes = rig.nodes(3, "2:3", script, "--max-restarts=3")
    nodes[0].line(r"up False$")
    nodes[1].line(r"up True$")
    nodes[2].line("hot spare")
    nodes[2].signal(signal.SIGUSR1)
    for rank in (0, 1):
        nodes[rank].line("told$")
    nodes[2].line("the job is about to end")
    rig.open()
    assert [one.wait() for one in nodes] == [138, 138, 138]
    assert sorted(rig.log(0, 0, "out").splitlines()) == ["got it", "told", "up False"]
    assert rig.log(0, 1, "out").splitlines() == ["up True", "told"]
    assert rig.result["code"] == 138


@pytest.mark.parametrize(
    "after, code",
    [("if RANK: train_until_told()\nelse: gate()", 138), ("gate()", 0), ("gate(); os._exit(5)", 1)],
    ids=["one rank asked", "nobody asked", "a rank failed"],
)
def test_the_exit_code_tells_the_truth(rig, after, code):
    """138 if any rank was told and all ended well; without the question it is a finished job; a fault is a fault."""
    one = start(rig, f"say('up')\n{after}\n")
    both_up(one)
    one.signal(signal.SIGUSR1)
    one.line("ranks are told to save their work")
    rig.open("go")
    assert one.wait() == code


def test_other_signals_are_only_passed_on(rig):
    """And a worker without a handler dies of them, as it would without us."""
    one = start(rig, "say('up')\nsay(client.should_stop())\nforever()\n", "--ft-warning-signal=SIGUSR2")
    both_up(one)
    one.signal(signal.SIGUSR2)
    one.line("ranks are told to save their work")
    one.signal(signal.SIGUSR1)
    assert one.wait() == 1
    assert "signal 10" in one.text or "SIGUSR1" in one.text


def test_ranks_are_warned_before_the_time_limit(rig):
    """The time left comes from the environment of the srun task of one node."""
    step = {
        "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": "n1", "SLURMD_NODENAME": "n1", "SLURM_JOB_END_TIME": str(int(time.time() + 61.0)),
    }  # fmt: skip
    one = start(rig, "say('up')\ntrain_until_told()\n", "--ft-warn-before-end=59", **step)
    one.line(r"the allocation ends in ")
    one.line(r"less than 59 s of the allocation are left")
    assert one.wait() == 138
    assert [rig.log(0, rank, "out") for rank in (0, 1)] == ["up\ntold\n"] * 2


@pytest.mark.parametrize("asks", [False, True])
def test_ranks_that_were_warned_and_did_not_ask_are_said_at_the_end(rig, asks):
    one = start(rig, "say('up')\n" + "train_until_told()\nsay('asked')\n" * asks + "forever()\n")
    both_up(one)
    one.signal(signal.SIGUSR1)
    one.line("asked" if asks else "ranks are told to save their work")
    one.signal(signal.SIGTERM)
    assert one.wait() == 143
    assert sum("none has asked" in line for line in one.said) == (not asks)
