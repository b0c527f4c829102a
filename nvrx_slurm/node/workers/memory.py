"""The keeper of checkpoints in memory, where a flag starts it; else the first save does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nvrx_slurm.checkpoint import link
from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ProtocolError
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.workers.worker_spec import WorkerContract
from nvrx_slurm.system import bounded
from nvrx_slurm.system.memory import free_bytes
from nvrx_slurm.types import InMemory, MemoryPlan, Node

_START_S = 40.0
_ANSWER_S = 10.0  # for what it keeps
_AGAIN_S, _LONGEST_AGAIN_S = 1.0, 60.0
_CLOSE_S = 5.0
_GIB = 1 << 30


class KeeperRole:
    """Role: starts the keeper, again where it is killed, and tells it where copies go. `held`: what it has told.

    It is an orphan of this agent, and outlives it for a while if that is killed. The role of the workers ends it, with
    all other orphans; so this one is closed before that. `pem`: the identity of the job; None: it has one node.
    """

    held: InMemory | None = None

    def __init__(
        self, contract: WorkerContract, node: Node, say: Callable[[str], None], pem: Callable[[], str] | None
    ) -> None:
        self._size, self._say, self._pem = contract.checkpoint_memory, say, pem
        self._say_once = once(say)
        self._interface = contract.checkpoint_interface
        if self._interface and pem is None:
            self._interface = ""
            say("no copies of checkpoints are kept: the job has one node")
        place = {"NVRX_RUN_DIR": contract.run_dir, "NVRX_INFRA_RANK": str(node.infra_rank)}
        self._env = {**os.environ, **place, link.LIMIT: str(self._size)}
        self._name = link.address(self._env, os.getpid())
        self._running: asyncio.Task[None] | None = None
        self._starts = asyncio.Lock()  # held while it is unknown whether there is a keeper
        self._connection: socket.socket | None = None
        self._known, self._answered = asyncio.Event(), asyncio.Event()
        self._port = 0  # the same after a restart, for other keepers
        self._plan = MemoryPlan()

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Workers start; or this node is a spare, which may have copies."""
        return {
            ag.StartWorkers: lambda command: self._follow(command.plan.memory or MemoryPlan()),
            ag.EndHeld: lambda command: self._follow(MemoryPlan()),
        }

    async def start(self) -> None:
        """Begin; ranks need not wait, because their first save would start it, too."""
        self._running = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Until it is known whether there is a keeper."""
        if self._running is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._starts.acquire(), _CLOSE_S)
            self._running.cancel()
            self._running = None

    async def settle(self) -> None:
        """Until it is known what the keeper has. Bounded."""
        if self._interface:
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._known.wait(), _START_S)
                if self._connection is None:
                    return
                self._answered.clear()
                self._send(m.AskKept())
                await bounded.wait_for(self._answered.wait(), _ANSWER_S)

    async def _run(self) -> None:
        again_s = _AGAIN_S
        while True:
            try:
                async with self._starts:
                    await self._start()
                if not self._interface:
                    return
                await self._serve()
                again_s = _AGAIN_S
                self._say("the keeper of checkpoints has ended, with all that it held: another one starts")
            except (link.CheckpointError, bounded.Overrun, OSError, ProtocolError) as error:
                self._say_once(str(error))
                self._known.set()  # there is none
                again_s = min(2 * again_s, _LONGEST_AGAIN_S)
            await asyncio.sleep(again_s)

    async def _start(self) -> None:
        start = partial(link.start, self._name, self._env, os.getpid())
        free, of = await bounded.call_async(free_bytes, _START_S, "memory")
        if self._size > free:
            asked, left = f"{self._size / _GIB:.3g}G", f"{free / _GIB:.3g}G"
            self._say_once(f"--ft-checkpoint-memory is {asked}, and {of} leaves {left}: saves may be refused")
        await bounded.call_async(start, _START_S, "keeper")

    async def _serve(self) -> None:
        """Until the keeper ends."""
        connect = partial(link.connect, self._name)
        self._connection = connection = await bounded.call_async(connect, _START_S, "keeper")
        try:
            connection.setblocking(False)
            self._send(m.Serve(self._interface, self._port))
            self._follow(self._plan)
            receive = partial(asyncio.get_running_loop().sock_recv, connection, m.MAX_PACKET_BYTES)
            with contextlib.suppress(ConnectionResetError):
                while packet := await receive():
                    self._heard(m.answers.decode(packet))
        finally:
            connection.close()
            self._connection = self.held = None
            self._known.clear()

    def _follow(self, plan: MemoryPlan) -> None:
        self._plan = plan
        if self._pem is not None and self._interface:
            self._send(m.Follow(self._pem(), plan))

    def _send(self, request: m.AgentRequest) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it has ended, or does not read: then it is no help
                self._connection.send(m.requests.encode(request), socket.MSG_NOSIGNAL)

    def _heard(self, answer: m.Answer) -> None:
        if isinstance(answer, m.Serving):
            self._port = answer.port or self._port
            self.held = InMemory(answer.address, answer.port) if answer.port else None
            self._known.set()
            if answer.why:
                self._say_once(answer.why)
        elif isinstance(answer, m.AllKept):
            self.held = None if self.held is None else replace(self.held, kept=answer.kept)
            self._answered.set()
        elif isinstance(answer, m.Remark):
            self._say(answer.text)
