"""A small HTTP server for JSON, on loopback or on a Unix socket, for processes of the same user."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

_MAX_BODY_BYTES = 64 << 10
_POLL_S = 1e6  # how often it looks whether it was told to end; it is not
_TCP = Path("/proc/self/net/tcp")


class Refused(Exception):
    """The reply is an error: (status, error_code, message)."""


Answer = Callable[[str, dict[str, str], bytes], Any]  # ("GET /path", query, body) -> JSON value; raises Refused


class Server(ThreadingHTTPServer):
    """Answers until this process ends. `where`: a port of 127.0.0.1, or the path of a Unix socket for this user.

    A thread for each connection; the limit of open files is their bound. Raises OSError where it cannot listen.
    """

    def __init__(self, where: int | str, answer: Answer) -> None:
        self.answer = answer
        self.address_family = socket.AF_INET if isinstance(where, int) else socket.AF_UNIX
        super().__init__(("127.0.0.1", where) if isinstance(where, int) else where, _Handler)  # type: ignore[arg-type]
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True).start()

    def server_bind(self) -> None:
        """Without the name server that HTTPServer asks."""
        if self.address_family == socket.AF_UNIX:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(str(self.server_address))  # of a process before this one, in a directory of our own
        before = os.umask(0o177)
        try:
            socketserver.TCPServer.server_bind(self)
        finally:
            os.umask(before)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the other end belongs to this user. A Unix socket is open to its owner only."""
        if self.address_family == socket.AF_UNIX:
            return True
        ends = [_as_in_proc(client_address), _as_in_proc(request.getsockname())]
        lines = (line.split() for line in _TCP.read_text().splitlines()[1:])
        return any(line[1:3] == ends and int(line[7]) == os.geteuid() for line in lines)


def _as_in_proc(address: tuple[str, int]) -> str:
    """127.0.0.1, 50050 -> 0100007F:C382 (proc(5), on machines of either byte order)."""
    host = struct.unpack("=I", socket.inet_aton(address[0]))[0]
    return f"{host:08X}:{address[1]:04X}"


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # for each part of a request
    server: Server

    def do_GET(self) -> None:
        url, length = urlsplit(self.path), self.headers.get("Content-Length", "0")
        try:
            if not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
                raise Refused(413, "invalid_parameter", f"a body has at most {_MAX_BODY_BYTES} bytes")
            body, status = self.rfile.read(int(length)), 200
            value = self.server.answer(f"{self.command} {url.path}", dict(parse_qsl(url.query)), body)
        except Refused as refused:
            status, code, message = refused.args
            value = {"error_code": code, "message": message, "details": {}}
        reply = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_POST = do_GET

    def log_message(self, form: str, *values: object) -> None:
        """Requests are not logged."""
