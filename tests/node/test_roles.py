"""Roles: no command before its receiver exists (D1); an agent that becomes the coordinator; held processes."""

import asyncio
import json
import os
import select
import signal

import pytest
from waits import WAIT_S, until

from nvrx_slurm.child import processes
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.types import Node, Register
from tests.core.samples import agent_settings

pytestmark = pytest.mark.process


NODE = Node("0-x", 0, "here", "127.0.0.1", 1)


class Recorder:
    """A role that handles everything and notes it."""

    def __init__(self):
        self.seen = []

    def handlers(self):
        return dict.fromkeys(ag.COMMANDS, self.seen.append)

    async def start(self):
        """Nothing to start."""

    async def close(self):
        """Nothing to end."""


def test_events_wait_until_each_command_has_a_receiver(tmp_path):
    async def play():
        core = Agent(NODE, agent_settings(), asyncio.get_running_loop().time())
        shell = Shell(core, EventLog(tmp_path / "log", core, print), ag.Exit, print)
        shell.post(ag.Prepared())
        shell.post(ag.Connected())
        with pytest.raises(TypeError, match="StartWorkers"):
            shell.begin()
        recorder = Recorder()
        shell.add(recorder)
        assert recorder.seen == []
        shell.begin()
        assert [type(command.message) for command in recorder.seen] == [Register]
        shell.finish(None)

    asyncio.run(play())


# Each import of the control plane and each look-up of a name is slow.
SLOW = """
import socket, sys, time
real = socket.getaddrinfo
def slow(*args, **kwargs):
    time.sleep(0.1)
    return real(*args, **kwargs)
socket.getaddrinfo = slow
class Slow:
    def find_spec(name, path=None, target=None):
        if name.startswith("nvrx_slurm.control."):
            time.sleep(0.05)
sys.meta_path.insert(0, Slow)
"""


@pytest.mark.parametrize("slow", ["the coordinator", "the preflight"])
def test_two_nodes_start_whatever_is_slow(rig, slow):
    (rig.dir / "slow").mkdir()
    (rig.dir / "slow" / "sitecustomize.py").write_text(SLOW)
    (rig.dir / "root/etc/nvrx").mkdir(parents=True)
    (rig.dir / "check.sh").write_text(f"#!/bin/sh\nsleep {int(slow == 'the preflight')}\n")
    (rig.dir / "check.sh").chmod(0o755)
    own = [{"name": "slow", "run": f"{rig.dir}/check.sh", "when": ["preflight"]}]
    (rig.dir / "root/etc/nvrx/health.yaml").write_text(json.dumps({"own": own}))
    usual, script = rig.env()["PYTHONPATH"], rig.script("say('rank', RANK)")
    paths = [f"{rig.dir}/slow{os.pathsep}{usual}" if slow == "the coordinator" else usual, usual]
    nodes = [rig.node(r, "2", script, f"--sysroot={rig.dir}/root", PYTHONPATH=paths[r]) for r in range(2)]
    assert [one.wait() for one in nodes] == [0, 0], nodes[0].text


def ran(held, tmp_path, **env):
    """Exit code, stdout and stderr of a held process after its release."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        child = held.release(env, out, err)
    assert select.select([child.pidfd], [], [], WAIT_S)[0]
    return child.reap(), (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def test_a_held_process_gets_its_environment_and_streams_at_its_release(tmp_path):
    script = "echo $A; echo b >&2; env | grep -c ^B=; exit 3"
    held = processes.hold(["/bin/sh", "-c", script], {"B": "not for it"})
    assert held.waits
    assert ran(held, tmp_path, A="x y=z\n2", PATH=os.environ["PATH"]) == (3, "x y=z 2\n0\n", "b\n")
    code, _, err = ran(processes.hold(["/nowhere/program"], {}), tmp_path)
    assert code == 127 and "cannot start /nowhere/program" in err


def test_user_signals_before_the_release_are_dropped_and_others_are_not(tmp_path):
    signums = {signal.SIGUSR1, signal.SIGTERM}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signums)  # as in an agent
    try:
        for signum, code in ((signal.SIGUSR1, 0), (signal.SIGTERM, -signal.SIGTERM)):
            held = processes.hold(["/bin/true"], {})
            os.kill(held.child.pid, signum)
            assert ran(held, tmp_path)[0] == code
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_a_held_process_that_is_not_needed_ends(tmp_path):
    marker = tmp_path / "ran"
    for end in (processes.Held.kill, lambda held: held.control.close()):
        held = processes.hold(["/bin/touch", str(marker)], {})
        end(held)
        assert select.select([held.child.pidfd], [], [], WAIT_S)[0] and not held.waits
        held.child.reap()
    assert processes.own_pids() == frozenset() and not marker.exists()


def test_nothing_of_the_user_s_runs_on_a_node_that_fails_its_preflight_or_is_a_spare(rig):
    """Its held processes end and are reaped; the rig sees whether anything is left."""
    script = rig.script("open('ran', 'a').write(os.environ['NVRX_INFRA_RANK'])\ngate()")
    nodes = rig.nodes(3, "1:3", script, "--max-restarts=1", NVRX_INJECT_GPU_FAILURE="0:2")
    assert nodes[2].wait() == 95
    nodes[1].line("hot spare")
    until(lambda: len(nodes[1].children) == 4, "the checks, the monitor, the template and its standby are left")
    rig.ends_well("go", nodes[0], nodes[1])
    assert (rig.dir / "ran").read_text() == "0"
