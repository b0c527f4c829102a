"""A log program (shipper or aggregator) over its lives: started with its settings, started again when it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nvrx_slurm.child import processes
from nvrx_slurm.child.supervised import RestartedProcess

_ROOT = str(Path(__file__).resolve().parents[2])
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from nvrx_slurm.logs.{} import main; sys.exit(main(sys.argv[2:]))"
)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 30.0
_GIVEN_UP = 3  # see logs.child
_YOUNG_S = 10.0  # one that lives longer is started again at once
_PACKET_BYTES = 1 << 16
_MARGIN_S = 2.0  # for a program to end after its own limit


class LogProgram(RestartedProcess):
    """`settings()`: its first packet; `state()`: packets that bring it up to date. `listener`: one more socket for it.

    With the exit code GIVEN_UP it is not started again. All methods belong to the running loop's thread.
    """

    def __init__(
        self,
        module: str,
        settings: Callable[[], dict[str, Any]],
        state: Callable[[], Iterable[dict[str, Any]]],
        say: Callable[[str], None],
        listener: socket.socket | None = None,
    ) -> None:
        super().__init__()
        self._module, self._settings, self._state = module, settings, state
        self._name = f"log {module}" if module in ("shipper", "aggregator") else f"{module} process"
        self._say, self._listener = say, listener
        self._socket: socket.socket | None = None
        self._began_s = 0.0

    def spawn(self) -> None:
        """Start it; where no process can be made, later."""
        if self._closed or self._child is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._began_s = self._loop.time()
        try:
            with theirs:
                child = self._start(theirs.fileno())
        except OSError as error:
            ours.close()
            self._say(f"the {self._name} cannot be started: {error.strerror}")
            return self._spawn_later(_FIRST_DELAY_S, _LONGEST_DELAY_S)
        ours.setblocking(False)
        self._socket = ours
        self._adopt(child, {ours.fileno(): self._read})
        for packet in (self._settings(), *self._state()):
            self.tell(packet)

    def _start(self, fd: int) -> processes.Child:
        """The process, with its end of the socket. Raises OSError."""
        # No site-packages for the shipper: it needs none, and is smaller without.
        flags = ["-I", "-S"] if self._module == "shipper" else ["-I"]
        fds = [fd, *((self._listener.fileno(),) if self._listener is not None else ())]
        program = [sys.executable, *flags, "-c", _PROGRAM.format(self._module), _ROOT, *map(str, fds)]
        return processes.start_directly(program, pass_fds=fds)

    def tell(self, packet: dict[str, Any]) -> None:
        """Send a packet; one that it cannot take now ends it, and the next process gets the whole state."""
        if self._socket is None:
            return
        try:
            self._socket.send(json.dumps(packet).encode())
        except BlockingIOError:
            self._kill()
        except OSError:
            return  # it has ended

    def _read(self) -> None:
        assert self._socket is not None
        with contextlib.suppress(OSError, ValueError):
            while data := self._socket.recv(_PACKET_BYTES):
                packet = json.loads(data)
                if "say" in packet:
                    self._say(str(packet["say"]))
                self._on_packet(packet)
            self._loop.remove_reader(self._socket.fileno())

    def _on_packet(self, packet: dict[str, Any]) -> None:
        """For more than sentences."""

    def _on_exit(self, pid: int, code: int) -> None:
        assert self._socket is not None
        self._socket.close()
        self._socket = None
        if self._closed or code == _GIVEN_UP:
            return
        self._say(f"the {self._name} ended with {code}; it is started again")
        if self._loop.time() - self._began_s >= _YOUNG_S:
            self._delay_s = 0.0
        self._spawn_later(_FIRST_DELAY_S, _LONGEST_DELAY_S)

    async def finish(self, within_s: float) -> None:
        """Have it do the rest of its work for at most that time; then it ends. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.tell({"finish": within_s})
            if self._child is not None:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._none_left.wait(), within_s + _MARGIN_S)
        await self._close(self._kill)
