"""A small HTTP server for JSON, on loopback and on a Unix socket, for processes of the same user."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

_MAX_HEAD_BYTES, _MAX_BODY_BYTES = 16 << 10, 64 << 10
_REQUEST_S = 10.0
_MOST_AT_ONCE = 32
_TCP = Path("/proc/self/net/tcp")
_LIVE = ("01", "04", "05")  # ESTABLISHED, FIN_WAIT1 and 2: the socket still has its owner


class Request(NamedTuple):
    """A request that came in whole."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes


class Refused(Exception):
    """The reply is an error: (status, error_code, message)."""


Handler = Callable[[Request], Awaitable[Any]]  # gives a JSON value; raises Refused


class Server:
    """Answers one request per connection, each within _REQUEST_S seconds."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._servers: list[asyncio.AbstractServer] = []
        self._open = 0

    async def listen_on_loopback(self, port: int) -> None:
        """Raises OSError where another program has the port."""
        self._servers.append(await asyncio.start_server(self._serve, "127.0.0.1", port, limit=_MAX_HEAD_BYTES))

    async def listen_on_socket(self, path: str) -> None:
        """Only this user may connect. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # of a process before this one, in a directory of our own
        before = os.umask(0o177)
        try:
            self._servers.append(await asyncio.start_unix_server(self._serve, path, limit=_MAX_HEAD_BYTES))
        finally:
            os.umask(before)

    def close(self) -> None:
        """Take no more connections."""
        for server in self._servers:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= _MOST_AT_ONCE:
                writer.write(await asyncio.wait_for(self._reply(reader, writer), _REQUEST_S))
                await asyncio.wait_for(writer.drain(), _REQUEST_S)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            pass  # it is slow, or gone
        finally:
            self._open -= 1
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        status = 200
        try:
            if not _is_own(writer):
                raise Refused(403, "not_allowed", "this service is for the user whose job runs it")
            value = await self._handler(await _request(reader))
        except Refused as refused:
            status, code, message = refused.args
            value = {"error_code": code, "message": message, "details": {}}
        except ValueError:  # a target that is no URL, a path that cannot be encoded
            status, value = 400, {"error_code": "invalid_parameter", "message": "this is no request", "details": {}}
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


async def _request(reader: asyncio.StreamReader) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, _, rest = first.partition(" ")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isdecimal() or int(length) > _MAX_BODY_BYTES:
        raise Refused(413, "invalid_parameter", f"a body needs a Content-Length of at most {_MAX_BODY_BYTES}")
    url = urlsplit(rest.partition(" ")[0])
    return Request(method, url.path, dict(parse_qsl(url.query)), await reader.readexactly(int(length)))


def _is_own(writer: asyncio.StreamWriter) -> bool:
    """Whether the other end belongs to this user. A Unix socket is open to its owner only."""
    if writer.get_extra_info("socket").family != socket.AF_INET:
        return True
    ours, theirs = (_as_in_proc(writer.get_extra_info(name)) for name in ("sockname", "peername"))
    for line in _TCP.read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == theirs and fields[2] == ours and fields[3] in _LIVE:
            return int(fields[7]) == os.geteuid()
    return False


def _as_in_proc(address: tuple[str, int]) -> str:
    """127.0.0.1, 50050 -> 0100007F:C382 (proc(5), on machines of either byte order)."""
    host = struct.unpack("=I", socket.inet_aton(address[0]))[0]
    return f"{host:08X}:{address[1]:04X}"
