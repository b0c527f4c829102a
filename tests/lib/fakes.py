"""HTTP services that do as told, and the attribution process: for this directory's tests.

Replies are bytes, or functions that do to the connection what no good service does. Every wait is bounded by WAIT_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import NamedTuple

from log_harness import REPO, Program
from waits import WAIT_S

from nvrx_slurm.attribution.records import CycleNews


class Asked(NamedTuple):
    """One request that came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)


def reply(status, value, kind="application/json", **headers):
    """A whole HTTP reply; `value`: bytes, or what becomes JSON."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {text}" for name, text in headers.items()]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


Answer = bytes | Callable[["Fake", socket.socket], None]


def hangs(fake, connection):
    """Accepts and never answers."""
    fake.closed.wait(WAIT_S)


def drips(fake, connection):
    """One byte of an endless reply every 0.1 s."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not fake.closed.wait(0.1):
        connection.sendall(b" ")


def floods(fake, connection):
    """100 MB; the client is expected to hang up before their end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000000\r\n\r\n")
    for _ in range(100):
        connection.sendall(b"x" * 1_000_000)
    fake.swallowed.set()


def breaks(fake, connection):
    """Closes in the middle of the body."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


class Fake:
    """A service on loopback. `answer(asked)` says what to do; by default the answers of `script`, the last for ever."""

    def __init__(self, *script):
        self.script = list(script)
        self.asked = []
        self.closed, self.swallowed = threading.Event(), threading.Event()
        self._news = threading.Condition()
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), partial(_Handler, self))
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,)).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def prove_itself(self, context):
        """Speak TLS from now on."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def answer(self, asked):
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    def on_request(self, asked):
        with self._news:
            answer = self.answer(asked)
            self.asked.append(asked)
            self._news.notify_all()
        return answer

    def wait_for(self, count):
        with self._news:
            assert self._news.wait_for(lambda: len(self.asked) >= count, WAIT_S), self.asked
        return self.asked

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    timeout = WAIT_S

    def __init__(self, fake, *arguments):
        self._fake = fake
        with contextlib.suppress(OSError):  # the client has hung up
            super().__init__(*arguments)

    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        headers = {name.lower(): text for name, text in self.headers.items()}
        answer = self._fake.on_request(Asked(self.command, self.path, headers, body))
        self.connection.sendall(answer) if isinstance(answer, bytes) else answer(self._fake, self.connection)

    do_POST = do_GET

    def log_message(self, form, *values):
        """Requests are not logged."""


class Process(Program):
    """A real attribution process."""

    def __init__(self, settings):
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO)}
        super().__init__("attribution.__main__", asdict(settings), env=env, cwd="/")

    def news(self, cycle, log, fault=None, over=True, lasted_s=0.0):
        self.tell(**asdict(CycleNews(cycle, log, over, lasted_s, fault or {})))

    def end(self):
        self.tell(finish=3.0)
        return self.process.wait(WAIT_S)


@contextlib.contextmanager
def running(settings):
    process = Process(settings)
    try:
        yield process
    finally:
        process.close()
