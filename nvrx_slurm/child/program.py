"""What the helper programs with packets have in common: settings, signals, the socket to their agent, how they end.

The agent (`child.supervised.PacketProcess`) starts a program with one end of a SOCK_SEQPACKET socket. Packets are JSON
objects; the first one has the settings. A closed socket means that the agent has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from nvrx_slurm.child.bounded_process import JOB_SIGNALS

GIVEN_UP = 3  # exit code of a program that is not to be started again
UNFINISHED = 4  # exit code: the rest of its work was not done in time
ORPHANED_S = 5.0  # for the rest of its work when the agent has ended
_NICE = 10
_PACKET_BYTES = 1 << 17


class Program:
    """A program on the running loop. `result`: its exit code. A subclass has `on_packet`."""

    def __init__(self, connection: socket.socket) -> None:
        self._control = connection
        self._said = ""
        self.loop = asyncio.get_running_loop()
        self.result: asyncio.Future[int] = self.loop.create_future()
        connection.setblocking(False)
        self.loop.add_reader(connection.fileno(), self._read)

    def on_packet(self, packet: dict[str, Any]) -> None:
        """What the agent says. {"finish": seconds}: do the rest of the work within that time, then `end`."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        """Have the agent say a sentence; the same one only once."""
        if text != self._said:
            self._said = text
            self.tell(say=text)

    def tell(self, **packet: object) -> None:
        """Tell the agent; dropped where it does not read."""
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(packet).encode())

    def end(self, code: int = 0) -> None:
        """The program ends with this code; a second call does nothing."""
        if not self.result.done():
            self.result.set_result(code)

    def _read(self) -> None:
        try:
            data = self._control.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.loop.remove_reader(self._control.fileno())
        self.on_packet(json.loads(data) if data else {"finish": ORPHANED_S})


def run(fd: int, make: Callable[[dict[str, Any], socket.socket], Program]) -> int:
    """The whole program: read the settings, `make(settings, connection)`. Returns its exit code."""
    # Slurm signals every process of a step; the agent says when it is time to end
    for signum in (*JOB_SIGNALS, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(_NICE)
    connection = socket.socket(fileno=fd)
    data = connection.recv(_PACKET_BYTES)

    async def main() -> int:
        return await make(json.loads(data), connection).result

    return asyncio.run(main()) if data else 0
