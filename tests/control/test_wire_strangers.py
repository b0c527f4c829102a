"""Strangers, and agents that break the protocol: an agent of the job must not notice them."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
from dataclasses import replace

import pytest
from wire_harness import HELLO, JOB, NODE, TOKEN, Client, Raw, Server, good_agent, story

from nvrx_slurm import types as t
from nvrx_slurm.control import codec, door
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control.identity import identity
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev

REGISTER = codec.from_agent(t.Register(NODE, 1))


def _client_hello() -> bytes:
    """The first flight of TLS."""
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        identity(TOKEN, JOB).client.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def _long_hello(size: int) -> bytes:
    """A ClientHello of `size` zeros, in records of 16,000 bytes."""
    message = b"\x01" + size.to_bytes(3, "big") + bytes(size)
    parts = [message[at : at + 16_000] for at in range(0, len(message), 16_000)]
    return b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)


@pytest.mark.parametrize(
    ("first", "why"),
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
async def test_what_is_no_agent_is_refused_and_said(first: bytes, why: str) -> None:
    async with Server() as server, good_agent(server), Raw(server.port, token=None) as raw:
        with contextlib.suppress(ConnectionError):
            raw.writer.write(first)
            await raw.writer.drain()
            assert len(await asyncio.wait_for(raw.reader.read(), 5)) < 10  # at most an alert
        assert "refused a connection from 127.0.0.1" in server.said[0] and why in server.said[0]


@story
async def test_a_client_without_the_certificate_is_refused() -> None:
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


@pytest.mark.parametrize("bad", [[REGISTER], [b""], [HELLO, HELLO], [HELLO, b"\xff" * 50]])
@story
async def test_wrong_beginnings_end_the_stream(bad: list[pb.FromAgent | bytes]) -> None:
    async with Server() as server, good_agent(server), Raw(server.port) as raw:
        await raw.say(*bad)
        assert await raw.hear() is None and "refused a connection" in server.said[0]


@story
async def test_agent_that_breaks_the_protocol_is_lost_and_nothing_else() -> None:
    too_long = (codec.MAX_MESSAGE_BYTES + 1).to_bytes(4, "big")
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
async def test_agents_of_a_job_get_in_while_strangers_hold_thousands_of_connections() -> None:
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
            await late.inbox.next(ag.Connected, 5)
            await server.inbox.next(ev.Joined)
            assert _resident_kb() - before_kb < 12_000
        await server.inbox.next(ev.Lost)
        for one in strangers:
            one.close()


@story
async def test_without_descriptors_the_coordinator_goes_on_and_accepts_later() -> None:
    async with Server() as server, good_agent(server) as client:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = os.open(os.devnull, os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 2, limits[1]))
        fillers = []
        try:
            waiting = socket.socket()
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open(os.devnull, os.O_RDONLY))
            waiting.connect(("127.0.0.1", server.port))
            while not server.said:
                await asyncio.sleep(0.01)
            assert os.strerror(errno.EMFILE) in server.said[0]
            assert server.server.send("n0", t.Stop(1, 0, "go on"))
            assert (await client.inbox.next(t.Stop)).reason == "go on"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in (*fillers, taken):
                os.close(fd)
            waiting.close()
        async with Client(server.port, node=replace(NODE, node_id="late")) as late:
            await late.inbox.next(ag.Connected)
            await server.inbox.next(ev.Joined)
        await server.inbox.next(ev.Lost)


@story
async def test_a_stream_without_a_proof_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_TIMEOUT_S", 0.3)
    async with Server() as server, good_agent(server), Raw(server.port, token=None) as idle, Raw(server.port) as mute:
        assert await asyncio.wait_for(idle.reader.read(), 5) == b"" and await mute.hear() is None
        assert "in time" in server.said[0]


def _resident_kb() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 1024
