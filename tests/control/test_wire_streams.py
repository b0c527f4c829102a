"""Broken, silent and slow streams; fake coordinators; ports that are taken; names."""

import asyncio
import signal
import socket
from types import SimpleNamespace

import pytest
from stage import free_port
from wire_harness import PLAN, SLOW, Client, Process, Raw, Server, joined, story

from nvrx_slurm import types as t
from nvrx_slurm.control import addresses, auth
from nvrx_slurm.control import client as client_module
from nvrx_slurm.control.stream import AGE
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode

pytestmark = pytest.mark.process


@story
async def test_what_is_pushed_before_a_drop_arrives():
    async with Server() as server, Client(server.port) as client:
        await joined(server, client)
        server.server.send("n0", t.Refused(95, "not wanted"))
        server.server.drop("n0")
        assert (await client.inbox.next(t.Refused)).reason == "not wanted"
        assert "closed" in (await client.inbox.next(ag.Disconnected)).why


@story
async def test_second_stream_of_the_same_agent_ends_the_first():
    async with Server() as server, Raw(server.port) as first, Raw(server.port) as second:
        for raw in (first, second):
            await raw.join()
            await server.inbox.next(ev.Joined)
        assert await first.hear() is None
        server.server.send("n0", PLAN)
        assert isinstance(await second.hear(), t.Plan)
        assert server.inbox.empty()  # it has not left


@story
async def test_a_killed_client_is_lost_at_once():
    async with Server() as server:
        with Process("client", server.port, SLOW) as peer:
            await server.inbox.next(ev.Joined)
            peer.process.kill()
            assert (await server.inbox.next(ev.Lost, 5)).node_id == "n0"


@story
async def test_idle_peers_stay_connected_over_many_keepalives():
    keepalive = (0.3, 0.3)
    async with Server(keepalive=keepalive) as server, Client(server.port, keepalive=keepalive) as client:
        await joined(server, client)
        with pytest.raises(asyncio.TimeoutError):
            await server.inbox.next(ev.Lost, 1.5)
        assert client.inbox.empty()


@story
async def test_a_stopped_server_is_found_again_and_a_killed_ones_successor_too():
    keepalive = (0.5, 0.5)
    with Process("server", 0, keepalive) as peer:
        port = int(await peer.line())
        async with Client(port, keepalive=keepalive) as client:
            await client.inbox.next(ag.Connected)
            assert (await peer.line()).startswith("Joined")
            peer.process.send_signal(signal.SIGSTOP)
            await client.inbox.next(ag.Disconnected)
            peer.process.send_signal(signal.SIGCONT)
            await client.inbox.next(ag.Connected)
            peer.process.send_signal(signal.SIGKILL)
            await client.inbox.next(ag.Disconnected, 5)
            peer.process.wait()  # only then is its port free for certain
            async with Server(ports=(port,)) as server:
                await joined(server, client)


@story
async def test_peer_that_takes_nothing_is_lost():
    """It keeps its stream open, but never reads."""
    async with Server() as server, Raw(server.port) as slow:
        await slow.join()
        await server.inbox.next(ev.Joined)
        slow.writer.transport.pause_reading()
        message = t.Stop(1, 0, "x" * 4000)
        for _ in range(20_000):
            if not server.inbox.empty():
                break
            server.server.send("n0", message)
        lost = await server.inbox.next(ev.Lost)
        assert "did not take 2 MiB" in lost.why


@story
async def test_large_messages_arrive_whole_in_both_directions():
    async with Server() as server, Client(server.port) as client:
        await joined(server, client)
        faults = tuple(t.RankFault(t.FaultKind.EXIT, "h", rank, traceback="t" * 15_000) for rank in range(60))
        plan = replace(PLAN, history=t.History(excluded=tuple(f"{n:0200}" for n in range(4000))))
        for _ in range(3):
            client.client.send(t.RanksFailed(1, 0, faults))
            server.server.send("n0", plan)
        for _ in range(3):
            assert (await server.inbox.next(ev.FromAgent)).message.faults == faults
            assert await client.inbox.next(t.Plan) == plan


@story
async def test_an_agent_whose_loop_was_blocked_too_long_gives_its_stream_up():
    """Its coordinator may have replaced it meanwhile, whatever answer still waits in the socket."""
    async with Server(keepalive=(0.5, 0.5)) as server:
        with Process("client", server.port, (0.5, 0.5)) as peer:
            await server.inbox.next(ev.Joined)
            assert "Connected" in await peer.line()
            peer.process.send_signal(signal.SIGSTOP)
            lost = await server.inbox.next(ev.Lost, 5)
            assert lost.silent_s >= 1.0 and "silent for 1 s" in lost.why
            peer.process.send_signal(signal.SIGCONT)
            assert "Disconnected" in await peer.line()
            await server.inbox.next(ev.Joined)


@story
async def test_a_beat_tells_when_its_agent_was_here_however_late_it_is_heard():
    """Not before its last beat was answered, and so much later as the beat says."""
    loop = asyncio.get_running_loop()
    async with Server() as server, Raw(server.port) as peer:
        await peer.join()
        await server.inbox.next(ev.Joined)
        here_s = server.server.heard_at("n0")
        for age_s, least_s, most_s in ((-5.0, 0.0, 0.0), (1e-6, 1e-6, 1e3), (1e9, 1e-6, 1e3)):
            await peer.say(AGE.pack(age_s))
            assert await peer.hear() is not None
            before_s, here_s = here_s, server.server.heard_at("n0")
            assert before_s + least_s <= here_s <= min(before_s + most_s, loop.time())


@pytest.mark.parametrize("other", [{"token": "wrong"}, {"job": "job-2"}])
@story
async def test_an_agent_passes_over_another_jobs_coordinator_and_is_told(other):
    port = free_port()
    async with Server(**other) as fake, Client(fake.port, port) as client:
        await client.hear("another job, or does not hold this job's token")
        async with Server(ports=(port,)) as server:
            await joined(server, client)
            assert fake.inbox.empty() and "does not hold this job's token" in fake.said[0]


@story
async def test_an_agent_of_another_version_is_told_and_ends(monkeypatch):
    async with Server() as server:
        monkeypatch.setattr(client_module, "auth", SimpleNamespace(VERSION=99))
        async with Client(server.port) as client:
            await client.inbox.next(ag.Connected)
            end = await client.inbox.next(t.Refused)
            assert end.code == ExitCode.COORDINATOR_LOST
            assert f"speaks protocol 99, this coordinator {auth.VERSION}" in end.reason
            assert server.inbox.empty() and "protocol 99" in server.said[0]


async def _mute(reader, writer):
    await reader.read()
    writer.close()


async def _http(reader, writer):
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("kind", [_mute, _http])
@story
async def test_foreign_listener_on_the_first_port(kind, monkeypatch):
    """Both sides go on to the next candidate, whatever has the first."""
    monkeypatch.setattr(client_module, "HANDSHAKE_TIMEOUT_S", 0.7)
    foreign = await asyncio.start_server(kind, "127.0.0.1", 0)
    taken = foreign.sockets[0].getsockname()[1]
    async with Server(ports=(taken, 0)) as server:
        assert server.port != taken
        async with Client(taken, server.port) as client:
            await joined(server, client)
    foreign.close()


@pytest.mark.parametrize(
    "host, found, address",
    [
        ("n1", ["127.0.1.1"], "0.0.0.0"),  # Debian's /etc/hosts of n1 itself
        ("n1", ["::1"], "::"),
        ("n1", ["127.0.1.1", "10.0.0.7"], "10.0.0.7"),
        ("n1", ["10.0.0.7", "10.0.0.8"], "10.0.0.7"),
        ("n1", ["fe80::1%eth0"], "fe80::1%eth0"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
    ],
)
@story
async def test_a_name_never_means_loopback_only(host, found, address, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (one, 0)) for one in found])
    assert await addresses.resolve(host) == address
