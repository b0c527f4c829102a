"""The rank's end of an inspection (`monitor.inspect`): it answers with its stacks and torch's flight recorder.

faulthandler prints the stacks from a signal handler, also while the main thread holds the interpreter's lock.
A thread that sleeps in recv(2) reads the flight recorder (torch >= 2.8), which knows the last collective of each group.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from nvrx_slurm.child import descendants
from nvrx_slurm.monitor.inspect import RECORD
from nvrx_slurm.monitor.kill import END_SIGNAL, INSPECT_SIGNAL
from nvrx_slurm.system import bounded

_DUMP_BYTES = 1 << 20  # or what the kernel allows
_MOST_GROUPS = 8
_MOST_CHARS = 100  # longest text about an operation and its sizes


class Answers:
    """Answers on the socket `fd`, which it owns, until the other end is closed. Belongs to the main thread."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        # a dump that no monitor reads must not hold the handler, and the GIL with it
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _DUMP_BYTES)
        print_stacks(fd)
        bounded.begin(self._serve, "nvrx-inspect")  # without it there are stacks and no record

    def _serve(self) -> None:
        try:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            while poll.poll() and self._socket.recv(1):
                with suppress(BlockingIOError):  # full of what nobody has read
                    self._socket.send(RECORD + facts() + b"\n")
        except OSError:
            pass


def print_stacks(fd: int) -> None:
    """Print the stacks of all threads to stderr and end, on END_SIGNAL; or to `fd` and go on, on INSPECT_SIGNAL.

    Unless the script has handlers for them. Belongs to the main thread. `fd` should not block: it may be full.
    """
    if signal.getsignal(END_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(END_SIGNAL, file=2, all_threads=True, chain=True)
    # Python does not know the handlers of C libraries
    handled = descendants.signals(os.getpid(), b"SigCgt", b"SigIgn")
    if not handled & 1 << (INSPECT_SIGNAL - 1):
        faulthandler.register(INSPECT_SIGNAL, file=fd, all_threads=True, chain=False)


def facts() -> bytes:
    """[[group, sequence number, operation and input sizes, whether it has not completed], ...] as JSON; without torch,
    or with a torch whose flight recorder is another, an empty list. Raises nothing."""
    torch = sys.modules.get("torch")
    try:
        dump = torch._C._distributed_c10d._dump_fr_trace_json() if torch is not None else b"{}"
        return json.dumps(
            _last(json.loads(dump).get("entries", ())), separators=(",", ":")
        ).encode()
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
