"""Starts a job of a launcher on this machine, hears its workers, and leaves no process behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nvrx_slurm.child.descendants import children

WORKER = str(Path(__file__).with_name("worker.py"))
EVENT_TIMEOUT_S = 60.0
_CLEAN_UP_S = 20.0
_PR_SET_CHILD_SUBREAPER = 36
# An installed package has its bytecode, as torch has here; without the last entry each start compiles ours again.
_FOREIGN = ("SLURM_", "NVRX_", "PET_", "FT_", "TORCHELASTIC_", "GRPC_", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True)
class Event:
    """What a worker told; `at_s` is CLOCK_MONOTONIC."""

    what: str
    rank: int
    pid: int
    at_s: float


@dataclass(frozen=True)
class Launcher:
    """How to start one node of a job: `program` and its flags; torchrun's spellings work for all of them.

    Without a program it is the floor: the workers started as plain Python processes by the harness itself.
    """

    name: str
    program: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    client: str = "ours"  # whose RankMonitorClient its workers use

    def command(self, nnodes, node_rank, nproc, endpoint, flags):
        """Command line of one node, without the script; `nnodes` as torchrun writes it, "1": no other node."""
        meet = []
        if nnodes != "1":
            meet = [f"--nnodes={nnodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=bench"]
            meet.append(f"--node-rank={node_rank}")
        return [*self.program, f"--nproc-per-node={nproc}", *meet, *self.flags, *flags]


class Failure(Exception):
    """A figure could not be measured; one sentence."""


def free_port():
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def become_subreaper():
    """Orphans of killed launchers become our children, so that every process of every job can be reaped."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Job:
    """One run of one launcher, as a context manager; at its end every process that it left is killed and reaped.

    `life_s`: after that a worker ends by itself. `worker`: the script.
    """

    def __init__(self, launcher, life_s=120.0, worker=WORKER):
        self._launcher = launcher
        self._worker = worker
        self.scratch = Path(tempfile.mkdtemp(prefix="nb-"))  # short: it holds Unix sockets
        fifo = self.scratch / "fifo"
        os.mkfifo(fifo)
        self._fifo = os.open(fifo, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._received = b""
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
        self.env |= {"BENCH_FIFO": str(fifo), "BENCH_CLIENT": launcher.client, "BENCH_LIFE_S": str(life_s)}
        self.env["TMPDIR"] = str(self.scratch)
        self.events = []
        self.nodes = []
        self.started_s = 0.0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        kill_all_children()
        for node in self.nodes:
            node.wait()
        os.close(self._fifo)
        shutil.rmtree(self.scratch, ignore_errors=True)

    def said(self, node):
        """The output of a node so far."""
        return (self.scratch / f"node_{node}.log").read_text(errors="replace")

    def start(self, nnodes, nproc, mode, flags=(), network=None, command=()):
        """Start all nodes (as many as the upper end of `nnodes`) at once; the clock starts before the first.

        `mode`: the worker's, with its argument behind a blank. `network`: node N runs on its host N.
        `command`: instead of the script and its mode.
        """
        if not self._launcher.program:
            self._start_bare(nproc, mode)
            return
        endpoint = f"127.0.0.1:{free_port()}" if network is None else f"{network.address(0)}:29400"
        script = command or [self._worker, *mode.split()]
        count = int(nnodes.partition(":")[2] or nnodes)
        commands = [[*self._launcher.command(nnodes, rank, nproc, endpoint, flags), *script] for rank in range(count)]
        if network is not None:
            commands = [[*network.inside(rank), *command] for rank, command in enumerate(commands)]
        self.started_s = time.monotonic()
        for rank, command in enumerate(commands):
            self.nodes.append(self._spawn(command, self.scratch / f"node_{rank}.log", {}))

    def _start_bare(self, nproc, mode):
        self.started_s = time.monotonic()
        for rank in range(nproc):
            command = [sys.executable, WORKER, *mode.split()]
            self.nodes.append(self._spawn(command, self.scratch / f"{rank}.log", {"RANK": str(rank)}))

    def _spawn(self, command, log, more):
        with log.open("wb") as out:
            return subprocess.Popen(
                command,
                env=self.env | more,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                cwd=self.scratch,
            )

    def wait(self, count, what, after_s=0.0):
        """The first `what` after `after_s` of each of `count` ranks. Raises Failure after a minute.

        Cycles are told apart by time: torchrun's restart count does not grow on the nodes where nothing failed.
        """
        until_s = time.monotonic() + EVENT_TIMEOUT_S
        while True:
            found = {e.rank: e for e in reversed(self.events) if e.what == what and e.at_s > after_s}
            if len(found) >= count:
                return list(found.values())
            self._receive(until_s, f"{what!r} of {count} ranks")

    def hear(self):
        """Take what was told so far into `events`."""
        while select.select([self._fifo], [], [], 0.0)[0]:
            self._take()

    def _receive(self, until_s, what):
        ready, _, _ = select.select([self._fifo], [], [], max(0.0, until_s - time.monotonic()))
        if not ready:
            logs = "\n".join(p.read_text(errors="replace")[-2000:] for p in sorted(self.scratch.glob("*.log")))
            raise Failure(f"{self._launcher.name}: no {what} within {EVENT_TIMEOUT_S:g} s\n{logs}")
        self._take()

    def _take(self):
        *lines, self._received = (self._received + os.read(self._fifo, 65536)).split(b"\n")
        for line in lines:
            name, rank, pid, at_s = line.decode().split()
            self.events.append(Event(name, int(rank), int(pid), float(at_s)))


def kill_all_children():
    """SIGKILL and reap all our descendants; those of dead parents come to us as the subreaper, round by round."""
    until_s = time.monotonic() + _CLEAN_UP_S
    while (mine := children(os.getpid())) and time.monotonic() < until_s:
        for pid in mine:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in mine:
            _reap(pid, until_s)
    if mine:
        raise Failure(f"processes {mine} do not end after SIGKILL")


def _reap(pid, until_s):
    """Wait for a killed child. Popen objects of ours find out by themselves (ECHILD counts as ended)."""
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            select.select([pidfd], [], [], max(0.0, until_s - time.monotonic()))
            os.waitpid(pid, os.WNOHANG)
        finally:
            os.close(pidfd)


def wait_dead(pid, timeout_s):
    """Monotonic time at which process `pid` was dead. Raises Failure after `timeout_s`."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        raise Failure(f"process {pid} was dead before it could be looked at") from None
    try:
        ready, _, _ = select.select([pidfd], [], [], timeout_s)
        at_s = time.monotonic()
    finally:
        os.close(pidfd)
    if not ready:
        raise Failure(f"process {pid} lived on for {timeout_s:g} s")
    return at_s
