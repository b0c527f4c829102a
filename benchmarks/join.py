"""1,000 agents join one coordinator over real gRPC on loopback until all have the plan."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figures import Figure, Launchers, Samples
from benchmarks.harness import Failure, kill_all_children

_AGENTS = 1000
_CLIENT_PROCESSES = 4
_TIMEOUT_S = 60.0
_ROOT = Path(__file__).resolve().parent.parent


class _Program:
    """A process of `benchmarks.join_programs` that talks in lines."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "benchmarks.join_programs", *words]
        self._popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_ROOT)
        self._received = b""

    def hear(self) -> str:
        """Its next line. Raises Failure when it ends, or says nothing for a minute."""
        assert self._popen.stdout is not None
        fd, until_s = self._popen.stdout.fileno(), time.monotonic() + _TIMEOUT_S
        while b"\n" not in self._received:
            ready, _, _ = select.select([fd], [], [], max(0.0, until_s - time.monotonic()))
            data = os.read(fd, 4096) if ready else b""
            if not data:
                raise Failure(f"{' '.join(map(str, self._popen.args))} said nothing more")  # type: ignore[arg-type]
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def go(self) -> None:
        """Let it begin."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(b"go\n")
        self._popen.stdin.flush()


def _join_s() -> float:
    try:
        port = (server := _Program("server", str(_AGENTS))).hear()
        share = _AGENTS // _CLIENT_PROCESSES
        clients = [_Program("clients", port, str(i * share), str(share)) for i in range(_CLIENT_PROCESSES)]
        for client in clients:
            client.hear()
        began_s = time.monotonic()
        for client in clients:
            client.go()
        took_s = max(float(client.hear()) for client in clients) - began_s
        del server
        return took_s
    finally:
        kill_all_children()


def _measure(_: Launchers, repeats: int) -> Samples:
    return {"nvrx-run": [_join_s() for _ in range(repeats + 1)][1:]}


FIGURES = [Figure("join-1000", "1,000 agents join one coordinator over gRPC", "s", 1.5, False, _measure)]
