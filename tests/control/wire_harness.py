"""A real ControlServer and real clients on loopback, and what a stranger on the network can try."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

from nvrx_slurm import types as t
from nvrx_slurm.control import auth
from nvrx_slurm.control.client import ControlClient
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.messages import FROM_AGENTS, FROM_COORDINATOR
from nvrx_slurm.control.server import ControlServer
from nvrx_slurm.control.stream import BEAT
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev

REPO = Path(__file__).resolve().parents[2]
WAIT_S = 150.0  # as in `waits`, which a program of this file does not find
JOB, TOKEN = "job-1", "correct horse"
SLOW = (30.0, 30.0)  # keepalive that plays no part
NODE = t.Node("n0", 0, "host0", "127.0.0.1", 2)


def story(test):
    """Make a test of a coroutine function; an exception that no task or callback caught fails it."""

    async def guarded(**fixtures):
        uncaught = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: uncaught.append(context))
        await asyncio.wait_for(test(**fixtures), 60)
        assert uncaught == []

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(guarded(**fixtures))

    return run


class Inbox:
    """Events that were posted, awaited in order."""

    def __init__(self):
        self.seen = []
        self._queue = asyncio.Queue()

    def post(self, event):
        self.seen.append(event)
        self._queue.put_nowait(event)

    async def next(self, kind, timeout_s=WAIT_S):
        """The next event, which has to be of this kind."""
        event = await asyncio.wait_for(self._queue.get(), timeout_s)
        assert isinstance(event, kind), event
        return event

    def empty(self):
        return self._queue.empty()


class Server:
    """`async with Server() as server`: a ControlServer with an inbox."""

    def __init__(self, job=JOB, token=TOKEN, keepalive=SLOW, credentials=None, ports=(0,), say=None):
        self.inbox = Inbox()
        self.said = []
        self._ports = ports
        self.server = ControlServer(job, token, self.inbox.post, say or self.said.append, keepalive, credentials)
        self.port = 0

    async def __aenter__(self):
        where = await self.server.start("127.0.0.1", list(self._ports))
        self.port = int(where.rpartition(":")[2])
        return self

    async def __aexit__(self, *exc):
        await self.server.close(0.2)


class Client:
    """`async with Client(port) as client`: ControlClients, one after the other as in the agent, that register."""

    def __init__(self, *ports, node=NODE, job=JOB, token=TOKEN, keepalive=SLOW, credentials=None):
        self.inbox = Inbox()
        self.said = []
        self._node = node
        endpoints = [("127.0.0.1", port) for port in ports]
        self._news = asyncio.Event()
        self.ended = asyncio.Event()  # one of its clients is done
        self._closed = False
        self._make = lambda: ControlClient(endpoints, job, token, self._post, keepalive, credentials, self._say)
        self.client = self._make()

    def _say(self, sentence):
        self.said.append(sentence)
        self._news.set()

    async def hear(self, part):
        """Wait until the client has said a sentence with `part` in it (`run` bounds the wait)."""
        while not any(part in sentence for sentence in self.said):
            self._news.clear()
            await self._news.wait()

    def _post(self, event):
        if isinstance(event, ag.Connected):
            self.client.send(t.Register(self._node, 4711))
        if isinstance(event, (ag.Disconnected, ag.Unreached)):
            self.ended.set()
            asyncio.get_running_loop().call_later(0.05, self._again)
        if not isinstance(event, ag.Unreached):
            self.inbox.post(event)

    def _again(self):
        if not self._closed:
            self.client = self._make()
            self.client.start()

    async def __aenter__(self):
        self.client.start()
        return self

    async def __aexit__(self, *exc):
        self._closed = True
        await self.client.close(0.5)


async def joined(server, client):
    """Wait until both know of each other; the server's event."""
    await client.inbox.next(ag.Connected)
    return await server.inbox.next(ev.Joined)


HELLO = t.Hello(auth.VERSION)


class Raw:
    """A hand-made peer: `async with Raw(port) as raw`, then say what you like. `token` None = without TLS."""

    def __init__(self, port, token=TOKEN, job=JOB):
        self._port = port
        self._tls = None if token is None else identity(token, job).client
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def __aenter__(self):
        name = None if self._tls is None else ""
        opened = asyncio.open_connection("127.0.0.1", self._port, ssl=self._tls, server_hostname=name)
        self.reader, self.writer = await asyncio.wait_for(opened, WAIT_S)
        return self

    async def __aexit__(self, *exc):
        self.writer.transport.abort()

    async def say(self, *messages):
        """Send frames."""
        for message in messages:
            data = message if isinstance(message, bytes) else FROM_AGENTS.encode(message)
            self.writer.write(len(data).to_bytes(4, "big") + data)
        await self.writer.drain()

    async def hear(self):
        """The next message; None at the end of the stream, however it ends."""
        try:
            size = int.from_bytes(await asyncio.wait_for(self.reader.readexactly(4), WAIT_S), "big")
            frame = await asyncio.wait_for(self.reader.readexactly(size), WAIT_S)
            return FROM_COORDINATOR.decode(frame) if frame != BEAT else BEAT
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def join(self, node=NODE):
        """Be an agent."""
        await self.say(HELLO, t.Register(node, 1))


class Process:
    """A peer in a process of its own, which prints its events; to be stopped and killed."""

    def __init__(self, role, port, keepalive):
        argv = [sys.executable, __file__, role, str(port), *map(str, keepalive)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)})

    async def line(self):
        loop = asyncio.get_running_loop()
        read = loop.run_in_executor(None, self.process.stdout.readline)
        return (await asyncio.wait_for(read, WAIT_S)).decode().strip()

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process.stdout.close()


PLAN = t.Plan(1, 0, t.History(), 3, 1, 2, "127.0.0.1", 1234, 0, 0)


@asynccontextmanager
async def good_agent(server):
    """An agent of the job that must not notice what strangers do; checked in both directions at the end."""
    async with Client(server.port) as client:
        event = await joined(server, client)
        yield client
        assert server.server.send(event.message.node.node_id, PLAN)
        assert await client.inbox.next(t.Plan) == PLAN
        client.client.send(t.Succeeded(1, 0))
        assert (await server.inbox.next(ev.FromAgent)).message == t.Succeeded(1, 0)
        assert server.inbox.empty() and client.inbox.empty()


async def be_a_peer(role, port, keepalive):
    """Print the events of one agent's client ("client PORT") or of a coordinator's server, until killed."""
    if role == "client":
        async with Client(port, keepalive=keepalive) as client:
            while True:
                print(await client.inbox.next(object, 100), flush=True)
    async with Server(keepalive=keepalive, ports=(port,), say=lambda text: print(text, flush=True)) as server:
        print(server.port, flush=True)
        while True:
            print(await server.inbox.next(object, 100), flush=True)


if __name__ == "__main__":
    asyncio.run(be_a_peer(sys.argv[1], int(sys.argv[2]), (float(sys.argv[3]), float(sys.argv[4]))))
