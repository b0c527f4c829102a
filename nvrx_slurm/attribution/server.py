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
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from nvrx_slurm.attribution.web import Trouble, json_object

_MAX_BODY_BYTES = 64 << 10
_POLL_S = 1e6  # how often it looks whether it was told to end; it is not
_NO_REQUEST = 422, "invalid_parameter", f"a body must be a JSON object of at most {_MAX_BODY_BYTES} bytes"
_TCP = Path("/proc/self/net/tcp")


class Refused(Exception):
    """The reply is an error: (status, error_code, message)."""


Answer = Callable[[str, dict[str, Any]], Any]  # ("GET /path", query or JSON object) -> JSON value; raises Refused


class Server(socketserver.ThreadingTCPServer):
    """Answers until this process ends. `where`: a port of 127.0.0.1, or a Unix socket's path in a private directory.

    A thread for each connection; the limit of open files is their bound. Raises OSError where it cannot listen.
    """

    daemon_threads = allow_reuse_address = True

    def __init__(self, where: int | str, answer: Answer) -> None:
        self.answer = answer
        if isinstance(where, str):
            self.address_family = socket.AF_UNIX
            with contextlib.suppress(FileNotFoundError):
                os.unlink(where)  # of a process before this one
        super().__init__(("127.0.0.1", where) if isinstance(where, int) else where, _Handler)  # type: ignore[arg-type]
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the other end belongs to this user. A private directory is open to its owner only."""
        if self.address_family == socket.AF_UNIX:
            return True
        ends = [_as_in_proc(client_address), _as_in_proc(request.getsockname())]
        try:
            lines = [line.split() for line in _TCP.read_text().splitlines()[1:]]
        except OSError:  # no descriptor is left
            return False
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
        status, asked = 200, dict[str, Any](parse_qsl(url.query))
        try:
            if self.command == "POST":
                asked = json_object(self.rfile.read(min(abs(int(length)), _MAX_BODY_BYTES)))
            value = self.server.answer(f"{self.command} {url.path}", asked)
        except (Refused, Trouble, ValueError) as error:
            status, code, message = error.args if isinstance(error, Refused) else _NO_REQUEST
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
