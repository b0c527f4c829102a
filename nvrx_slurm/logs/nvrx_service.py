"""NVRx's gRPC log service, for foreign clients: appends what they send to files below the folders of our merged files.

Off unless --ft-log-server-grpc-port is given: it has neither TLS nor a password, as its clients have none. Clients may
append to files that were made for them, and to no other: not to those of our own aggregator, nor to any that was there
before. One thread serves all: a chunk is written before the next one is read, so the flow control of HTTP/2 stops a
client that is faster than the disk.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from nvrx_slurm.child import program
from nvrx_slurm.core.logs.names import index_file
from nvrx_slurm.logs import nvrx_logs_pb2 as pb
from nvrx_slurm.system.files import write_all
from nvrx_slurm.system.owned import append_to

try:
    import grpc
except ModuleNotFoundError:  # starting it again would not help
    print(
        "--ft-log-server-grpc-port: gRPC is missing: pip install 'nvrx_slurm[log-service]'",
        file=sys.stderr,
    )
    sys.exit(program.GIVEN_UP)

NAME = "nvidia_resiliency_ext.fault_tolerance.LogAggregationService"
_OPTIONS = (
    ("grpc.max_receive_message_length", 10 << 20),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)
# of files that clients write; beside each file that was made for one
_SUFFIX, _OURS = ".log", ".client"
_FILES = 64  # of one stream
_CLIENTS = 4_096  # streams at a time; more are refused


class NvrxLogService:
    """The service. `roots`: folders below which it may write."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = [os.path.realpath(root) for root in roots]
        self.clients = 0

    async def stream_logs(
        self, chunks: AsyncIterator[pb.LogChunk], context: Any
    ) -> pb.StreamResponse:
        """StreamLogs: one answer at the end of the stream."""
        total = 0
        files = dict[str, int]()
        self.clients += 1
        try:
            async for chunk in chunks:
                try:
                    write_all(self._open(chunk.file_path, files), chunk.data)
                except ValueError as error:
                    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                except OSError as error:
                    await context.abort(
                        grpc.StatusCode.UNAVAILABLE, f"{chunk.file_path}: {error.strerror}"
                    )
                total += len(chunk.data)
            return pb.StreamResponse(status="OK", bytes_received=total)
        finally:
            self.clients -= 1
            for fd in files.values():
                os.close(fd)

    async def health_check(self, request: pb.HealthRequest, context: Any) -> pb.HealthResponse:
        """HealthCheck."""
        return pb.HealthResponse(healthy=True, connected_clients=self.clients)

    def _open(self, path: str, files: dict[str, int]) -> int:
        """The file's descriptor. Raises ValueError where the path is not allowed, OSError."""
        if path in files:
            return files[path]
        real = os.path.realpath(path)  # raises ValueError for a NUL
        below = any(real.startswith(f"{root}/") for root in self._roots)
        if (
            not below
            or not real.endswith(_SUFFIX)
            or any(part.startswith(".") for part in real.split("/"))
        ):
            where = " or ".join(self._roots)
            raise ValueError(
                f"{path!r} must be below {where} and end in {_SUFFIX}, without hidden folders"
            )
        if len(files) >= _FILES:
            raise ValueError(f"one stream may write to {_FILES} files")
        if os.path.exists(index_file(real)) or (
            os.path.lexists(real) and not os.path.exists(real + _OURS)
        ):
            raise ValueError(f"{path} exists, and was not made for a client of this service")
        # before the file: who finds it may append to the file
        os.close(append_to(Path(real + _OURS), 1))
        files[path] = append_to(Path(real), 1)
        return files[path]


def server(service: NvrxLogService) -> grpc.aio.Server:
    """A server with the service; it listens nowhere yet."""
    found = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_CLIENTS)
    stream = service.stream_logs, pb.LogChunk.FromString, pb.StreamResponse.SerializeToString
    health = service.health_check, pb.HealthRequest.FromString, pb.HealthResponse.SerializeToString
    handlers = {
        "StreamLogs": grpc.stream_unary_rpc_method_handler(*stream),
        "HealthCheck": grpc.unary_unary_rpc_method_handler(*health),
    }
    found.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))
    return found


class _Program(program.Program):
    """Serves until the agent says that it is enough."""

    def __init__(self, settings: dict[str, Any], connection: socket.socket) -> None:
        super().__init__(connection)
        self._server = server(NvrxLogService(settings["roots"]))
        self._work = asyncio.ensure_future(self._start(settings["port"]))

    def on_packet(self, packet: dict[str, Any]) -> None:
        """The end; streams get that time to end."""
        self._work = asyncio.ensure_future(self._stop(float(packet["finish"])))

    async def _start(self, port: int) -> None:
        try:
            found = self._server.add_insecure_port(f"[::]:{port}")
        except RuntimeError:
            self.say(
                f"--ft-log-server-grpc-port {port} is taken: foreign log clients are not served"
            )
            return self.end(program.GIVEN_UP)
        await self._server.start()
        self.tell(port=found)

    async def _stop(self, within_s: float) -> None:
        await self._server.stop(within_s)
        self.end()


def main(arguments: list[str]) -> int:
    """`arguments`: the descriptor of the socket to the agent."""
    return program.run(int(arguments[0]), _Program)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
