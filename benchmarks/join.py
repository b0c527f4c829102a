"""1,000 and 10,000 agents join one coordinator over TLS and stay; strangers bother that of a small job."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks import procfs
from benchmarks.figures import Figure, repeated
from benchmarks.harness import Failure, kill_all_children

_AGENTS, _MANY = 1000, 10_000
_CLIENT_PROCESSES = 4
_TIMEOUT_S = 140.0
_WINDOW_S = 10.0  # two keepalive intervals
_ROOT = Path(__file__).resolve().parent.parent


class _Program:
    """A process of `benchmarks.join_programs` that talks in lines."""

    def __init__(self, *words):
        command = [sys.executable, "-m", "benchmarks.join_programs", *words]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
        self._received = b""
        self.pid = self._popen.pid

    def hear(self):
        """Its next line. Raises Failure when it ends, or says nothing for long."""
        fd, until_s = self._popen.stdout.fileno(), time.monotonic() + _TIMEOUT_S
        while b"\n" not in self._received:
            ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(fd, 4096) if ready else b""
            if not data:
                raise Failure(f"{' '.join(map(str, self._popen.args))} said nothing more")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def has_news(self):
        """Whether it has said something that was not heard."""
        return bool(self._received or select.select([self._popen.stdout], [], [], 0)[0])

    def stop(self):
        """It takes no step any more."""
        self._popen.send_signal(signal.SIGSTOP)

    def go(self, word="go"):
        """Let it begin."""
        self._popen.stdin.write(word.encode() + b"\n")
        self._popen.stdin.flush()


class _Joined(NamedTuple):
    """A coordinator whose agents have joined, and what that took."""

    server: _Program
    port: str
    clients: list[_Program]
    took_s: float
    cpu_s: float
    memory_mb: float


def _join(agents):
    port = (server := _Program("server", str(agents), "1")).hear()
    share = agents // _CLIENT_PROCESSES
    clients = [_Program("clients", port, str(i * share), str(share)) for i in range(_CLIENT_PROCESSES)]
    for client in clients:
        client.hear()
    cpu_s, memory_mb = procfs.cpu_s(server.pid), procfs.pss_mb({server.pid})
    began_s = time.monotonic()
    for client in clients:
        client.go()
    took_s = max(float(client.hear()) for client in clients) - began_s
    used_s, grown_mb = procfs.cpu_s(server.pid) - cpu_s, procfs.pss_mb({server.pid}) - memory_mb
    return _Joined(server, port, clients, took_s, used_s, grown_mb)


def _take_over(agents):
    """Seconds until all agents of a job that runs have registered with the next coordinator, and have its plan."""
    joined = _join(agents)
    joined.server.stop()
    clients = joined.clients
    for client in clients:
        client.go("leave")
    for client in clients:
        client.hear()
    port = _Program("server", str(agents), "2").hear()
    began_s = time.monotonic()
    for client in clients:
        client.go(port)
    return max(float(client.hear()) for client in clients) - began_s


def _share(server, seconds):
    """Percent of a core that the coordinator uses."""
    before_s = procfs.cpu_s(server.pid)
    time.sleep(seconds)
    return (procfs.cpu_s(server.pid) - before_s) / seconds * 100


def _strangers():
    """(percent of a core, MB) that strangers cost the coordinator of 4 agents. Raises Failure if these notice."""
    joined = _join(_CLIENT_PROCESSES)
    before_mb = procfs.pss_mb({joined.server.pid})
    strangers = _Program("strangers", joined.port)
    strangers.hear()
    strangers.go()
    samples = [(_share(joined.server, 1.0), procfs.pss_mb({joined.server.pid})) for _ in range(int(_WINDOW_S))]
    if any(client.has_news() for client in joined.clients):
        raise Failure("an agent lost its coordinator while strangers bothered it")
    return fmean(percent for percent, _ in samples), max(mb for _, mb in samples) - before_mb


def _figure(name, what, unit, target, sample):
    def once():
        try:
            return sample()
        finally:
            kill_all_children()

    return Figure(name, what, unit, target, repeated(once))


FIGURES = [
    _figure("join-1000", "1,000 agents join one coordinator over TLS", "s", 1.0, lambda: _join(_AGENTS).took_s),
    _figure("join-1000-cpu", "its processor time per agent", "ms", 1.0, lambda: _join(_AGENTS).cpu_s * 1000 / _AGENTS),
    _figure("join-1000-memory", "its memory per agent", "KB", 100.0, lambda: _join(_AGENTS).memory_mb * 1000 / _AGENTS),
    _figure("takeover-1000", "another coordinator takes over from it", "s", 1.5, lambda: _take_over(_AGENTS)),
    _figure(
        "idle-1000", "coordinator of 1,000 idle agents", "%", 2.0, lambda: _share(_join(_AGENTS).server, _WINDOW_S)
    ),
    _figure("join-10k", "10,000 agents join one coordinator", "s", 10.0, lambda: _join(_MANY).took_s),
    _figure("join-10k-cpu", "its processor time per agent", "ms", 0.9, lambda: _join(_MANY).cpu_s * 1000 / _MANY),
    _figure("join-10k-memory", "its memory per agent", "KB", 25.0, lambda: _join(_MANY).memory_mb * 1000 / _MANY),
    _figure("takeover-10k", "another coordinator takes over from it", "s", 10.0, lambda: _take_over(_MANY)),
    _figure("idle-10k", "coordinator of 10,000 idle agents", "%", 10.0, lambda: _share(_join(_MANY).server, _WINDOW_S)),
    _figure("strangers-cpu", "coordinator with 2,350 strangers", "%", 5.0, lambda: _strangers()[0]),
    _figure("strangers-memory", "what they cost it", "MB", 20.0, lambda: _strangers()[1]),
]
