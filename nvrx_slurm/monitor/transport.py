"""The rank's side: one bounded request, one answer, no threads."""

from __future__ import annotations

import os
import socket
import time

from nvrx_slurm.errors import NvrxError
from nvrx_slurm.monitor import wire

# a monitor answers within a millisecond; a killed one is replaced within seconds
REPLY_TIMEOUT_S = 30.0
_RETRY_S = 0.02


class RankMonitorClientError(NvrxError, RuntimeError):
    """The rank cannot be monitored as asked; the text is one sentence that says why and what to do."""


MOST_FDS = 2  # most descriptors that come with an answer


def request(path: str, kind: str, **fields: object) -> tuple[dict[str, object], list[int]]:
    """Send one request to the rank monitor at `path`; returns its `ok` answer and the fds sent with it.

    Takes at most REPLY_TIMEOUT_S, also while the monitor is being restarted. Raises RankMonitorClientError if there is
    no monitor, no answer in time, or the monitor refuses (with the monitor's sentence).
    """
    line = wire.encode(kind, **fields)
    deadline_s = time.monotonic() + REPLY_TIMEOUT_S
    while True:
        reply, fds = _try(path, line, deadline_s)
        if reply:
            break
        if time.monotonic() + _RETRY_S > deadline_s:
            raise RankMonitorClientError(
                f"the rank monitor at {path} gave no answer within {REPLY_TIMEOUT_S:g} s"
            )
        time.sleep(_RETRY_S)  # it was killed; its successor has the same socket
    try:
        message = wire.decode(reply)
        if message["type"] == "ok":
            return message, fds
        reason = message.get("error")
    except wire.WireError as error:
        reason = error
    for fd in fds:
        os.close(fd)
    raise RankMonitorClientError(f"the rank monitor refused {kind!r}: {reason}")


def _try(path: str, line: bytes, deadline_s: float) -> tuple[bytes, list[int]]:
    """One try; returns (b"", []) if the request should be sent again."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        for one in (ours, sock):
            one.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            with theirs:
                sock.connect(path)
                socket.send_fds(sock, [line], [theirs.fileno()])
            reply, fds, _, _ = socket.recv_fds(
                ours, wire.MAX_LINE_BYTES, MOST_FDS, socket.MSG_CMSG_CLOEXEC
            )
            return reply, fds
        except (FileNotFoundError, ConnectionRefusedError):
            raise RankMonitorClientError(
                f"no rank monitor listens at {path}: the launcher that started this process is gone, or this process "
                "has outlived the cycle it was started for"
            ) from None
        except (TimeoutError, ConnectionError):  # its queue is full, or it was killed
            return b"", []
        except OSError as error:
            raise RankMonitorClientError(
                f"the rank monitor at {path} cannot be reached: {error}"
            ) from None
