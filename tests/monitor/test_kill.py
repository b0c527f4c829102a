"""The end of a hung rank: stacks, signals, its process group; and what a dead agent leaves."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitor_harness import HANG, ROOT, Rig, kill_monitor, readable, stop
from waits import WAIT_S

from nvrx_slurm.child import bootstrap
from nvrx_slurm.monitor import kill

pytestmark = pytest.mark.process


HUNG = """
client.init_workload_monitoring()
client.send_heartbeat()
say("init")
def a_function_with_a_name_to_find():
    threading.Event().wait()
a_function_with_a_name_to_find()
"""


async def test_a_hung_rank_prints_its_stacks_and_dies_of_the_signal(rig):
    """Running or stopped; soon after the deadline and never before; without a core file."""
    for cycle in range(3):
        worker = rig.worker(HUNG, cycle=cycle, rank_heartbeat_timeout=0.3)
        assert await worker.line() == "init"
        if cycle:
            os.kill(worker.pid, signal.SIGSTOP)
        await readable(worker.pidfd)
        dead_s = time.monotonic()
        message = await rig.hang()
        assert await worker.ended() == -kill.END_SIGNAL
        assert message["sentence"].startswith("no heartbeat for ") and "(limit 0.3 s)" in message["sentence"]
        assert 0 < dead_s - message["deadline_s"] < 1  # scripts/bench measures the milliseconds
        said = worker.err.read_text()
        assert "most recent call first" in said and (cycle or "a_function_with_a_name_to_find" in said)
        assert "Fatal Python error" not in said and "Extension modules" not in said
        assert not list(worker.err.parent.glob("core*"))
        rig.monitor.unwatch()


NO_INIT, NO_BEAT = {"rank_init_timeout": 3.0}, {"initial_rank_heartbeat_timeout": 0.3}
EARLY = "def early():\n    threading.Event().wait()\nearly()"
NO_HANDLER = "import faulthandler; faulthandler.disable()\n"
OWN_HANDLER = "signal.signal(%d, lambda *_: os._exit(7))\nclient.init_workload_monitoring()" + HANG
WRAPPER = (
    NO_HANDLER
    + """
import subprocess
code = (
    "import sys, threading; sys.path.insert(0, %r)\\n" % sys.path[0] +
    "from nvrx_slurm.fault_tolerance import RankMonitorClient\\n"
    "RankMonitorClient().init_workload_monitoring()\\n"
    "def behind_the_wrapper(): threading.Event().wait()\\n"
    "behind_the_wrapper()"
)
subprocess.run([sys.executable, "-c", code])
"""
)


ENDS = {
    "faulthandler before init": (EARLY, signal.SIGKILL, NO_INIT, -signal.SIGABRT, "in early"),
    "no handler": (NO_HANDLER + HANG, signal.SIGKILL, NO_INIT, -signal.SIGKILL, ""),
    "the user's signal comes alone": (OWN_HANDLER % signal.SIGUSR1, signal.SIGUSR1, NO_BEAT, 7, ""),
    "the script's own handler is kept": (OWN_HANDLER % kill.END_SIGNAL, signal.SIGKILL, NO_BEAT, 7, ""),
    "behind a wrapper": (WRAPPER, signal.SIGKILL, NO_BEAT, None, "behind_the_wrapper"),
}


@pytest.mark.parametrize("code, signum, limits, status, stacks_of", ENDS.values(), ids=ENDS)
async def test_how_a_hung_rank_ends(rig, code, signum, limits, status, stacks_of):
    worker = rig.worker(code, signum=signum, **limits)
    await rig.hang()
    assert await worker.ended() == status or status is None  # None: it may end on its own, after its child
    said = worker.err.read_text()
    assert stacks_of in said if stacks_of else said == ""
    assert not list(worker.err.parent.glob("core*"))


@pytest.mark.parametrize("handled, signum", [(signal.SIGTERM, signal.SIGTERM), (kill.END_SIGNAL, signal.SIGKILL)])
async def test_a_rank_that_survives_the_first_step_is_killed_alone(monkeypatch, handled, signum):
    shorter = "import nvrx_slurm.core.rank.watch as w; w.STACKS_GRACE_S = w.SIGNAL_GRACE_S = 0.2"
    program = bootstrap.PROGRAM.replace("from nvrx", f"{shorter}; from nvrx")
    monkeypatch.setattr(bootstrap, "PROGRAM", program)
    async with Rig() as rig:
        worker = rig.worker(
            f"""
            import subprocess
            child = subprocess.Popen(["sleep", "1000"])
            signal.signal({int(handled)}, lambda *_: None)
            say(child.pid)
            client.init_workload_monitoring()
            while True:
                signal.pause()
            """,
            signum=signum,
            initial_rank_heartbeat_timeout=0.2,
        )
        child = os.pidfd_open(int(await worker.line()))
        message = await rig.hang()
        assert await worker.ended() == -signal.SIGKILL
        assert time.monotonic() - message["at_s"] >= 0.2
        assert not kill.is_dead(child)  # its agent kills the rest of the group, but helpers that clean up
        os.close(child)


async def test_signals_for_the_step_do_not_end_the_monitor(rig):
    client = rig.ready(rank_heartbeat_timeout=0.3)
    client.send_heartbeat()
    pid = rig.pid
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        os.kill(pid, getattr(signal, name))
    await rig.hang()
    assert rig.pid == pid


@pytest.mark.parametrize("reaped", [False, True])
async def test_kill_group_reaches_processes_that_outlived_their_leader(reaped):
    command, pipe = ["sh", "-c", "sleep 1000 & echo $!; read line"], subprocess.PIPE
    leader = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
    pidfd, child = os.pidfd_open(leader.pid), os.pidfd_open(int(leader.stdout.readline()))
    if reaped:
        leader.stdin.close()
        leader.wait()
    kill.kill_group(pidfd, leader.pid)
    await readable(child)
    leader.wait()
    assert kill.is_dead(pidfd)
    kill.kill_group(pidfd, leader.pid)  # the group is empty: nothing happens
    leader.stdin.close()
    leader.stdout.close()
    os.close(pidfd)
    os.close(child)


def test_a_reused_number_is_not_killed():
    """The worker is reaped, and another process has its number and a group."""
    gone = subprocess.Popen(["true"], start_new_session=True)
    pidfd = os.pidfd_open(gone.pid)
    gone.wait()
    with subprocess.Popen(["sleep", "1000"], start_new_session=True) as other:
        kill.kill_group(pidfd, other.pid)
        assert other.poll() is None
        other.kill()
    os.close(pidfd)


AGENT = f"""
import asyncio, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {ROOT + "/tests/lib"!r}, {ROOT!r}]
from monitor_harness import Rig

WORKER = '''
import subprocess
os.unlink(os.readlink("/proc/self/fd/2"))  # stderr is in the directory that the monitor has to remove
child = subprocess.Popen(["sleep", "1000"])
say(child.pid)
%s
say("up")
child.wait()
'''

async def main():
    for init in ("", "client.init_workload_monitoring()"):
        rig = await Rig().__aenter__()
        rigs.append(rig)
        worker = rig.worker(WORKER % init)
        child = await worker.line()
        assert await worker.line() == "up"
        await rig.settled()
        print(rig.dir, worker.pid, child, rig.pid, flush=True)
    await asyncio.Event().wait()

rigs = []
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
async def test_after_the_agent_s_death_its_workers_and_monitors_are_gone_within_a_second(stopped):
    with subprocess.Popen([sys.executable, "-c", AGENT], stdout=subprocess.PIPE, text=True) as agent:
        try:
            rigs = [agent.stdout.readline().split() for _ in range(2)]
            pidfds = [os.pidfd_open(int(pid)) for _, *pids in rigs for pid in pids]
            assert len(pidfds) == 6
            if stopped:
                stop(int(rigs[0][-1]))
        finally:
            agent.kill()
        await asyncio.gather(*(readable(pidfd, 1.0) for pidfd in pidfds))
    for pidfd in pidfds:
        os.close(pidfd)
    assert not any(os.path.exists(directory) for directory, *_ in rigs)  # the monitors cleaned up after their agent


PARENT = "import subprocess; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
LEASE_S = 1.0


async def renew(rig):
    """As the agent does while it hears from its coordinator."""
    while True:
        rig.lease.until_s = time.monotonic() + LEASE_S
        await asyncio.sleep(LEASE_S / 10)


async def test_a_rank_and_its_children_end_with_the_lease_and_not_before(rig):
    renewal = asyncio.ensure_future(renew(rig))
    await asyncio.sleep(0)  # the first renewal comes before the worker
    worker = rig.worker(PARENT)
    child = os.pidfd_open(int(await worker.line()))
    await kill_monitor(rig)  # the next monitor has the same lease
    await asyncio.sleep(2 * LEASE_S)  # the time under test: two leases, renewed
    assert worker.process.poll() is None
    renewal.cancel()
    for fd in (worker.pidfd, child):
        await asyncio.wait_for(readable(fd), WAIT_S)
    assert rig.lease.over
    assert worker.process.wait() == -signal.SIGKILL
    assert rig.hangs == []
    os.close(child)
