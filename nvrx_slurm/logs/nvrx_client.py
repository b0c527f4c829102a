"""A client of NVRx's gRPC log service: sends lines to files of a foreign server."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator

from nvrx_slurm.errors import NEEDS_GRPC

try:
    import grpc
except ModuleNotFoundError:
    raise ModuleNotFoundError(NEEDS_GRPC, name="grpc") from None

from nvrx_slurm.logs import nvrx_logs_pb2 as pb
from nvrx_slurm.logs.nvrx_service import NAME

# A proxy of the environment is for the world outside, not for a server of the cluster.
_OPTIONS = (
    ("grpc.keepalive_time_ms", 60_000), ("grpc.keepalive_timeout_ms", 20_000), ("grpc.enable_http_proxy", 0)
)  # fmt: skip
_HEALTH_S = 5.0


def send(address: str, lines: Iterable[tuple[str, bytes]]) -> int:
    """Send (file of the server, whole lines) until `lines` ends; returns how many bytes the server has taken.

    `address`: HOST:PORT. A piece of text has at most 10 MiB. Raises ConnectionError with what the server says, also
    where it takes less than was sent.
    """
    sent = 0

    def chunks() -> Iterator[pb.LogChunk]:
        nonlocal sent
        node_id = f"{socket.gethostname()}_{os.getpid()}"
        for path, text in lines:
            sent += len(text)
            yield pb.LogChunk(node_id=node_id, data=text, file_path=path)

    with grpc.insecure_channel(address, options=_OPTIONS) as channel:
        try:
            channel.unary_unary(f"/{NAME}/HealthCheck")(b"", timeout=_HEALTH_S, wait_for_ready=True)
            stream = channel.stream_unary(
                f"/{NAME}/StreamLogs", pb.LogChunk.SerializeToString, pb.StreamResponse.FromString
            )
            answer = stream(chunks())
        except grpc.RpcError as error:
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            raise ConnectionError(f"the log server at {address}: {details}") from None
    if answer.status != "OK" or answer.bytes_received != sent:
        raise ConnectionError(
            f"the log server at {address} took {answer.bytes_received} of {sent} bytes: {answer.status}"
        )
    return sent
