"""What the shipper's and the aggregator's program have in common: settings, signals, the socket to their agent.

The agent starts the program with one end of a SOCK_SEQPACKET socket. Packets are JSON objects; the first one has the
settings. A closed socket means that the agent has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from typing import Any

NICE = 10
GIVEN_UP = 3  # exit code of a program that is not to be started again
PACKET_BYTES = 1 << 17
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Control:
    """The socket to the agent. `on_packet(packet)` gets each one, `on_packet(None)` its end."""

    def __init__(self, connection: socket.socket, on_packet: Callable[[dict[str, Any] | None], None]) -> None:
        self._socket, self._on_packet = connection, on_packet
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._read)

    def send(self, **packet: object) -> None:
        """Tell the agent; dropped where it does not read."""
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(packet).encode())

    def _read(self) -> None:
        try:
            data = self._socket.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
        self._on_packet(json.loads(data) if data else None)


def run(fd: int, main: Callable[[dict[str, Any], socket.socket], Coroutine[Any, Any, int]]) -> int:
    """The program: read the settings, then `main(settings, connection)`. Returns its exit code."""
    for signum in _IGNORED:  # Slurm signals every process of a step; the agent says when it is time to end
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICE)
    connection = socket.socket(fileno=fd)
    data = connection.recv(PACKET_BYTES)
    return asyncio.run(main(json.loads(data), connection)) if data else 0
