"""A real rank monitor with ranks in processes of their own or in this one, and waits for events."""

import asyncio
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
from waits import WAIT_S, until

from nvrx_slurm.fault_tolerance import RankMonitorClient
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.node.monitors.monitors import RankMonitor, WatchRules

ROOT = str(Path(__file__).resolve().parents[2])

CLIENT = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {ROOT!r})
from nvrx_slurm.fault_tolerance import RankMonitorClient, RankMonitorClientError
client = RankMonitorClient()
def say(*words):
    print(*words, flush=True)
"""

HANG = "\nthreading.Event().wait()\n"
SOCKET = "FT_RANK_MONITOR_IPC_SOCKET"


async def readable(fd, timeout_s=WAIT_S):
    """Wait until `fd` is readable; a pidfd is when its process has ended."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(fd, lambda: ready.done() or ready.set_result(None))
    try:
        await asyncio.wait_for(ready, timeout_s)
    finally:
        loop.remove_reader(fd)


def status(pid):
    text = Path(f"/proc/{pid}/status").read_text()
    return dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)


def stop(pid):
    os.kill(pid, signal.SIGSTOP)
    until(lambda: status(pid)["State"].startswith("T"), "it is stopped")


def ask(path, data, fds=()):
    """The monitor's answer to `data`, which comes with more descriptors; empty if there is none."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        ours.settimeout(WAIT_S)
        with theirs:
            sock.connect(path)
            socket.send_fds(sock, [data], [theirs.fileno(), *fds])
        return ours.recv(65536)


class Worker:
    """A worker as the agent starts it: a session leader with its stderr in a file."""

    def __init__(self, code, env, err):
        with err.open("ab") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", CLIENT + textwrap.dedent(code)], env={**os.environ, "RANK": "3", **env},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True,
            )  # fmt: skip
        self.pid = self.process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.err = err

    async def line(self):
        """The next line of its stdout, "" at the end."""
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), WAIT_S)
        return line.decode().strip()

    async def up(self):
        """It has said so; returns itself."""
        assert await self.line() == "up"
        return self

    async def ended(self):
        """Wait for its end and reap it; its exit code as subprocess gives it."""
        await readable(self.pidfd)
        return self.process.wait()

    def close(self):
        try:
            os.killpg(self.pid, signal.SIGKILL)  # not reaped yet or group alive: the number is ours
        except ProcessLookupError:
            pass
        self.process.wait()
        os.close(self.pidfd)
        self.process.stdin.close()
        self.process.stdout.close()


class Rig:
    """`async with Rig() as rig`: a started RankMonitor; as a test's parameter `rig` it is started.

    `rig.worker(code)` runs code in a rank of its own; `rig.rank()` and, with init, `rig.ready()` make this process the
    rank, and the monitor ends a sleeping process in its place.
    """

    def __init__(self):
        self.dir = Path(tempfile.mkdtemp(prefix="nvrx-rmtest-"))
        self.hangs = []
        self._hang = asyncio.Event()
        self.asked = asyncio.Queue()
        self.lease = Lease()
        self.monitor = RankMonitor(0, self.dir, self._on_hang, self._on_asked, self.lease)
        self._workers = []
        self._sleepers = []
        self._clients = []
        self._patch = pytest.MonkeyPatch()

    async def __aenter__(self):
        self.monitor.start()
        self.monitor.spawn()
        return self

    async def __aexit__(self, *exc):
        self._shut_down()
        await self.monitor.close()
        self._patch.undo()
        for worker in self._workers:
            worker.close()
        for sleeper in self._sleepers:
            sleeper.kill()
            sleeper.wait()
        self.lease.close()
        shutil.rmtree(self.dir)

    def _on_hang(self, local_rank, message):
        assert local_rank == 0
        self.hangs.append(message)
        self._hang.set()

    def _on_asked(self, local_rank, action, description):
        assert local_rank == 0
        self.asked.put_nowait((action, description))

    async def look(self):
        """What the monitor sees of the rank."""
        seen = await asyncio.wait_for(self.monitor.inspect(5.0), WAIT_S)
        assert seen is not None
        return seen

    def worker(self, code, *, cycle=0, signum=signal.SIGKILL, **limits):
        worker = Worker(code, self.monitor.worker_env(), self.dir / f"{cycle}.err")
        self._workers.append(worker)
        self._watch(worker.pid, worker.pidfd, cycle, signum, limits)
        return worker

    def rank(self, *, cycle=0, **limits):
        """A client of this process, not initialised yet."""
        self._patch.setenv("RANK", "3")
        self._patch.delenv("LOCAL_RANK", raising=False)
        self._patch.setenv(SOCKET, self.monitor.worker_env()[SOCKET])
        sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        self._sleepers.append(sleeper)
        pidfd = os.pidfd_open(sleeper.pid)
        self._watch(sleeper.pid, pidfd, cycle, signal.SIGKILL, limits)
        os.close(pidfd)
        self._clients.append(RankMonitorClient())
        return self._clients[-1]

    def ready(self, **limits):
        client = self.rank(**limits)
        client.init_workload_monitoring()
        return client

    def unwatch(self):
        """The end of a cycle: of its clients and of the monitor's watch."""
        self._shut_down()
        self.monitor.unwatch()

    def _shut_down(self):
        for client in self._clients:
            client.shutdown_workload_monitoring()

    def _watch(self, pid, pidfd, cycle, signum, limits):
        rules = WatchRules(limits, signum, {"safety_factor": 5.0}, limits.pop("hold_s", 0.0))
        self.monitor.watch(pid=pid, pidfd=pidfd, cycle=cycle, rank=3, rules=rules)

    async def hang(self):
        await asyncio.wait_for(self._hang.wait(), WAIT_S)
        self._hang.clear()
        return self.hangs[-1]

    async def no_hang(self, seconds):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(self.hang(), seconds)

    async def sentence(self):
        """Of the next hang."""
        return str((await self.hang())["sentence"])

    @property
    def path(self):
        return self.monitor.worker_env()[SOCKET]

    @property
    def pid(self):
        pid = self.monitor.pid
        assert pid is not None
        return pid

    async def settled(self):
        """The monitor has handled its watch and sleeps."""
        assert b"does not know" in await asyncio.to_thread(ask, self.path, b'{"v":1,"type":"are you there"}\n')
        until(lambda: status(self.pid)["State"].startswith("S"), "the monitor sleeps")

    @property
    def has_request(self):
        """Whether one waits in the rank's socket."""
        life = self.monitor._life
        return life is not None and bool(select.select([life.listener], [], [], 0)[0])

    async def stopped_while(self, deed):
        """Result of `deed`, a request to the monitor, which is stopped before and killed while the rank waits."""
        self.stop()
        done = asyncio.get_running_loop().run_in_executor(None, deed)
        until(lambda: self.has_request, "a request waits")
        os.kill(self.pid, signal.SIGKILL)
        return await done

    def stop(self):
        stop(self.pid)


async def kill_monitor(rig):
    """SIGKILL the monitor and wait until another one has taken over."""
    old = rig.pid
    pidfd = os.pidfd_open(old)
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    await readable(pidfd)
    os.close(pidfd)
    deadline_s = time.monotonic() + WAIT_S
    while rig.monitor.pid in (None, old):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0)  # let the loop see its exit
    await rig.settled()
    assert rig.pid != old
