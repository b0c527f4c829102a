"""Signals that end the job, are passed on, or come again; one wish, one code on all nodes, nothing left."""

import signal
from pathlib import Path

import pytest
from waits import until

pytestmark = pytest.mark.process


COUNTING = """
def handler(signum, frame):
    say("got", signal.Signals(signum).name)
    os._exit(0)
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(s, handler)
say("up")
forever()
"""


def test_an_ending_signal_reaches_the_workers_once_and_is_the_exit_code(rig):
    """Workers that end with 0 on it do not turn the end into a success."""
    one = rig.run(rig.script(COUNTING), "--nproc-per-node=2", "--max-restarts=3")
    one.ranks("up$")
    one.signal(signal.SIGINT)
    assert one.wait() == 128 + signal.SIGINT
    assert "got signal" in one.said[-1] and "first cause" not in one.text
    assert [rig.log(0, rank, "out") for rank in (0, 1)] == ["up\ngot SIGINT\n"] * 2


def test_signal_to_a_spare_ends_all_with_143(rig):
    nodes = rig.nodes(3, "2:3", rig.script(COUNTING), "--max-restarts=3")
    for rank in (0, 1):
        nodes[rank].line("up$")
    nodes[2].line("hot spare")
    nodes[2].signal(signal.SIGTERM)
    assert [one.wait() for one in nodes] == [143, 143, 143]
    assert [rig.log(0, rank, "out") for rank in (0, 1)] == ["up\ngot SIGTERM\n"] * 2
    assert "node 2 (" in nodes[0].said[-1]


# Signals that come within one second, not three, are the same wish.
SOON = """
from functools import partial
from nvrx_slurm.config import cores
cores.AgentSettings = partial(cores.AgentSettings, same_signal_s=1.0)
"""
STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: say("no"))
say("up")
while True:
    signal.pause()
"""


def test_a_later_second_signal_kills_at_once(rig):
    """Until then the same signal again means the same wish, as Slurm sends it several times."""
    rig.before = SOON
    one = rig.run(rig.script(STUBBORN), "--term-timeout=1000")
    one.line("up$")
    one.signal(signal.SIGTERM)
    one.line("no$")
    one.signal(signal.SIGTERM)  # at once: the same wish
    with pytest.raises(AssertionError, match="no '"):
        one.line("never said", timeout_s=1.2)
    assert one.process.poll() is None
    one.signal(signal.SIGTERM)
    assert one.wait(10) == 143
    assert rig.log(0, 0, "out") == "up\nno\n"


def test_signal_while_waiting_for_nodes_or_for_the_coordinator(rig):
    script = rig.script("forever()")
    alone = (rig.node(0, "2", script), rig.node(1, "3", script), *rig.step((0,), 4, "3:4", script))
    for one in alone:  # the last one stands for coordinator, and never has a majority
        until(lambda one=one: len(one.children) >= 3, "the checks, a held worker and its monitor")
        one.signal(signal.SIGTERM)
        assert one.wait(10) == 143


def test_signal_while_a_name_is_looked_up(rig):
    rig.before = "import asyncio\nfrom nvrx_slurm.control import addresses\n"
    rig.before += "addresses.find = lambda host, port: print('asks', flush=True) or asyncio.sleep(1000)"
    one = rig.node(0, "2", rig.script(""))
    one.line("asks")
    one.signal(signal.SIGTERM)
    assert one.wait(10) == 143


def press(one):
    """Ctrl-C, which has been read."""
    one.signal(signal.SIGINT)
    status = Path(f"/proc/{one.pid}/status")
    until(lambda: "ShdPnd:\t0000000000000000" in status.read_text(), "it has read the signal")


def test_a_second_interrupt_kills_workers_and_ends_what_the_agent_waits_for(rig):
    one = rig.run(rig.script(STUBBORN.replace("TERM", "INT")), "--term-timeout=1000")
    one.line("up$")
    press(one)
    one.line("no$")
    press(one)
    assert one.wait(10) == 130
    rig.before = "from nvrx_slurm.child import bootstrap\nbootstrap.command = lambda *_, **how: ['/bin/sleep', '1000']"
    one = rig.run(
        rig.script("gate()"), f"--ft-per-cycle-applog-prefix={rig.dir}/merged", "--ft-node-health-checks=false"
    )
    rig.open()
    one.line("job ends with code 0")
    for _ in range(2):
        press(one)
    assert one.wait(10) == 0


IMPORTS = """
import asyncio
from nvrx_slurm.node import signals
from nvrx_slurm.node.workers.launcher import Launcher
signals._sent_by_slurm = lambda received: True
Launcher.wait = lambda self, forked: print("imports", flush=True) or asyncio.Event().wait()
"""


def test_ranks_that_wait_for_their_imports_never_run_when_slurm_ends_the_job(rig):
    """Slurm has signalled all processes, and those of these ranks are not among them."""
    rig.before = IMPORTS
    (one,) = rig.step((0,), 1, "1", rig.script(COUNTING))
    one.line("imports")
    one.signal(signal.SIGTERM)
    assert one.wait(10) == 143
