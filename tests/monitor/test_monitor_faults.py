"""Dead monitors, dead agents, strangers at the socket: nobody is hurt, nobody is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from monitor_harness import ROOT, Rig, kill_monitor, readable, status, until

from nvrx_slurm.agent import monitors
from nvrx_slurm.errors import UsageError
from nvrx_slurm.monitor import kill

SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"


def stop_monitor(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    until(lambda: status(pid)["State"].startswith("T"), "the monitor is stopped")


def test_a_killed_monitor_is_replaced_and_forgets_nothing():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                client.send_heartbeat()
                say("init")
                while sys.stdin.readline() == "beat\\n":
                    client.send_heartbeat()
                    say("beaten")
                threading.Event().wait()
                """,
                rank_init_timeout=2.0,  # would fire if the new monitor forgot the init
                rank_heartbeat_timeout=4.0,
            )
            assert await worker.line() == "init"
            for _ in range(3):
                await kill_monitor(rig)
                worker.tell("beat")
                assert await worker.line() == "beaten"
            beaten_s = time.monotonic()
            worker.tell("hang")
            message = await rig.hang()
            assert message["sentence"].startswith("no heartbeat for 4.0")
            assert message["deadline_s"] <= beaten_s + 4.0
            await worker.ended()
            assert len(rig.hangs) == 1

    asyncio.run(story())


def test_init_waits_for_a_monitor_that_is_being_replaced():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                "sys.stdin.readline(); client.init_workload_monitoring(); say(client.cfg.safety_factor)"
            )
            stop_monitor(rig.pid)
            worker.tell("go")
            listener = rig.monitor.worker_env()[SOCKET]
            until(lambda: waiting_at(listener), "the rank has connected")
            os.kill(rig.pid, signal.SIGKILL)
            assert await worker.line() == "5.0"

    asyncio.run(story())


def waiting_at(path: str) -> bool:
    """Whether somebody has connected to the Unix socket and was not accepted yet (state 02 = connecting/connected)."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum(line[-1] == path for line in lines) > 1


def test_a_monitor_that_cannot_run_is_retried_ever_more_slowly(monkeypatch, caplog):
    async def story():
        monkeypatch.setattr(monitors, "_PROGRAM", "import sys; sys.exit(3)")
        async with Rig() as rig:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 1.0)
            assert rig.hangs == []

    asyncio.run(story())
    sentences = [record.getMessage() for record in caplog.records]
    assert 2 <= len(sentences) <= 6  # at 0, 0, 0.1, 0.3, 0.7 s
    assert "ended with 3; its rank goes on" in sentences[0]


AGENT = f"""
import asyncio, os, subprocess, sys, tempfile
from pathlib import Path
sys.path.insert(0, {ROOT!r})
from nvrx_slurm.agent.monitors import RankMonitor

WORKER = '''
import subprocess, sys
child = subprocess.Popen(["sleep", "1000"])
print(child.pid, flush=True)
if sys.argv[1] == "init":
    sys.path.insert(0, {ROOT!r})
    from nvrx_slurm.fault_tolerance import RankMonitorClient
    RankMonitorClient().init_workload_monitoring()
print("up", flush=True)
child.wait()
'''

async def main():
    pids = []
    for local_rank in range(2):
        monitor = RankMonitor(local_rank, Path(sys.argv[1]), print, print)
        monitor.start()
        env = dict(os.environ, RANK=str(local_rank), **monitor.worker_env())
        worker = subprocess.Popen([sys.executable, "-c", WORKER, "init" if local_rank else "no init"],
                                  stdout=subprocess.PIPE, env=env, start_new_session=True)
        pidfd = os.pidfd_open(worker.pid)
        monitor.watch(pid=worker.pid, pidfd=pidfd, cycle=0, rank=local_rank, limits={{}})
        child = int(worker.stdout.readline())
        worker.stdout.readline()
        pids += [worker.pid, child, monitor.pid]
        keep.append(monitor)
        reader, writer = await asyncio.open_unix_connection(monitor.worker_env()["FT_RANK_MONITOR_IPC_SOCKET"])
        writer.write(b"watching?\\n")
        await reader.readline()
    print(*pids, flush=True)
    await asyncio.Event().wait()

keep = []
asyncio.run(main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_when_the_agent_is_killed_its_workers_and_monitors_are_gone_within_a_second(stopped):
    async def story(directory):
        agent = subprocess.Popen([sys.executable, "-c", AGENT, directory], stdout=subprocess.PIPE)
        try:
            pids = [int(pid) for pid in agent.stdout.readline().split()]
            assert len(pids) == 6
            pidfds = [os.pidfd_open(pid) for pid in pids]
            if stopped:
                stop_monitor(pids[2])
        finally:
            agent.kill()
        killed_s = time.monotonic()
        await asyncio.gather(*(readable(pidfd, 1.0) for pidfd in pidfds))
        print(f"all gone after {1000 * (time.monotonic() - killed_s):.1f} ms")
        assert agent.wait() == -signal.SIGKILL
        agent.stdout.close()
        for pidfd in pidfds:
            os.close(pidfd)

    directory = tempfile.mkdtemp(prefix="nvrx-rmtest-")
    asyncio.run(story(directory))
    assert not os.path.exists(directory)  # the monitors cleaned up after their agent


@pytest.mark.parametrize("flag", [kill._PIDFD_SIGNAL_PROCESS_GROUP, 1 << 30])  # the latter: as before Linux 6.9
@pytest.mark.parametrize("reaped", [False, True])
def test_kill_group_reaches_those_who_outlived_their_leader(monkeypatch, flag, reaped):
    async def story():
        monkeypatch.setattr(kill, "_PIDFD_SIGNAL_PROCESS_GROUP", flag)
        leader = subprocess.Popen(
            ["sh", "-c", "sleep 1000 & echo $!; read line"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        pidfd, child = os.pidfd_open(leader.pid), os.pidfd_open(int(leader.stdout.readline()))
        if reaped:
            leader.stdin.close()
            leader.wait()
        kill.kill_group(pidfd, leader.pid)
        await readable(child)
        leader.wait()
        assert kill.is_dead(pidfd)
        kill.kill_group(pidfd, leader.pid)  # nobody left: nothing happens
        leader.stdin.close()
        leader.stdout.close()
        os.close(pidfd)
        os.close(child)

    asyncio.run(story())


def test_close_leaves_no_process_no_zombie_no_socket_no_fd():
    async def story():
        before = set(os.listdir("/proc/self/fd"))
        async with Rig() as rig:
            worker = rig.worker("sys.stdin.readline()")
            pidfd = os.pidfd_open(rig.pid)
            path = rig.monitor.worker_env()[SOCKET]
            rig.monitor.unwatch()
            assert not os.path.exists(path)
            assert rig.monitor.worker_env()[SOCKET] != path  # what is left of that life cannot speak for the next
            await rig.monitor.close()
            with pytest.raises(ProcessLookupError):  # reaped
                signal.pidfd_send_signal(pidfd, 0)
            assert worker.process.poll() is None  # left alone
            os.close(pidfd)
            assert list(rig.dir.glob("rank*")) == []
        assert set(os.listdir("/proc/self/fd")) == before

    asyncio.run(story())


def test_a_stopped_monitor_does_not_hold_up_close():
    async def story():
        async with Rig() as rig:
            rig.worker("sys.stdin.readline()")
            await rig.settled()
            stop_monitor(rig.pid)
            start_s = time.monotonic()
            await rig.monitor.close()
            assert time.monotonic() - start_s < monitors.CLOSE_TIMEOUT_S  # it was continued, not waited for

    asyncio.run(story())


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    async def story():
        tmp_path.chmod(0o755)
        with pytest.raises(UsageError, match="must belong to this user alone"):
            monitors.RankMonitor(0, tmp_path, print, print).start()

    asyncio.run(story())


def test_bad_settings_raise_and_change_nothing():
    async def story():
        async with Rig() as rig:
            worker = rig.worker("client.init_workload_monitoring(); say('init'); sys.stdin.readline()")
            assert await worker.line() == "init"
            someone = {"pid": worker.pid, "pidfd": worker.pidfd, "cycle": 1, "rank": 3}
            with pytest.raises(ValueError, match="rank_heartbeat_timeout must be a number"):
                rig.monitor.watch(**someone, limits={"rank_heartbeat_timeout": -1})
            with pytest.raises(ValueError, match="over the limit of 65536"):
                rig.monitor.watch(**someone, limits={}, cfg={"long": "x" * 70000})
            await rig.settled()
            worker.tell("end")
            assert await worker.ended() == 0

    asyncio.run(story())


# --- strangers ------------------------------------------------------------------------------------


def ask(path: str, data: bytes) -> bytes:
    """What the monitor answers to `data`, b"" for nothing."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(path)
        try:
            sock.sendall(data)
            return sock.recv(65536)
        except OSError:
            return b""


REFUSED = [
    (b'{"v":2,"type":"init"}\n', "this side speaks version 1, the other 2: use the same nvrx_slurm"),
    (b'{"type":"init"}\n', "not a JSON object with a version"),
    (b"\x80\x04\x95 pickle\n", "not a JSON object on one line"),
    (b"[" * 60000 + b"\n", "not a JSON object on one line"),
    (b"1" * 60000 + b"\n", "not a JSON object"),
    (b"[]\n", "not a JSON object with a version"),
    (b'{"v":1}\n', "has no type"),
    (b'{"v":1,"type":"hang"}\n', "does not know the request 'hang'"),
    (b'{"v":1,"type":"quit"}\n', "does not know the request 'quit'"),
    (b"x" * 70000, "over the limit of 65536 bytes"),
]


def test_strangers_get_one_sentence_and_change_nothing():
    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                """
                client.init_workload_monitoring()
                say("init")
                client.send_heartbeat()
                threading.Event().wait()
                """,
                rank_heartbeat_timeout=3.0,
            )
            await worker.line()
            pid, path = rig.pid, rig.monitor.worker_env()[SOCKET]
            for data, sentence in REFUSED:
                reply = await asyncio.to_thread(ask, path, data)
                assert sentence in json.loads(reply)["error"], data[:30]
            assert (await rig.hang())["sentence"].startswith("no heartbeat for 3.0")
            await worker.ended()
            assert rig.pid == pid

    asyncio.run(story())


def test_ten_thousand_connections_and_slow_ones_delay_neither_init_nor_the_verdict():
    flood = """
import itertools, socket, sys
sockets = []
for n in itertools.count():  # until it is killed: nobody serves it any more when the rank has ended
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(sys.argv[1])
    try:
        sock.send(b"{" * (n % 3))
    except OSError:
        pass
    sockets = sockets[-200:] + [sock]
    if n == 10000:
        print("flooding", flush=True)
"""

    async def story():
        async with Rig() as rig:
            worker = rig.worker(
                "sys.stdin.readline(); client.init_workload_monitoring(); say('init'); threading.Event().wait()",
                initial_rank_heartbeat_timeout=1.0,
            )
            pid, path = rig.pid, rig.monitor.worker_env()[SOCKET]
            stranger = subprocess.Popen([sys.executable, "-c", flood, path], stdout=subprocess.PIPE, text=True)
            try:
                assert await asyncio.to_thread(stranger.stdout.readline) == "flooding\n"
                worker.tell("go")
                assert await worker.line() == "init"
                message = await rig.hang()
                assert message["at_s"] - message["deadline_s"] < 1.0
                await worker.ended()
                assert stranger.poll() is None, "it flooded to the end"
                assert rig.pid == pid
                assert int(status(pid)["VmHWM"].split()[0]) <= 16 * 1024
                assert len(os.listdir(f"/proc/{pid}/fd")) < 60
            finally:
                stranger.kill()
                stranger.communicate()

    asyncio.run(story())


def test_a_directory_that_cannot_be_made_anew_costs_the_monitor_only(caplog: pytest.LogCaptureFixture):
    async def story():
        async with Rig() as rig:
            home = rig.dir.with_suffix(".away")
            rig.dir.rename(home)
            rig.dir.write_text("")  # a file in its place
            rig.monitor.unwatch()
            assert SOCKET not in rig.monitor.worker_env()
            rig.monitor.watch(pid=os.getpid(), pidfd=0, cycle=1, rank=3, limits={})  # nothing to watch it with
            rig.monitor.unwatch()
            rig.dir.unlink()
            home.rename(rig.dir)
            assert SOCKET in rig.monitor.worker_env()

    asyncio.run(story())
    assert "goes on without its monitor" in caplog.text


def test_a_life_can_be_closed_twice(tmp_path: Path):
    """A second close must not close what has the numbers of its descriptors by then."""
    life = monitors._Life(tmp_path, 0, 0)
    taken = life.page_fd
    life.close()
    fd = os.dup2(0, taken)
    life.close()
    os.fstat(fd)
    os.close(fd)
