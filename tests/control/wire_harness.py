"""A real ControlServer and real clients on loopback, and what a stranger on the network can try."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from nvrx_slurm import types as t
from nvrx_slurm.control import auth
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control.client import ControlClient
from nvrx_slurm.control.options import SESSION
from nvrx_slurm.control.server import ControlServer
from nvrx_slurm.core.job import agent_events as ag

REPO = Path(__file__).resolve().parents[2]
WAIT_S = 20.0
JOB, TOKEN = "job-1", "correct horse"
SLOW = (30.0, 30.0)  # keepalive that plays no part
NODE = t.Node("n0", 0, "host0", "127.0.0.1", 2)


def story(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function; an exception that no task or callback caught fails it."""

    async def guarded(**fixtures: Any) -> None:
        uncaught: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: uncaught.append(context))
        await asyncio.wait_for(test(**fixtures), 60)
        assert uncaught == []

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(guarded(**fixtures))

    return run


class Inbox:
    """Events that were posted, awaited in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def post(self, event: Any) -> None:
        self.seen.append(event)
        self._queue.put_nowait(event)

    async def next(self, kind: type, timeout_s: float = WAIT_S) -> Any:
        """The next event, which has to be of this kind."""
        event = await asyncio.wait_for(self._queue.get(), timeout_s)
        assert isinstance(event, kind), event
        return event

    def empty(self) -> bool:
        return self._queue.empty()


class Server:
    """`async with Server() as server`: a ControlServer with an inbox."""

    def __init__(
        self,
        job: str = JOB,
        token: str = TOKEN,
        keepalive: tuple[float, float] = SLOW,
        credentials: Any = None,
        ports: tuple[int, ...] = (0,),
    ) -> None:
        self.inbox = Inbox()
        self.said: list[str] = []
        self._ports = ports
        self.server = ControlServer(job, token, self.inbox.post, self.said.append, keepalive, credentials)
        self.port = 0

    async def __aenter__(self) -> Server:
        where = await self.server.start("127.0.0.1", list(self._ports))
        self.port = int(where.rpartition(":")[2])
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.server.close(0.2)


class Client:
    """`async with Client(port) as client`: a ControlClient that registers whenever it is connected."""

    def __init__(
        self,
        *ports: int,
        node: t.Node = NODE,
        job: str = JOB,
        token: str = TOKEN,
        keepalive: tuple[float, float] = SLOW,
        credentials: Any = None,
    ) -> None:
        self.inbox = Inbox()
        self.said: list[str] = []
        self._node = node
        endpoints = [("127.0.0.1", port) for port in ports]
        self._news = asyncio.Event()
        self.client = ControlClient(endpoints, job, token, self._post, keepalive, credentials, self._say)

    def _say(self, sentence: str) -> None:
        self.said.append(sentence)
        self._news.set()

    async def hear(self, part: str) -> None:
        """Wait until the client has said a sentence with `part` in it (`run` bounds the wait)."""
        while not any(part in sentence for sentence in self.said):
            self._news.clear()
            await self._news.wait()

    def _post(self, event: Any) -> None:
        if isinstance(event, ag.Connected):
            self.client.send(t.Register(self._node, 4711))
        self.inbox.post(event)

    async def __aenter__(self) -> Client:
        self.client.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.close(0.5)


class Raw:
    """A hand-made peer: `async with Raw(port) as raw`, then say what you like."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
        )
        self.stream: Any = self._channel.stream_stream(SESSION)()  # bytes in, bytes out

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.stream.cancel()
        await self._channel.close()

    async def say(self, message: pb.FromAgent | bytes) -> None:
        await self.stream.write(message if isinstance(message, bytes) else message.SerializeToString())

    async def hear(self) -> pb.FromCoordinator | None:
        """The next message; None at the end of the stream, however it ends."""
        try:
            got = await asyncio.wait_for(self.stream.read(), WAIT_S)
        except grpc.RpcError:
            return None
        return None if got is grpc.aio.EOF else pb.FromCoordinator.FromString(got)

    async def greet(self, token: str = TOKEN, job: str = JOB) -> None:
        """The whole handshake, as an agent that holds `token` does it."""
        nonce = auth.new_nonce()
        await self.say(pb.FromAgent(hello=pb.Hello(version=auth.VERSION, nonce=nonce, job=job)))
        challenge = (await self.hear()).challenge
        proof = auth.proof(token, "agent", job, nonce, challenge.nonce)
        await self.say(pb.FromAgent(proof=pb.Proof(proof=proof)))


class Process:
    """A peer in a process of its own (tests/control/wire_peer.py), to be stopped and killed."""

    def __init__(self, role: str, port: int, keepalive: tuple[float, float]) -> None:
        argv = [sys.executable, str(Path(__file__).with_name("wire_peer.py")), role, str(port), *map(str, keepalive)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)})

    async def line(self) -> str:
        """Its next line."""
        assert self.process.stdout is not None
        loop = asyncio.get_running_loop()
        read = loop.run_in_executor(None, self.process.stdout.readline)
        return (await asyncio.wait_for(read, WAIT_S)).decode().strip()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
