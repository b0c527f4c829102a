"""NVRx's gRPC log service, for foreign clients: appends what they send to files below the folders of our merged files.

Off unless --ft-log-server-grpc-port is given: it has neither TLS nor a password, as its clients have none. A file that
our own aggregator writes is refused. One thread serves all: a chunk is written before the next one is read, so the
flow control of HTTP/2 stops a client that is faster than the disk.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from nvrx_slurm.core.logs.names import index_file
from nvrx_slurm.logs import child, nvrx_wire
from nvrx_slurm.system.files import write_all

_OPTIONS = (
    ("grpc.max_receive_message_length", nvrx_wire.MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
_CLIENTS = 4_096  # streams at a time; more are refused


class Service:
    """The service. `roots`: folders below which it may write."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [os.path.realpath(root) for root in roots]
        self.clients = 0

    async def stream_logs(self, chunks: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        """StreamLogs: one answer at the end of the stream."""
        total, files = 0, dict[str, int]()
        self.clients += 1
        try:
            if self.clients > _CLIENTS:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{_CLIENTS} clients are connected already")
            async for message in chunks:
                try:
                    chunk = nvrx_wire.decode_chunk(message)
                    fd = self._open(chunk.file_path, files)
                    write_all(fd, chunk.data)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                except OSError as error:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, f"{chunk.file_path}: {error.strerror}")
                total += len(chunk.data)
            return nvrx_wire.stream_response("OK", total)
        finally:
            self.clients -= 1
            for fd in files.values():
                os.close(fd)

    async def health_check(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """HealthCheck."""
        return nvrx_wire.health_response(True, self.clients)

    def _open(self, path: str, files: dict[str, int]) -> int:
        """The file's descriptor. Raises ValueError where the path is not allowed, OSError."""
        if path in files:
            return files[path]
        if not path or "\0" in path:
            raise ValueError("file_path is missing")
        real = os.path.realpath(path)
        if not any(real.startswith(f"{root}/") for root in self._roots):
            raise ValueError(f"{path} is not below {' or '.join(self._roots)}")
        if os.path.exists(index_file(real)) or real.endswith(index_file("")):
            raise ValueError(f"{path} belongs to this job's own ranks")
        os.makedirs(os.path.dirname(real), exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        files[path] = os.open(real, flags, 0o644)
        return files[path]


def server(service: Service) -> grpc.aio.Server:
    """A server with the service; it listens nowhere yet."""
    found = grpc.aio.server(options=_OPTIONS)
    handlers = {
        "StreamLogs": grpc.stream_unary_rpc_method_handler(service.stream_logs),
        "HealthCheck": grpc.unary_unary_rpc_method_handler(service.health_check),
    }
    found.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(nvrx_wire.SERVICE, handlers),))
    return found


async def _main(settings: dict[str, Any], connection: socket.socket) -> int:
    ended = asyncio.get_running_loop().create_future()
    graces_s: list[float] = []

    def on_packet(packet: dict[str, Any] | None) -> None:
        graces_s.append(float(packet["finish"]) if packet is not None and "finish" in packet else 0.0)
        if not ended.done():
            ended.set_result(None)

    control = child.Control(connection, on_packet)
    here = server(Service(settings["roots"]))
    try:
        port = here.add_insecure_port(f"[::]:{settings['port']}")
    except RuntimeError:
        port = 0
    if not port:
        control.send(say=f"--ft-log-server-grpc-port {settings['port']} is taken: foreign log clients are not served")
        return child.GIVEN_UP
    await here.start()
    control.send(port=port)
    await ended
    await here.stop(graces_s[0])
    return 0


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptor of the socket to the agent."""
    return child.run(int(arguments[0]), _main)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
