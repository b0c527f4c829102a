"""The agent's end: finds the coordinator, proves that it holds the token, and keeps one stream open."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from nvrx_slurm import types as t
from nvrx_slurm.control import auth, codec
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control.options import (
    GET_TOKEN,
    HANDSHAKE_TIMEOUT_S,
    QUEUE_LENGTH,
    SESSION,
    channel_options,
)
from nvrx_slurm.core.job import agent_events as ev
from nvrx_slurm.errors import AuthError, ProtocolError

_FIRST_RETRY_S, _LAST_RETRY_S, _RETRY_GROWTH = 0.01, 1.0, 1.6
_RESOLVE_TIMEOUT_S = 3.0
_BROKEN = (grpc.RpcError, grpc.aio.BaseError)  # AioRpcError, a stream's usual end, is none of the latter
_PROBLEMS_SAID = 8


class _NotThere(Exception):
    """This endpoint is not (yet) our coordinator; try the next one."""


class ControlClient:
    """One agent's stream. `post` gets the agent's events: Connected, messages, Disconnected.

    `endpoints`: candidates as (host, port), tried in order. `token` "" = ask for it with `credentials`.
    `say` gets each different problem of a handshake once.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        job: str,
        token: str,
        post: Callable[[Any], None],
        keepalive: tuple[float, float],
        credentials: auth.Credentials | None = None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._endpoints = list(endpoints)
        self._job = job
        self._token = token
        self._post = post
        self._options = channel_options(*keepalive)
        self._credentials = credentials
        self._say = say
        self._said: set[str] = set()
        self._queue: asyncio.Queue[pb.FromAgent] = asyncio.Queue(QUEUE_LENGTH)
        self._open = False
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self.last_problem = "not tried yet"

    def start(self) -> None:
        """Begin to look for the coordinator (on the running loop)."""
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(_report_defect)

    def send(self, message: t.AgentMessage) -> None:
        """Queue a message; without a stream it is dropped: the next Register tells what matters."""
        if self._open and not self._queue.full():
            self._queue.put_nowait(codec.from_agent(message))

    async def close(self, grace_s: float) -> None:
        """Deliver what is queued (at most `grace_s` seconds), then close the stream."""
        if self._task is None:
            return
        if self._open:
            try:
                await asyncio.wait_for(self._queue.join(), grace_s)
            except asyncio.TimeoutError:
                self.last_problem = "the last messages could not be delivered"
        self._closing = True
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=grace_s)

    # --- finding the coordinator ----------------------------------------------------------------------

    async def _run(self) -> None:
        delay = _FIRST_RETRY_S
        # up to Python 3.11 wait_for() may lose a cancellation that coincides with the end of its awaitable
        while not self._closing:
            for host, port in self._endpoints:
                try:
                    await self._try(host, port)
                    delay = _FIRST_RETRY_S
                except _NotThere as why:
                    self.last_problem = f"{host}:{port}: {why}"
            await asyncio.sleep(delay * random.uniform(0.7, 1.3))
            delay = min(delay * _RETRY_GROWTH, _LAST_RETRY_S)

    async def _try(self, host: str, port: int) -> None:
        """One endpoint: returns when a stream to our coordinator has ended; raises _NotThere if it never began."""
        *others, last = await _targets(host, port)
        for target in others:
            with contextlib.suppress(_NotThere):
                return await self._try_target(host, port, target)
        await self._try_target(host, port, last)

    async def _try_target(self, host: str, port: int, target: str) -> None:
        channel = grpc.aio.insecure_channel(target, options=self._options)
        try:
            if not self._token:
                self._token = await self._ask_for_token(channel)
            stream = channel.stream_stream(
                SESSION,
                request_serializer=pb.FromAgent.SerializeToString,
                response_deserializer=pb.FromCoordinator.FromString,
            )()
            await asyncio.wait_for(self._handshake(stream), HANDSHAKE_TIMEOUT_S)
            await self._talk(stream)
        except (AuthError, ProtocolError) as error:
            self._say_once(f"{host}:{port} is not our coordinator: {error}; looking on")
            raise _NotThere(str(error)) from None
        except (*_BROKEN, asyncio.TimeoutError) as error:
            raise _NotThere(_sentence(error)) from None
        finally:
            await channel.close()

    def _say_once(self, sentence: str) -> None:
        """The listener may be a stranger, so the search goes on; each problem is said once."""
        if sentence not in self._said and len(self._said) < _PROBLEMS_SAID:
            self._said.add(sentence)
            self._say(sentence)

    async def _ask_for_token(self, channel: grpc.aio.Channel) -> str:
        if self._credentials is None:
            raise AuthError(f"{auth.TOKEN_ENV} is not set and there is no MUNGE to get the job's token with")
        call = channel.unary_unary(
            GET_TOKEN,
            request_serializer=pb.TokenRequest.SerializeToString,
            response_deserializer=pb.TokenReply.FromString,
        )
        request = pb.TokenRequest(job=self._job, credential=auth.seal_request(self._credentials, self._job))
        reply = await call(request, timeout=HANDSHAKE_TIMEOUT_S)
        return auth.read_answer(self._credentials, self._job, reply.credential)

    async def _handshake(self, stream: Any) -> None:
        nonce = auth.new_nonce()
        await stream.write(pb.FromAgent(hello=pb.Hello(version=auth.VERSION, nonce=nonce, job=self._job)))
        envelope = await stream.read()
        if envelope is grpc.aio.EOF:
            raise ProtocolError("the stream ended in the handshake")
        what = envelope.WhichOneof("what")
        if what == "refused":
            raise AuthError(envelope.refused.reason[:400])
        if what != "challenge":
            raise ProtocolError("the coordinator did not send its challenge")
        challenge = envelope.challenge
        auth.check(self._token, "coordinator", self._job, challenge.nonce, nonce, challenge.proof)
        mine = auth.proof(self._token, "agent", self._job, nonce, challenge.nonce)
        await stream.write(pb.FromAgent(proof=pb.Proof(proof=mine)))

    # --- the open stream ---------------------------------------------------------------------------------

    async def _talk(self, stream: Any) -> None:
        while not self._queue.empty():  # of the last stream
            self._queue.get_nowait()
            self._queue.task_done()
        self._open = True
        self._post(ev.Connected())
        writer = asyncio.ensure_future(self._write(stream))
        why = "the coordinator closed the stream"
        try:
            while True:
                envelope = await stream.read()
                if envelope is grpc.aio.EOF:
                    break
                self._post(codec.decode(envelope))
        except (*_BROKEN, ProtocolError) as error:
            why = _sentence(error)
        finally:
            self._open = False
            writer.cancel()
        self.last_problem = why
        self._post(ev.Disconnected(why))

    async def _write(self, stream: Any) -> None:
        while True:
            message = await self._queue.get()
            try:
                await stream.write(message)
            except (*_BROKEN, asyncio.InvalidStateError):
                return  # the reader sees the same break and reports it
            finally:
                self._queue.task_done()


async def _targets(host: str, port: int) -> list[str]:
    """The addresses of `host` in gRPC's form ("ipv4:1.2.3.4:5,6.7.8.9:5"), one target per family, preferred first.

    The system resolves the name, because gRPC's resolver ignores parts of nsswitch.conf. Raises _NotThere.
    """
    resolving = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    try:
        found = await asyncio.wait_for(resolving, _RESOLVE_TIMEOUT_S)
    except (OSError, asyncio.TimeoutError) as error:
        raise _NotThere(str(error) or f"it did not resolve within {_RESOLVE_TIMEOUT_S:g} s") from None
    families: dict[str, list[str]] = {}
    for family, _, _, _, address in found:
        scheme, shown = ("ipv6", f"[{address[0]}]") if family == socket.AF_INET6 else ("ipv4", address[0])
        families.setdefault(scheme, []).append(f"{shown}:{port}")
    return [f"{scheme}:{','.join(addresses)}" for scheme, addresses in families.items()]


def _report_defect(task: asyncio.Task[None]) -> None:
    """The task ends only by cancellation. Report any other end at once: no code awaits its result."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        task.get_loop().call_exception_handler({"message": "the control client broke", "exception": error})


def _sentence(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower().replace('_', ' ')}: {error.details()}"
    return str(error) or "no answer in time"
