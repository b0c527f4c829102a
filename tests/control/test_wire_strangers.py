"""Strangers, and agents that break the protocol: an agent of the job must not notice them."""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl

import pytest
from wire_harness import HELLO, JOB, NODE, PLAN, TOKEN, Client, Process, Raw, Server, good_agent, joined, story

from nvrx_slurm import types as t
from nvrx_slurm.control import admission, stream
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.messages import FROM_COORDINATOR
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace

pytestmark = pytest.mark.process


REGISTER = t.Register(NODE, 1)


def _client_hello():
    """The first flight of TLS."""
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        identity(TOKEN, JOB).client.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def _long_hello(size):
    """A ClientHello of `size` zeros, in records of 16,000 bytes."""
    message = b"\x01" + size.to_bytes(3, "big") + bytes(size)
    parts = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize(
    "first, why",
    [
        (b"GET / HTTP/1.1\r\n\r\n", "another protocol"),
        (b"\xff" * 5000, "another protocol"),
        (b"\x16\x03\x01\x00\x05hello", "does not speak the protocol"),
        (_long_hello(100_000), "16384 bytes without a proof"),
        (_long_hello(1_000_000), "refused"),
        (b"\0\0\0\x02ab", "hands out none"),
        (bytes.fromhex("160301002f0100002b0303") + b"r" * 32 + bytes.fromhex("000004c02bc02f0100"), "unsupported"),
    ],
)
@story
async def test_what_is_no_agent_is_refused_and_said(first, why):
    async with Server() as server, good_agent(server), Raw(server.port, token=None) as raw:
        with contextlib.suppress(ConnectionError):
            raw.writer.write(first)
            await raw.writer.drain()
            assert len(await asyncio.wait_for(raw.reader.read(), 5)) < 10  # at most an alert
        assert "refused a connection from 127.0.0.1" in server.said[0] and why in server.said[0]


@story
async def test_a_client_without_the_certificate_is_refused():
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname, anonymous.verify_mode = False, ssl.CERT_NONE
    async with Server() as server, good_agent(server):
        with contextlib.suppress(OSError):  # the alert
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=anonymous, server_hostname="")
            writer.write(b"\0\0\0\0" * 100)
            assert await reader.read() == b""
        while not server.said:
            await asyncio.sleep(0.01)
        assert "does not hold this job's token" in server.said[0]


IDLE_RUNS = t.Register(NODE, 0, doing=t.Activity.RUNNING)  # without a plan


@pytest.mark.parametrize("bad", [[REGISTER], [b""], [HELLO, HELLO], [HELLO, b"\xff" * 50], [HELLO, IDLE_RUNS]])
@story
async def test_wrong_beginnings_end_the_stream(bad):
    async with Server() as server, good_agent(server), Raw(server.port) as raw:
        await raw.say(*bad)
        assert await raw.hear() is None and "refused a connection" in server.said[0]


@story
async def test_agent_that_breaks_the_protocol_is_lost_and_nothing_else():
    too_long = (stream.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")
    async with Server() as server, good_agent(server):
        for number, bad in enumerate([REGISTER, HELLO, b"\xff" * 50, too_long]):
            async with Raw(server.port) as raw:
                await raw.join(replace(NODE, node_id=f"bad{number}", infra_rank=5))
                await server.inbox.next(ev.Joined)
                if bad is too_long:
                    raw.writer.write(too_long)
                else:
                    await raw.say(bad)
                lost = await server.inbox.next(ev.Lost)
                assert lost.node_id == f"bad{number}" and "broke the protocol" in lost.why


@story
async def test_agents_of_a_job_get_in_while_strangers_hold_thousands_of_connections():
    """Idle ones, half handshakes, and answers that are never read; all from the agent's own address."""
    hello, strangers = _client_hello(), []
    async with Server() as server, good_agent(server):
        before_kb = _resident_kb()
        for number in range(900):
            one = socket.create_connection(("127.0.0.1", server.port))
            strangers.append(one)
            if number % 3:
                one.send(hello if number % 3 == 1 else hello[:100])
            if number % 50 == 0:
                await asyncio.sleep(0)
        async with Client(server.port, node=replace(NODE, node_id="late")) as late:
            await joined(server, late)
            assert _resident_kb() - before_kb < 12_000
        await server.inbox.next(ev.Lost)
        for one in strangers:
            one.close()


@story
async def test_without_descriptors_a_coordinator_keeps_its_agents_and_accepts_later():
    with Process("server", 0, (0.3, 0.7)) as peer:
        port = int(await peer.line())
        async with Client(port, keepalive=(0.3, 0.7)) as client:
            await client.inbox.next(ag.Connected)
            assert "Joined" in await peer.line()
            limits = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)
            used = len(os.listdir(f"/proc/{peer.process.pid}/fd"))
            resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, (used + 3, limits[1]))
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            assert os.strerror(errno.EMFILE) in await peer.line()
            with pytest.raises(asyncio.TimeoutError):  # beats are answered
                await client.inbox.next(object, 2.0)
        while "Lost" not in (line := await peer.line()):
            assert os.strerror(errno.EMFILE) in line
        for one in strangers:
            one.close()
        async with Client(port) as late:
            await late.inbox.next(ag.Connected)


class Relay:
    """A stranger that was first at a port: passes on what comes, and can add bytes of its own."""

    def __init__(self, port):
        self._port = port
        self.writers = {}  # to whom
        self.records = {"agent": b"", "coordinator": b""}  # the last that went there
        self._tasks = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for writer in self.writers.values():
            writer.transport.abort()
        await asyncio.gather(*self._tasks)

    async def _relay(self, reader, writer):
        there, onward = await asyncio.open_connection("127.0.0.1", self._port)
        self.writers |= {"agent": writer, "coordinator": onward}
        ways = ((reader, onward, "coordinator"), (there, writer, "agent"))
        self._tasks += [asyncio.ensure_future(self._pass_on(*way)) for way in ways]

    async def _pass_on(self, reader, writer, whom):
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                self.records[whom] = data
                writer.write(data)
        writer.close()


def _clear(record):
    """A plan without encryption, as a TLS record and as a frame."""
    frame = FROM_COORDINATOR.encode(replace(PLAN, master_addr="6.6.6.6"))
    return b"\x17\x03\x03" + (len(frame) + 4).to_bytes(2, "big") + len(frame).to_bytes(4, "big") + frame


def _changed(record):
    return record[:-1] + bytes([record[-1] ^ 1])


@pytest.mark.parametrize("whom", ["agent", "coordinator"])
@pytest.mark.parametrize("forge", [_clear, _changed, bytes], ids=["clear", "changed", "replayed"])
@story
async def test_a_stranger_that_relays_cannot_inject(forge, whom):
    """It has the first candidate port. What it adds ends the stream, and neither end takes a message from it."""
    async with Server() as server, Relay(server.port) as relay, Client(relay.port, server.port) as client:
        await joined(server, client)
        assert server.server.send("n0", t.Stop(1, 0, "of the coordinator"))
        assert (await client.inbox.next(t.Stop)).reason == "of the coordinator"
        assert relay.records[whom]
        relay.writers[whom].write(forge(relay.records[whom]))
        await client.inbox.next(ag.Disconnected)
        assert "broke the protocol" in (await server.inbox.next(ev.Lost)).why or whom == "agent"
        await relay.__aexit__()
        await joined(server, client)  # at the second candidate
        assert client.inbox.empty() and server.inbox.empty()


@story
async def test_a_stream_without_a_proof_is_closed_in_time(monkeypatch):
    monkeypatch.setattr(admission, "HANDSHAKE_TIMEOUT_S", 0.3)
    async with Server() as server, good_agent(server), Raw(server.port, token=None) as idle, Raw(server.port) as mute:
        assert await asyncio.wait_for(idle.reader.read(), 5) == b"" and await mute.hear() is None
        assert "in time" in server.said[0]


def _resident_kb():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024
