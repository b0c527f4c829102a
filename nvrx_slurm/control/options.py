"""gRPC channel and server options shared by both ends, and the names on the wire."""

from __future__ import annotations

from nvrx_slurm.control.codec import MAX_MESSAGE_BYTES

SERVICE = "nvrx.control.v1.Control"
SESSION = f"/{SERVICE}/Session"
GET_TOKEN = f"/{SERVICE}/GetToken"
HANDSHAKE_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 3.0
QUEUE_LENGTH = 256  # messages waiting for one slow peer; more means it is lost

Option = tuple[str, int]


def keepalive_options(interval_s: float, timeout_s: float) -> list[Option]:
    """Ping after `interval_s` without traffic, give up `timeout_s` later (both seconds, > 0)."""
    return [
        ("grpc.keepalive_time_ms", int(interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(timeout_s * 1000)),  # newer gRPC waits this long, by default 60 s
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(interval_s: float, timeout_s: float) -> list[Option]:
    """Options of the coordinator's server."""
    return [
        *keepalive_options(interval_s, timeout_s),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 200),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # a taken port must be an error, not a second coordinator
    ]


def channel_options(interval_s: float, timeout_s: float) -> list[Option]:
    """Options of an agent's channel. It notices silence a little before the coordinator does.

    A node that is cut off has therefore begun to stop its workers when its spare starts.
    """
    return [
        *keepalive_options(interval_s * 0.8, timeout_s * 0.8),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),  # login environments often carry http_proxy; nodes are not behind it
        ("grpc.enable_retries", 0),
        ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),  # how long one connection attempt may take
        ("grpc.use_local_subchannel_pool", 1),
    ]
