"""Frames between a shipper and an aggregator, on `control.stream`. A bad one raises ProtocolError.

Shipper: HELLO, OPEN (its sources), then CHUNKs. Aggregator: HAVE says up to which offset the file has each source. It
answers OPEN, and acknowledges CHUNKs that are in the file. An aggregator that cannot write a file ends the streams that
bring lines for it, and does not answer OPEN for it: the shipper asks again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any, NamedTuple

from nvrx_slurm.codec import from_plain
from nvrx_slurm.core.bounded_json import parsed
from nvrx_slurm.errors import ProtocolError

VERSION = 3
HELLO, OPEN, CHUNK, HAVE = range(4)
IDENTITY = "{} logs"  # names the job in certificates: those of agents do not fit here
MAX_SOURCES = 16_384  # of one shipper
LAST_RETRY_S = 5.0  # a shipper tries at least that often
_CHUNK = struct.Struct("!BIQQQ")
_KEEP_ALIVE = {
    socket.TCP_KEEPIDLE: 15,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 20_000,
}


class Chunk(NamedTuple):
    """Lines of one source: its bytes `begin` to `to`, as `text`. `at`: Unix milliseconds."""

    source: int
    begin: int
    to: int
    at: int
    text: bytes


class Opened(NamedTuple):
    """One source that a shipper wants to send. `cycle` -1: a launcher's output."""

    source: int  # its number on this stream
    cycle: int
    file: str  # below the log directory
    rank: int


def message(kind: int, content: Any = None) -> bytes:
    """A frame with plain data."""
    return bytes([kind]) + json.dumps(content, separators=(",", ":")).encode()


def content(frame: bytes) -> Any:
    """The plain data of a frame."""
    try:
        return parsed(frame[1:])
    except ValueError:
        raise ProtocolError("it sent a frame that is no message") from None


def opened(frame: bytes) -> list[Opened]:
    """The sources of an OPEN frame."""
    found: list[Opened] = from_plain(content(frame), list[Opened])
    return found[:MAX_SOURCES]


def from_chunk(chunk: Chunk) -> bytes:
    """The frame of a chunk."""
    return _CHUNK.pack(CHUNK, *chunk[:4]) + chunk.text


def to_chunk(frame: bytes) -> Chunk:
    """The chunk in a frame."""
    if len(frame) < _CHUNK.size:
        raise ProtocolError("it sent a chunk without a head")
    _, source, begin, to, at = _CHUNK.unpack_from(frame)
    return Chunk(source, begin, to, at, frame[_CHUNK.size :])


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a TCP connection within 30 s after its peer has vanished. Unix sockets need nothing."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
