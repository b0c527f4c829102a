"""One JSON object per packet: the messages of rank, rank monitor and agent. Versioned and bounded.

Rank -> monitor (one request per connection)   `{"v":1,"type":"init","rank":3,"local_rank":1}`
                                               `{"v":1,"type":"limits","rank_heartbeat_timeout":12.5,...}`
                                               `{"v":1,"type":"control","action":"Continue","description":"..."}`
monitor -> rank                                `{"v":1,"type":"ok","cycle":0,"rank":3,"cfg":{...}}` + fds (page, socket)
                                               `{"v":1,"type":"ok"}`
                                               `{"v":1,"type":"error","error":"one sentence"}`
agent -> monitor                               `watch` (+ watched.Descriptors), `inspect`, `end`, `exit`, `unwatch`,
                                               `quit`
monitor -> agent                               `hang`, `inspected`, `control`; first `forked`, from one of several
"""

from __future__ import annotations

import json

# where a rank finds its monitor; each life of a rank has another path
SOCKET_ENV = "FT_RANK_MONITOR_IPC_SOCKET"
VERSION = 1
MAX_LINE_BYTES = 64 * 1024
# names of types.WorkloadAction, too heavy for a monitor
ACTIONS = ("Continue", "ExcludeThisNode", "ShutdownWorkload")
LOADED = "Loaded"  # as an action: what checkpoint.load() has found, a record in JSON
MAX_DESCRIPTION_CHARS = 4000  # of a control request


def socket_prefix(local_rank: int) -> str:
    """How the names of the sockets of one rank begin."""
    return f"rank{local_rank}."


class WireError(ValueError):
    """A message is not one of this version; the text is one sentence for the peer."""


def encode(kind: str, **fields: object) -> bytes:
    """One message as a line. Raises WireError if it is longer than MAX_LINE_BYTES."""
    line = (
        json.dumps({"v": VERSION, "type": kind, **fields}, separators=(",", ":")).encode() + b"\n"
    )
    if len(line) > MAX_LINE_BYTES:
        raise WireError(
            f"a {kind} message of {len(line)} bytes is over the limit of {MAX_LINE_BYTES}"
        )
    return line


def decode(line: bytes) -> dict[str, object]:
    """The message in `line`. Raises WireError (never anything else) if it is not one of this version."""
    if len(line) > MAX_LINE_BYTES:
        raise WireError(f"a message is over the limit of {MAX_LINE_BYTES} bytes")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise WireError("a message is not a JSON object on one line") from None
    if not isinstance(message, dict) or "v" not in message:
        raise WireError("a message is not a JSON object with a version")
    if message["v"] != VERSION:
        raise WireError(
            f"this side speaks version {VERSION}, the other {str(message['v'])[:20]}: "
            "use the same nvrx_slurm for the launcher and the training script"
        )
    if not isinstance(message.get("type"), str):
        raise WireError("a message has no type")
    return message
