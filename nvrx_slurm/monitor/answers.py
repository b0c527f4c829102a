"""What a rank answers when its monitor looks at it (`monitor.look`): its stacks, and torch's flight recorder.

faulthandler prints the stacks from a signal handler. A thread that sleeps in recv(2) reads the flight recorder, which
knows the last collective of each process group (torch >= 2.8).
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from typing import Any

from nvrx_slurm.monitor import stacks
from nvrx_slurm.monitor.look import RECORD

_MOST_GROUPS = 8
_MOST_CHARS = 100  # of operation and sizes


class Answers:
    """Answers on the socket `fd`, which it owns, until the other end is closed. Belongs to the main thread."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        stacks.install(fd)
        threading.Thread(target=self._serve, name="nvrx-look", daemon=True).start()

    def _serve(self) -> None:
        try:
            while self._socket.recv(1):
                self._socket.sendall(RECORD + facts() + b"\n")
        except OSError:
            pass


def facts() -> bytes:
    """[[group, sequence number, operation and input sizes, whether it has not completed], ...] as JSON; without torch,
    or with a torch whose flight recorder is another, an empty list. Raises nothing."""
    torch = sys.modules.get("torch")
    try:
        dump = torch._C._distributed_c10d._dump_fr_trace_json() if torch is not None else b"{}"
        return json.dumps(_last(json.loads(dump).get("entries", ())), separators=(",", ":")).encode()
    except Exception:  # a private interface, of which each torch may have another
        return b"[]"


def _last(entries: list[dict[str, Any]]) -> list[list[Any]]:
    """The last collective of each group; point-to-point operations are no collectives. Newest groups first."""
    last: dict[str, list[Any]] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        group, seq = str(entry["process_group"][0]), int(entry["collective_seq_id"])
        what = f"{entry['profiling_name']} {entry['input_sizes'] or ''}".strip()[:_MOST_CHARS]
        last.pop(group, None)
        last[group] = [group, seq, what, not entry["retired"]]
    return list(last.values())[::-1][:_MOST_GROUPS]
