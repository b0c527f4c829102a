"""Answers `nvrx stacks` on this node: what its ranks do now, to programs of the same user, on a Unix socket.

The socket is in the agent's private directory (mode 0700), so that the file system keeps other users away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from nvrx_slurm.node.monitors.looks import Looks

SOCKET = "stacks"
WITHIN_S = 1.5  # for the ranks to answer
_SEND_S = 5.0


class Live:
    """`run`: directory of the run. `begin(looks)` has it look at the ranks; `open`: those that look now."""

    def __init__(self, run: Path, begin: Callable[[Looks], None]) -> None:
        self._run, self._begin = str(run.resolve()), begin  # here: it may block
        self.open = set[Looks]()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, private_dir: Path) -> None:
        """Listen. Where that fails, the ranks cannot be looked at, and that is all."""
        with contextlib.suppress(OSError):
            self._server = await asyncio.start_unix_server(self._answer, private_dir / SOCKET)

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = asyncio.get_running_loop().create_future()
        looks = Looks(seen.set_result)
        self.open.add(looks)
        with contextlib.suppress(OSError, asyncio.TimeoutError):  # the other end has gone
            self._begin(looks)
            ranks = [asdict(rank) for rank in (await seen).ranks]
            writer.write(json.dumps({"run": self._run, "ranks": ranks}).encode())
            await asyncio.wait_for(writer.drain(), _SEND_S)
        self.open.discard(looks)
        writer.close()
