"""Broken, silent and slow streams; strangers; fake coordinators; ports that are taken."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from wire_harness import JOB, NODE, SLOW, TOKEN, Client, Process, Raw, Server, story

from nvrx_slurm import types as t
from nvrx_slurm.control import auth
from nvrx_slurm.control import client as client_module
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control import server as server_module
from nvrx_slurm.control.options import QUEUE_LENGTH
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.errors import NvrxError

PLAN = t.Plan(1, 0, t.History(), 3, 1, 2, "127.0.0.1", 1234, 0, 0)


@asynccontextmanager
async def good_agent(server: Server) -> AsyncIterator[Client]:
    """An agent of the job that must not notice what strangers do; checked in both directions at the end."""
    async with Client(server.port) as client:
        await client.inbox.next(ag.Connected)
        joined = await server.inbox.next(ev.Joined)
        yield client
        assert server.server.send(joined.message.node.node_id, PLAN)
        assert await client.inbox.next(t.Plan) == PLAN
        client.client.send(t.Succeeded(1, 0))
        assert (await server.inbox.next(ev.FromAgent)).message == t.Succeeded(1, 0)
        assert server.inbox.empty() and client.inbox.empty()


@story
async def test_what_is_pushed_before_a_drop_arrives() -> None:
    async with Server() as server, Client(server.port) as client:
        await client.inbox.next(ag.Connected)
        await server.inbox.next(ev.Joined)
        server.server.send("n0", t.Refused(95, "not wanted"))
        server.server.drop("n0")
        assert (await client.inbox.next(t.Refused)).reason == "not wanted"
        assert "closed" in (await client.inbox.next(ag.Disconnected)).why


@story
async def test_second_stream_of_the_same_agent_ends_the_first() -> None:
    async with Server() as server, Raw(server.port) as first, Raw(server.port) as second:
        for raw in (first, second):
            await raw.greet()
            await raw.say(_register(NODE))
            await server.inbox.next(ev.Joined)
        assert await first.hear() is None
        server.server.send("n0", PLAN)
        assert (await second.hear()).WhichOneof("what") == "plan"
        assert server.inbox.empty()  # it has not left


@pytest.mark.parametrize(
    ("signum", "keepalive", "least_s"), [(signal.SIGKILL, SLOW, 0.0), (signal.SIGSTOP, (0.5, 0.5), 0.3)]
)
@story
async def test_a_killed_client_is_lost_at_once_and_a_stopped_one_within_the_keepalive(
    signum: signal.Signals, keepalive: tuple[float, float], least_s: float
) -> None:
    async with Server(keepalive=keepalive) as server:
        with Process("client", server.port, keepalive) as peer:
            await server.inbox.next(ev.Joined)
            peer.process.send_signal(signum)
            since_s = time.monotonic()
            assert (await server.inbox.next(ev.Lost)).node_id == "n0"
            assert least_s < time.monotonic() - since_s < 5


@story
async def test_idle_peers_stay_connected_over_many_keepalives() -> None:
    keepalive = (0.3, 0.3)
    async with Server(keepalive=keepalive) as server, Client(server.port, keepalive=keepalive) as client:
        await client.inbox.next(ag.Connected)
        await server.inbox.next(ev.Joined)
        with pytest.raises(asyncio.TimeoutError):
            await server.inbox.next(ev.Lost, 1.5)
        assert client.inbox.empty()


@story
async def test_a_stopped_server_is_found_again_and_a_killed_ones_successor_too() -> None:
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
                await client.inbox.next(ag.Connected)
                await server.inbox.next(ev.Joined)


@story
async def test_peer_that_takes_nothing_is_lost() -> None:
    """It keeps its stream open and answers keepalives, but never reads."""
    async with Server() as server, Raw(server.port) as slow:
        await slow.greet()
        await slow.say(_register(NODE))
        await server.inbox.next(ev.Joined)
        message = t.Stop(1, 0, "x" * 4000)
        for _ in range(40 * QUEUE_LENGTH):
            if not server.inbox.empty():
                break
            server.server.send("n0", message)
            await asyncio.sleep(0.0005)  # so slowly that the network's own buffers fill up before our queue does
        lost = await server.inbox.next(ev.Lost)
        assert f"did not take {QUEUE_LENGTH} messages" in lost.why


def _register(node: t.Node) -> pb.FromAgent:
    from nvrx_slurm.control.codec import from_agent

    return from_agent(t.Register(node, 1))


# --- strangers ------------------------------------------------------------------------------------------------------


async def _refusal(raw: Raw) -> str:
    answer = await raw.hear()
    assert answer is not None and answer.WhichOneof("what") == "refused", answer
    assert answer.refused.code == 95
    assert await raw.hear() is None  # and the stream is closed
    return answer.refused.reason


HELLO = pb.Hello(version=auth.VERSION, nonce=b"n" * 16, job=JOB)


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (pb.FromAgent(hello=pb.Hello(version=99, nonce=b"n" * 16, job=JOB)), "speaks protocol 99, this coordinator 1"),
        (pb.FromAgent(hello=pb.Hello(version=1, nonce=b"n" * 16, job="other")), "belongs to another job"),
        (pb.FromAgent(), "did not send its hello"),
        (pb.FromAgent(proof=pb.Proof(proof=b"p")), "did not send its hello"),
        (_register(NODE), "did not send its hello"),
        (pb.FromAgent(end_job=pb.EndJob(code=0, reason="stop")), "did not send its hello"),
    ],
)
@story
async def test_wrong_beginnings_are_refused_with_a_reason(first: pb.FromAgent, why: str) -> None:
    async with Server() as server, good_agent(server), Raw(server.port) as raw:
        await raw.say(first)
        assert why in await _refusal(raw)
        assert any("refused a connection" in line and why in line for line in server.said)


@pytest.mark.parametrize("nonce", [b"", b"n", b"n" * 15, b"n" * 17, b"n" * 100_000])
@story
async def test_nonces_of_a_wrong_length_are_refused(nonce: bytes) -> None:
    async with Server() as server, good_agent(server), Raw(server.port) as raw:
        await raw.say(pb.FromAgent(hello=pb.Hello(version=1, nonce=nonce, job=JOB)))
        answer = await raw.hear()
        assert answer is not None
        if answer.WhichOneof("what") == "challenge":
            proof = auth.proof(TOKEN, "agent", JOB, nonce, answer.challenge.nonce)
            await raw.say(pb.FromAgent(proof=pb.Proof(proof=proof)))
            assert "nonce of a wrong length" in await _refusal(raw)


@story
async def test_wrong_token_and_replayed_or_reflected_proofs_are_refused() -> None:
    async with Server() as server, good_agent(server):
        async with Raw(server.port) as raw:
            await raw.greet(token="wrong")
            assert "does not hold this job's token" in await _refusal(raw)
        old = auth.proof(TOKEN, "agent", JOB, HELLO.nonce, b"c" * 16)  # was right for the challenge c...c
        for reflect in (False, True):
            async with Raw(server.port) as raw:
                await raw.say(pb.FromAgent(hello=HELLO))
                challenge = (await raw.hear()).challenge
                given = challenge.proof if reflect else old
                await raw.say(pb.FromAgent(proof=pb.Proof(proof=given)))
                assert "does not hold this job's token" in await _refusal(raw)


@story
async def test_authenticated_agent_that_breaks_the_protocol_is_lost_and_nothing_else() -> None:
    async with Server() as server, good_agent(server):
        for number, bad in enumerate([_register(NODE), pb.FromAgent(), pb.FromAgent(hello=HELLO), b"\xff" * 50]):
            async with Raw(server.port) as raw:
                await raw.greet()
                await raw.say(_register(replace(NODE, node_id=f"bad{number}", infra_rank=5)))
                await server.inbox.next(ev.Joined)
                await raw.say(bad)
                assert (await server.inbox.next(ev.Lost)).node_id == f"bad{number}"


@story
async def test_a_stream_without_a_proof_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HANDSHAKE_TIMEOUT_S", 0.5)
    async with Server() as server, good_agent(server), Raw(server.port) as raw, Raw(server.port) as garbage:
        await garbage.say(b"\xff" * 50)
        assert await garbage.hear() is None
        await raw.say(pb.FromAgent(hello=HELLO))
        assert (await raw.hear()).WhichOneof("what") == "challenge"
        assert "in time" in await _refusal(raw)


# --- fake coordinators and foreign listeners --------------------------------------------------------------------------


class Fake:
    """A gRPC server that claims to be the coordinator; `answer` is what it says to a hello."""

    def __init__(self, answer: pb.FromCoordinator) -> None:
        self.heard: list[str] = []
        self._answer = answer
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        handler = grpc.stream_stream_rpc_method_handler(
            self._session, pb.FromAgent.FromString, pb.FromCoordinator.SerializeToString
        )
        service = grpc.method_handlers_generic_handler("nvrx.control.v1.Control", {"Session": handler})
        self._server.add_generic_rpc_handlers((service,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def _session(self, _: object, context: grpc.aio.ServicerContext) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            self.heard.append(message.WhichOneof("what"))
            await context.write(self._answer)

    async def __aenter__(self) -> Fake:
        await self._server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._server.stop(0)


@pytest.mark.parametrize(
    "answer",
    [
        pb.FromCoordinator(challenge=pb.Challenge(version=1, nonce=b"c" * 16, proof=b"p" * 32)),
        pb.FromCoordinator(challenge=pb.Challenge(version=1, nonce=b"", proof=b"")),
        pb.FromCoordinator(refused=pb.Refused(code=95, reason="x" * 5000)),
        pb.FromCoordinator(finish=pb.Finish(code=0, reason="all done")),
        pb.FromCoordinator(),
    ],
)
@story
async def test_fake_coordinator_gets_no_proof_and_the_agent_goes_on(answer: pb.FromCoordinator) -> None:
    async with Fake(answer) as fake, Server() as server, Client(fake.port, server.port) as client:
        await client.inbox.next(ag.Connected)
        await server.inbox.next(ev.Joined)
        assert fake.heard == ["hello"]  # a nonce, the job's name, and nothing that the token was used for


def test_proof_of_the_agent_cannot_serve_as_the_coordinators() -> None:
    nonces = b"a" * 16, b"b" * 16
    assert auth.proof(TOKEN, "agent", JOB, *nonces) != auth.proof(TOKEN, "coordinator", JOB, *nonces)
    assert auth.proof(TOKEN, "agent", JOB, *nonces) != auth.proof(TOKEN, "agent", JOB, *reversed(nonces))


async def _mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(100)
    writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    writer.close()


@pytest.mark.parametrize("kind", [_mute, _http])
@story
async def test_foreign_listener_on_the_first_port(kind: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides go on to the next candidate, whatever has the first."""
    monkeypatch.setattr(client_module, "HANDSHAKE_TIMEOUT_S", 0.7)
    foreign = await asyncio.start_server(kind, "127.0.0.1", 0)  # type: ignore[arg-type]
    taken = foreign.sockets[0].getsockname()[1]
    async with Server(ports=(taken, 0)) as server:
        assert server.port != taken
        async with Client(taken, server.port) as client:
            await client.inbox.next(ag.Connected)
            await server.inbox.next(ev.Joined)
    foreign.close()


@story
async def test_no_port_left_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NvrxError, match=rf"ports {port}, {port} are taken"):
            async with Server(ports=(port, port)):
                raise AssertionError("unreachable")


@story
async def test_client_that_finds_nobody_keeps_looking_and_can_be_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with Client(port) as client:
        while f"127.0.0.1:{port}" not in client.client.last_problem:
            await asyncio.sleep(0.01)
        assert client.inbox.empty()
        async with Server(ports=(port,)) as server:
            await client.inbox.next(ag.Connected)
            await server.inbox.next(ev.Joined)


@pytest.mark.parametrize(
    ("host", "found", "address"),
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
async def test_a_name_never_means_loopback_only(
    host: str, found: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def getaddrinfo(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (one, 0)) for one in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await server_module.resolve(host) == address
