"""HTTP services that do as told, and the attribution process: for this directory's tests.

Replies are bytes, or functions that do to the connection what no good service does. Every wait is bounded by WAIT_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from nvrx_slurm.attribution.records import AttributionSpec, CycleNews

WAIT_S = 30.0
REPO = Path(__file__).resolve().parents[2]


class Asked(NamedTuple):
    """One request that came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def reply(status: int, value: Any, kind: str = "application/json", **headers: str) -> bytes:
    """A whole HTTP reply; `value`: bytes, or what becomes JSON."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


Answer = bytes | Callable[["Fake", socket.socket], None]


def hangs(fake: Fake, connection: socket.socket) -> None:
    """Accepts and never answers."""
    fake.closed.wait(WAIT_S)


def drips(fake: Fake, connection: socket.socket) -> None:
    """One byte of an endless reply every 0.1 s."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not fake.closed.wait(0.1):
        connection.sendall(b" ")


def floods(fake: Fake, connection: socket.socket) -> None:
    """100 MB; the client is expected to hang up before their end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"x" * 1_000_000)
    fake.swallowed.set()


def breaks(fake: Fake, connection: socket.socket) -> None:
    """Closes in the middle of the body."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


class Fake:
    """A service on loopback. `answer(asked)` says what to do; by default the answers of `script`, the last for ever."""

    def __init__(self, *script: Answer) -> None:
        self.script = list(script)
        self.asked: list[Asked] = []
        self.closed, self.swallowed = threading.Event(), threading.Event()
        self.wrap: Callable[..., socket.socket] | None = None  # for TLS
        self._news = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, asked: Asked) -> Answer:
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def wait_for(self, count: int) -> list[Asked]:
        """Until so many requests have come."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.asked) >= count, WAIT_S), self.asked
        return self.asked

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, raw: socket.socket) -> None:
        raw.settimeout(WAIT_S)
        with raw, contextlib.suppress(OSError), self.wrap(raw, server_side=True) if self.wrap else raw as connection:
            data = b""
            while b"\r\n\r\n" not in data:
                if not (more := connection.recv(65536)):
                    return
                data += more
            head, _, body = data.partition(b"\r\n\r\n")
            first, *lines = head.decode().split("\r\n")
            headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
            while len(body) < int(headers.get("content-length", "0")):
                body += connection.recv(65536)
            asked = Asked(*first.split()[:2], headers, body)
            with self._news:
                answer = self.answer(asked)
                self.asked.append(asked)
                self._news.notify_all()
            connection.sendall(answer) if isinstance(answer, bytes) else answer(self, connection)

    def close(self) -> None:
        self.closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_S)

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Process:
    """A real attribution process; its lines are read one by one."""

    def __init__(self, settings: AttributionSpec, **env: str) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "nvrx_slurm.attribution", str(theirs.fileno())]
        kept = {name: os.environ[name] for name in ("PATH",)} | {"PYTHONPATH": str(REPO)} | env
        with theirs:
            self.popen = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=kept, cwd="/")
        self.lines: list[dict[str, Any]] = []
        self._write(asdict(settings))

    def _write(self, packet: dict[str, Any]) -> None:
        self._socket.send(json.dumps(packet).encode())

    def tell(
        self, cycle: int, log: str, fault: dict[str, Any] | None = None, over: bool = True, lasted_s: float = 0.0
    ) -> None:
        self._write(asdict(CycleNews(cycle, log, over, lasted_s, fault or {})))

    def line(self, key: str, timeout_s: float = WAIT_S) -> dict[str, Any]:
        """The next line with `key`; waits for it."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(0.01, deadline_s - time.monotonic()))
            more = self._socket.recv(1 << 17)
            assert more, f"the process ended: {self.lines}"
            self.lines.append(json.loads(more))
            if key in self.lines[-1]:
                return self.lines[-1]

    def end(self) -> int:
        """The job has ended; returns its exit code."""
        self._write({"finish": 3.0})
        return self.popen.wait(WAIT_S)

    def close(self) -> None:
        with self.popen, self._socket:
            self.popen.kill()


@contextlib.contextmanager
def running(settings: AttributionSpec, **env: str) -> Iterator[Process]:
    """A process, killed at the end if it has not ended."""
    process = Process(settings, **env)
    try:
        yield process
    finally:
        process.close()
