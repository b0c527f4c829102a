"""The three messages of NVRx's log service (`log_aggregation.proto`, proto3), encoded by hand: no generated code.

LogChunk: 1 node_id, 2 data, 3 file_path. StreamResponse: 1 status, 2 bytes_received. HealthResponse: 1 healthy,
2 connected_clients. HealthRequest is empty. A bad message raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

SERVICE = "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"
MAX_MESSAGE_BYTES = 10 << 20
CHUNK_BYTES = 256 << 10
_VARINT, _BYTES = 0, 2


class LogChunk(NamedTuple):
    """Whole lines for one file of the server."""

    node_id: str
    data: bytes
    file_path: str

    def encode(self) -> bytes:
        """For the wire."""
        fields = ((1, self.node_id.encode()), (2, self.data), (3, self.file_path.encode()))
        return b"".join(
            bytes([number << 3 | _BYTES]) + _varint(len(value)) + value for number, value in fields if value
        )


def decode_chunk(message: bytes) -> LogChunk:
    """A LogChunk. Unknown fields are skipped."""
    found = dict(_fields(message))
    node_id, data, path = (_text(found.get(number, b"")) for number in (1, 2, 3))
    return LogChunk(node_id.decode(), data, path.decode())


def stream_response(status: str, received: int) -> bytes:
    """A StreamResponse."""
    text = status.encode()
    return b"\x0a" + _varint(len(text)) + text + b"\x10" + _varint(received)


def health_response(healthy: bool, clients: int) -> bytes:
    """A HealthResponse."""
    return b"\x08" + _varint(healthy) + b"\x10" + _varint(clients)


def received(response: bytes) -> tuple[str, int]:
    """(status, bytes_received) of a StreamResponse."""
    found = dict(_fields(response))
    count = found.get(2, 0)
    if not isinstance(count, int):
        raise ValueError("a field has another type")
    return _text(found.get(1, b"")).decode(), count


def _text(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another type")
    return value


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        if key & 7 == _VARINT:
            value, at = _number(message, at)
            yield key >> 3, value
        elif key & 7 == _BYTES:
            size, at = _number(message, at)
            if at + size > len(message):
                raise ValueError("the message is cut off")
            yield key >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {key & 7} is not used here")


def _number(message: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    for byte in message[at : at + 10]:
        at += 1
        found |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return found, at
    raise ValueError("the message is cut off")


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*found, number])
