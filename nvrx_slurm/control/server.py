"""The coordinator's end: accepts agents, checks that they belong to the job, and turns streams into events.

Everything runs on the program's one asyncio loop. A stream that breaks, goes silent (gRPC keepalive) or does not take
messages posts `Lost`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import urllib.parse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from nvrx_slurm import types as t
from nvrx_slurm.control import auth, codec
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control.options import HANDSHAKE_TIMEOUT_S, QUEUE_LENGTH, SERVICE, server_options
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.errors import AuthError, ExitCode, ProtocolError, UsageError

_BROKEN = (grpc.RpcError, grpc.aio.BaseError)


class _Session:
    """One agent's stream: a bounded queue of messages to push."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.queue: asyncio.Queue[pb.FromCoordinator | None] = asyncio.Queue(QUEUE_LENGTH)
        self.why_lost = "its connection broke or went silent"
        self.ended = asyncio.Event()

    def push(self, message: pb.FromCoordinator | None) -> None:
        """Queue a message (None = close). A peer whose queue is full is lost."""
        try:
            self.queue.put_nowait(message)
        except asyncio.QueueFull:
            self.end(f"its agent did not take {QUEUE_LENGTH} messages")

    def end(self, why: str = "") -> None:
        """Close the stream at once, without reading or writing the rest. `why`: the cause, if it is known."""
        if not self.ended.is_set():
            self.why_lost = why or self.why_lost
            self.ended.set()


class ControlServer:
    """gRPC server of the coordinator. `post` gets the coordinator's events; `say` gets sentences for the log."""

    def __init__(
        self,
        job: str,
        token: str,
        post: Callable[[Any], None],
        say: Callable[[str], None],
        keepalive: tuple[float, float],
        credentials: auth.Credentials | None = None,
    ) -> None:
        self._job = job
        self._token = token
        self._post = post
        self._say = say
        self._credentials = credentials
        self._sessions: dict[str, _Session] = {}
        self._refused = 0
        self._server = grpc.aio.server(options=server_options(*keepalive))
        handlers = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, pb.FromAgent.FromString, pb.FromCoordinator.SerializeToString
            ),
            "GetToken": grpc.unary_unary_rpc_method_handler(
                self._get_token, pb.TokenRequest.FromString, pb.TokenReply.SerializeToString
            ),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    async def start(self, address: str, ports: list[int]) -> str:
        """Listen on the first free one of `ports` (0 = any) at the IP `address`; returns "address:port".

        Raises UsageError when none is free.
        """
        host = f"[{address}]" if ":" in address else address
        for port in ports:
            if not _is_free(address, port):  # gRPC would notice it, too, but prints an error
                continue
            try:
                bound = self._server.add_insecure_port(f"{host}:{port}")
            except RuntimeError:
                continue
            if bound:
                await self._server.start()
                return f"{host}:{bound}"
        raise UsageError(
            f"the coordinator cannot listen on {address}: ports {', '.join(map(str, ports))} are taken or the address"
            f" is not this host's; give another with --rdzv-endpoint HOST:PORT"
        )

    def send(self, node_id: str, message: t.CoordinatorMessage) -> bool:
        """Push to one agent; False when it is not connected here."""
        session = self._sessions.get(node_id)
        if session is not None:
            session.push(codec.from_coordinator(message))
        return session is not None

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """Push to every agent."""
        for node_id in list(self._sessions):
            self.send(node_id, message)

    def drop(self, node_id: str) -> None:
        """Close one agent's stream after what was pushed before."""
        session = self._sessions.pop(node_id, None)
        if session is not None:
            session.push(None)

    async def close(self, grace_s: float) -> None:
        """Stop serving; open streams get `grace_s` seconds to take the queued messages."""
        for node_id in list(self._sessions):
            self.drop(node_id)
        await self._server.stop(grace_s)

    # --- one stream ----------------------------------------------------------------------------------

    async def _session(self, _requests: Any, context: Any) -> None:
        try:
            register = await asyncio.wait_for(self._handshake(context), HANDSHAKE_TIMEOUT_S)
        except (AuthError, ProtocolError, asyncio.TimeoutError) as error:
            await self._refuse(context, error)
            return
        if register is None:
            return
        session = _Session(register.node.node_id)
        older = self._sessions.get(session.node_id)
        self._sessions[session.node_id] = session
        if older is not None:
            older.end()
        self._post(ev.Joined(register))
        tasks = [asyncio.ensure_future(half(session, context)) for half in (self._read, self._write)]
        try:
            # not the reader's end: a peer that takes no message blocks the writer while its reader waits
            await session.ended.wait()
        finally:
            for task in tasks:
                task.cancel()
            if self._sessions.get(session.node_id) is session:
                del self._sessions[session.node_id]
                self._post(ev.Lost(session.node_id, session.why_lost))

    async def _handshake(self, context: Any) -> t.Register | None:
        hello = await self._expect(context, "hello")
        if hello is None:
            return None
        if hello.job != self._job:
            raise AuthError("the agent belongs to another job")
        if hello.version != auth.VERSION:
            raise ProtocolError(f"the agent speaks protocol {hello.version}, this coordinator {auth.VERSION}")
        nonce = auth.new_nonce()
        mine = auth.proof(self._token, "coordinator", self._job, nonce, hello.nonce)
        await context.write(pb.FromCoordinator(challenge=pb.Challenge(version=auth.VERSION, nonce=nonce, proof=mine)))
        answer = await self._expect(context, "proof")
        if answer is None:
            return None
        auth.check(self._token, "agent", self._job, hello.nonce, nonce, answer.proof)
        envelope = await context.read()
        if envelope is grpc.aio.EOF:
            return None
        register = codec.decode(envelope)
        if not isinstance(register, t.Register):
            raise ProtocolError("the agent did not register first")
        return _with_address(register, context.peer())

    async def _expect(self, context: Any, what: str) -> Any:
        envelope = await context.read()
        if envelope is grpc.aio.EOF:
            return None
        if envelope.WhichOneof("what") != what:
            raise ProtocolError(f"the agent did not send its {what}")
        return getattr(envelope, what)

    async def _refuse(self, context: Any, error: Exception) -> None:
        """Close a stream that is not of this job; the first five are said."""
        why = str(error) or "it did not finish the handshake in time"
        self._refused += 1
        if self._refused <= 5:
            self._say(f"refused a connection from {context.peer()}: {why}")
        refusal = pb.Refused(code=ExitCode.NODE_REFUSED, reason=why)
        await context.write(pb.FromCoordinator(refused=refusal))

    async def _read(self, session: _Session, context: Any) -> None:
        try:
            while (envelope := await context.read()) is not grpc.aio.EOF:
                message = codec.decode(envelope)
                if isinstance(message, t.Register):
                    raise ProtocolError("it registers twice")
                if session is self._sessions.get(session.node_id):
                    self._post(ev.FromAgent(session.node_id, message))
            session.end()
        except Exception as error:  # also bytes that are no message, for which gRPC has no error class
            session.end(f"its agent broke the protocol: {error}")

    async def _write(self, session: _Session, context: Any) -> None:
        try:
            while (message := await session.queue.get()) is not None:
                await context.write(message)
            session.end()
        except (*_BROKEN, asyncio.InvalidStateError):
            return  # the reader sees the same break and reports it

    # --- the token, for agents that Slurm started without one ------------------------------------------

    async def _get_token(self, request: pb.TokenRequest, context: Any) -> pb.TokenReply:
        if self._credentials is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this coordinator hands out no token")
        assert self._credentials is not None
        try:
            sealed = auth.answer_request(self._credentials, self._job, self._token, request.credential)
        except AuthError as error:
            self._refused += 1
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        return pb.TokenReply(credential=sealed)


def _with_address(register: t.Register, peer: str) -> t.Register:
    """Fill in an address that the agent does not know: its stream's source ("ipv4:10.0.0.7:4711")."""
    if register.node.addr:
        return register
    scheme, _, rest = urllib.parse.unquote(peer).partition(":")
    if scheme not in ("ipv4", "ipv6"):
        raise ProtocolError(f"the agent named no address and its stream comes from {peer!r}")
    address = rest.rpartition(":")[0].strip("[]")
    return replace(register, node=replace(register.node, addr=address))


def _is_free(address: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()  # with SO_REUSEADDR, as gRPC does
    except OSError:
        return False
    return True


async def resolve(host: str) -> str:
    """The IP address to listen on so that `host` reaches it. Raises UsageError if it does not resolve.

    A name that this machine resolves to loopback only (Debian's /etc/hosts has its name at 127.0.1.1) has another
    address on the other nodes: then it is 0.0.0.0 or ::. "localhost" and IP addresses are taken as they are.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"the coordinator's host name {host} does not resolve: {error.strerror}") from None
    addresses = [str(entry[4][0]) for entry in found]
    if host == "localhost" or host in addresses:
        return addresses[0]
    reachable = [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    return reachable[0] if reachable else "::" if ":" in addresses[0] else "0.0.0.0"
