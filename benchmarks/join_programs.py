"""The programs of `benchmarks.join`: a coordinator, a process with many agents, one with strangers; run as modules.

server AGENTS TERM            prints its port; a coordinator of a later term than 1 takes over
clients PORT FIRST COUNT      prints "ready", waits for a line, prints when its last agent had its plan, and stays;
                              after the line "leave" the agents have lost their coordinator, and it prints "left";
                              after a port they register there, and it prints the same again; "lost" when an agent
                              loses its stream
strangers PORT                prints "ready", waits for a line, does what strangers may try until it is killed
"""

import asyncio
import contextlib
import os
import resource
import socket
import ssl
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

from nvrx_slurm.control.client import ControlClient
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.server import ControlServer
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.declared import replace
from nvrx_slurm.node.coordination.coordinator import MemberStreams
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.types import Node, Peer, Plan, Ready, Register
from tests.core.samples import agent_settings, coordinator_settings

_KEY, _TOKEN = "bench", "0" * 64
_KEEPALIVE = (5.0, 5.0)
_LONGEST_LIFE_S = 150.0
_AT_ONCE = 32  # of one process


def _say(text):
    """Show only what went wrong."""
    if text.startswith("refused"):
        print(text, file=sys.stderr)


async def serve(agents, term):
    """The real core, shell, event log and control server of a coordinator."""
    loop = asyncio.get_running_loop()
    me = Peer("0", "host0", "127.0.0.1", 0)
    settings = coordinator_settings(term=term, min_nodes=agents, max_nodes=agents, peer=me, electors=agents)
    core = Coordinator(settings, loop.time())
    with tempfile.TemporaryDirectory(prefix="nb-") as directory:
        log = EventLog(Path(directory) / "events.jsonl", core, _say)
        shell = Shell(core, log, ev.JobOver, _say)
        server = ControlServer(_KEY, _TOKEN, shell.post, _say, _KEEPALIVE)
        shell.add(MemberStreams(None, server))
        for command in (ev.Won, ev.Lapsed, ev.Probe):  # of an election, which is left out
            shell.on(command, lambda command: None)
        shell.begin()
        where = await server.start("127.0.0.1", [0])
        print(where.rpartition(":")[2], flush=True)
        await asyncio.wait({shell.result}, timeout=_LONGEST_LIFE_S)


class _Agent:
    """The real core and client of one agent; its workers are left out."""

    def __init__(self, number, planned, connected):
        node = Node(f"{number}", number, f"host{number}", "127.0.0.1", 8)
        self._core = Agent(node, agent_settings(elects=True), 0.0)
        self._planned, self._connected = planned, connected
        self.client = None
        self._port = 0

    async def leave(self):
        """Its coordinator is silent."""
        before, self.client = self.client, None
        await before.close(0.0)
        self._take(ag.Disconnected("it is silent"))

    def move(self, port):
        """Register with the coordinator at this port of loopback."""
        self._port = port
        self.client = ControlClient([("127.0.0.1", port)], _KEY, _TOKEN, self._post, _KEEPALIVE)
        self.client.start()

    def _post(self, event):
        if isinstance(event, ag.Unreached):  # a handshake took too long: the search for a coordinator begins again
            return self.move(self._port)
        self._take(event)
        if isinstance(event, ag.Connected):
            self._connected()
            if self._core.plan is None:
                self._take(ag.Prepared())
        if isinstance(event, Plan):
            self._planned()
        if isinstance(event, ag.Disconnected):
            print("lost", event.why, flush=True)

    def _take(self, event):
        for command in self._core.step(event, time.monotonic()):
            if isinstance(command, ag.Send) and self.client is not None:
                message = command.message
                self.client.send(replace(message, port=1234) if isinstance(message, (Register, Ready)) else message)


async def join(port, first, count):
    """`count` agents, of which at most `_AT_ONCE` are on their way: they share a processor. The harness ends us."""
    loop = asyncio.get_running_loop()
    plans = asyncio.Queue()
    to_move = deque()

    def move_one():
        if to_move:
            to_move.popleft().move(port)

    agents = [_Agent(first + i, lambda: plans.put_nowait(time.monotonic()), move_one) for i in range(count)]
    print("ready", flush=True)
    while line := await asyncio.wait_for(loop.run_in_executor(None, sys.stdin.readline), _LONGEST_LIFE_S):
        if line == "leave\n":
            for agent in agents:
                await agent.leave()
            print("left", flush=True)
            continue
        port = port if line == "go\n" else int(line)
        to_move.extend(agents)
        for _ in range(_AT_ONCE):
            move_one()
        print(max([await asyncio.wait_for(plans.get(), _LONGEST_LIFE_S) for _ in agents]), flush=True)


async def annoy(port):
    """2,000 idle connections, 300 half handshakes that never read, and 50 that come back: garbage and 1 MB hellos."""
    loop = asyncio.get_running_loop()
    out = ssl.MemoryBIO()
    tls = identity("another", _KEY).client.wrap_bio(ssl.MemoryBIO(), out)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    hello, large = out.read(), b"\x16\x03\x01\x40\x00\x01\x0f\xff\xff" + bytes(1 << 20)

    async def come_back(first):
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(first)
                    await reader.read()
                finally:
                    writer.transport.abort()

    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    tasks = [loop.create_task(come_back(large if number % 2 else b"\xff" * 5000)) for number in range(50)]
    held = []
    while True:
        while len(held) < 2300:
            held.append(socket.create_connection(("127.0.0.1", port)))
            if len(held) > 2000:
                held[-1].send(hello)
        await asyncio.sleep(0.1)
        held = [one for one in held if not _is_closed(one)]
        assert not any(task.done() for task in tasks)


def _is_closed(connection):
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def main(words):
    """See above."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if words[0] == "server":
        asyncio.run(serve(int(words[1]), int(words[2])))
    elif words[0] == "strangers":
        asyncio.run(annoy(int(words[1])))
    else:
        asyncio.run(join(*map(int, words[1:])))
    os._exit(0)


main(sys.argv[1:])
