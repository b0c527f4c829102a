"""The agent's side: monitors that are killed, stopped or cannot run, and what closing them leaves."""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from monitor_harness import SOCKET, Rig, kill_monitor
from waits import WAIT_S

from nvrx_slurm.child import processes
from nvrx_slurm.child import supervised as restarted
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.monitors import monitor_start, monitors
from nvrx_slurm.node.monitors.monitors import WatchRules

pytestmark = pytest.mark.process


async def test_a_killed_monitor_is_replaced_and_forgets_nothing(rig):
    """Three times, while a section is open: its limit runs on, and the init is remembered."""
    client = rig.ready(rank_init_timeout=1.5, rank_heartbeat_timeout=60.0, rank_section_timeouts={"a": 3.0})
    client.start_section("a")
    opened_s = time.monotonic()
    for _ in range(3):
        await kill_monitor(rig)
        client.send_heartbeat()
    message = await rig.hang()
    assert message["sentence"].startswith("in section 'a' for ") and message["deadline_s"] <= opened_s + 3.0
    client.shutdown_workload_monitoring()
    assert len(rig.hangs) == 1


async def test_init_waits_for_a_monitor_that_is_being_replaced(rig):
    client = rig.rank()
    await rig.stopped_while(client.init_workload_monitoring)
    assert client.cfg.safety_factor == 5.0


@contextlib.asynccontextmanager
async def three(tmp_path):
    """Their starter, and the monitors."""
    tmp_path.chmod(0o700)
    processes.Orphans()  # makes this process a subreaper
    together = [monitors.RankMonitor(rank, tmp_path, print, print) for rank in range(3)]
    for one in together:
        one.start()
    starter = monitor_start.MonitorStarter(tmp_path, None, together, 0.0)
    assert starter.pid is not None
    yield starter, together
    await starter.close()
    await asyncio.gather(*(one.close() for one in together))
    assert processes.own_pids() == frozenset()


@pytest.mark.parametrize("killed", [False, True])
async def test_monitors_that_are_started_together_are_processes_of_their_own(tmp_path, killed):
    """`killed`: the starter, before it has forked them; each monitor then starts on its own."""
    async with three(tmp_path) as (starter, together):
        if killed:
            os.kill(starter.pid, signal.SIGKILL)
        await until(lambda: all(one.pid is not None for one in together))
        await until(lambda: [name(one.pid) for one in together] == [f"nvrx-monitor-{rank}" for rank in range(3)])
        assert starter.pid is None and [os.getsid(one.pid) for one in together] == [one.pid for one in together]
        os.kill(together[1].pid, signal.SIGKILL)
        first = together[1].pid
        await until(lambda: together[1].pid not in (None, first))


async def test_monitors_that_end_while_they_are_started_say_nothing(tmp_path, caplog):
    """As of a job that ends in its first second."""
    async with three(tmp_path) as (starter, _):
        os.kill(starter.pid, signal.SIGSTOP)
    assert caplog.messages == []


async def until(condition):
    """A process sends no event when its name changes."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.001)


def name(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def test_close_leaves_no_process_no_zombie_no_socket_no_fd():
    before = set(os.listdir("/proc/self/fd"))
    async with Rig() as rig:
        worker = rig.worker("sys.stdin.readline()")
        pidfd = os.pidfd_open(rig.pid)
        path = rig.path
        rig.monitor.unwatch()
        assert not os.path.exists(path)
        assert rig.path != path  # a process of the last cycle cannot speak for the next
        await rig.monitor.close()
        with pytest.raises(ProcessLookupError):  # reaped
            signal.pidfd_send_signal(pidfd, 0)
        assert worker.process.poll() is None  # left alone
        os.close(pidfd)
        assert list(rig.dir.glob("rank*")) == []
    assert set(os.listdir("/proc/self/fd")) == before


async def test_a_stopped_monitor_does_not_hold_up_close(rig):
    rig.rank()
    await rig.settled()
    rig.stop()
    start_s = time.monotonic()
    await rig.monitor.close()
    assert time.monotonic() - start_s < restarted.CLOSE_TIMEOUT_S  # it was continued, not waited for


async def test_bad_settings_raise_and_change_nothing(rig, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match="0700"):
        monitors.RankMonitor(0, tmp_path, print, print).start()
    rig.ready()
    other = {"pid": os.getpid(), "pidfd": 0, "cycle": 1, "rank": 3}
    with pytest.raises(ValueError, match="65536"):
        rig.monitor.watch(**other, rules=WatchRules({}, settings={"long": "x" * 70000}))
    await rig.settled()


async def test_a_directory_that_cannot_be_made_anew_costs_the_monitor_only(caplog):
    async with Rig() as rig:
        home = rig.dir.with_suffix(".away")
        rig.dir.rename(home)
        rig.dir.write_text("")  # a file in its place
        rig.monitor.unwatch()
        assert SOCKET not in rig.monitor.worker_env()
        rig.monitor.watch(
            pid=os.getpid(), pidfd=0, cycle=1, rank=3, rules=monitors.WatchRules({})
        )  # nothing to watch it with
        rig.monitor.unwatch()
        rig.dir.unlink()
        home.rename(rig.dir)
        assert SOCKET in rig.monitor.worker_env()
    assert "without its monitor" in caplog.text
