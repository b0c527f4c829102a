"""The coordinator's end: accepts agents of the job, keeps strangers small, and turns streams into events.

Everything runs on the program's one asyncio loop. A stream that breaks, goes silent or does not take messages posts
`Lost`. An agent is silent when it has sent nothing, not even a beat, for the keepalive's interval and timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.control import auth, codec
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control.door import HANDSHAKE_TIMEOUT_S, PLACES, Door
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import BEAT, Stream, receive_frame, send_frame
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.machine import earliest
from nvrx_slurm.errors import AuthError, ExitCode, ProtocolError, UsageError
from nvrx_slurm.system import bounded

_BACKLOG = 4096  # connections that the kernel accepts before us
_ACCEPTS = 64  # at a time, before the loop does something else
_ACCEPT_PAUSE_S = 0.5  # when no descriptor is left
_FULL_PAUSE_S = 0.1  # after a turn in which strangers had to make room: they may come back as fast as they like
_MOST_STRANGERS = 2048
_LAST_WORDS_S = 2.0  # for a peer to take its last message
_REFUSALS_SAID = 5
_RESOLVE_TIMEOUT_S = 5.0
_TLS_HANDSHAKE = b"\x16"  # first byte of a TLS record; that of a short frame is 0


class _Silent(ConnectionError):
    """Nothing was heard for too long."""


class _Peer:
    """One connection: a stranger until it has registered. Owner of its stream."""

    def __init__(self, server: ControlServer, connection: socket.socket, address: str) -> None:
        self.server = server
        self.socket = connection
        self.address = address
        self.stream: Stream | None = None
        self.greeted = False
        self.node_id = ""  # "" = not registered
        self.task: asyncio.Task[None] | None = None  # hands over the token
        self._ended = False

    def proved(self) -> None:
        """It holds the token; its hello comes next."""

    def received(self, frame: bytes) -> None:
        """A frame."""
        self.server.on_frame(self, frame)

    def ended(self, why: Exception) -> None:
        """The end."""
        self.server.on_end(self, why)

    def close(self, why: Exception) -> None:
        """End this connection, whatever it has become."""
        if self.stream is not None:
            self.stream.abort(why)
        elif not self._ended:
            self._ended = True
            asyncio.get_running_loop().remove_reader(self.socket.fileno())
            self.socket.close()
            self.ended(why)


class ControlServer:
    """The members' connections. `post` gets the coordinator's events; `say` gets sentences for the log.

    `keepalive`: interval and timeout, seconds. `credentials`: hand the token to agents that prove their user by them.
    """

    def __init__(
        self,
        job: str,
        token: str,
        post: Callable[[Any], None],
        say: Callable[[str], None],
        keepalive: tuple[float, float],
        credentials: auth.Credentials | None = None,
    ) -> None:
        self._job, self._token = job, token
        self._post = post
        self._say = say
        self._silence_s = sum(keepalive)
        self._credentials = credentials
        self._one_by_one = asyncio.Lock()  # requests to MUNGE
        self._identity = identity(token, job)
        strangers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4  # descriptors are for the job first
        self._door: Door[_Peer] = Door(max(2 * PLACES, min(_MOST_STRANGERS, strangers)))
        self._members: dict[str, _Peer] = {}
        self._heard: dict[_Peer, float] = {}  # when a member was heard last, oldest first
        self._leaving: set[_Peer] = set()
        self._all_left = asyncio.Event()
        self._where: Callable[[], t.Elsewhere] | None = None
        self._refusals = 0
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tending = False

    def listen_to(self, post: Callable[[Any], None], where: Callable[[], t.Elsewhere]) -> None:
        """From now on `post` gets the events. `where()` answers agents that ask for the coordinator."""
        self._post, self._where = post, where

    def heard_at(self, node_id: str) -> float:
        """When this member was heard last (monotonic seconds)."""
        peer = self._members.get(node_id)
        return self._heard.get(peer, 0.0) if peer is not None else 0.0

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    async def start(self, address: str, ports: list[int]) -> str:
        """Listen on the first free one of `ports` (0 = any) at the IP `address`; returns "address:port".

        Raises UsageError when none is free.
        """
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        for port in ports:
            with contextlib.suppress(OSError, ValueError):  # ValueError: "::" where there is no IPv6
                self._listener = socket.create_server(
                    (address, port), family=family, backlog=_BACKLOG, dualstack_ipv6=address == "::"
                )
                self._listener.setblocking(False)
                self._loop.add_reader(self._listener, self._accept)
                host = f"[{address}]" if ":" in address else address
                return f"{host}:{self._listener.getsockname()[1]}"
        raise UsageError(
            f"the coordinator cannot listen on {address}: ports {', '.join(map(str, ports))} are taken or the address"
            f" is not this host's; give another with --rdzv-endpoint HOST:PORT"
        )

    def send(self, node_id: str, message: t.CoordinatorMessage) -> bool:
        """Push to one agent; False when it is not connected here."""
        return bool(self._push((self._members.get(node_id),), message))

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """Push to every agent."""
        self._push(list(self._members.values()), message)

    def _push(self, peers: Iterable[_Peer | None], message: t.CoordinatorMessage) -> int:
        frame = codec.from_coordinator(message).SerializeToString()
        streams = [peer.stream for peer in peers if peer is not None and peer.stream is not None]
        for stream in streams:
            stream.send(frame)
        return len(streams)

    def drop(self, node_id: str) -> None:
        """Close one agent's stream after what was pushed before."""
        peer = self._members.pop(node_id, None)
        if peer is not None and peer.stream is not None:
            self._heard.pop(peer, None)
            self._leaving.add(peer)
            peer.stream.finish(_LAST_WORDS_S)

    async def close(self, grace_s: float) -> None:
        """Stop serving; open streams get `grace_s` seconds to take what was pushed."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for peer in self._door.guests():
            peer.close(ConnectionError("the coordinator ends"))
        for node_id in list(self._members):
            self.drop(node_id)
        await self.all_left(grace_s)
        for peer in list(self._leaving):
            peer.close(ConnectionError("the coordinator ends"))
        if self._timer is not None:
            self._timer.cancel()

    async def all_left(self, grace_s: float) -> None:
        """Wait until those that were dropped have closed their ends; at most `grace_s` seconds."""
        if self._leaving:
            self._all_left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._all_left.wait(), grace_s)

    # --- strangers -------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        full = False
        for _ in range(_ACCEPTS):
            try:
                connection, source = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except OSError as error:  # no descriptor (EMFILE, ENFILE) or no memory: members must not notice
                self._say_refusal(f"cannot accept connections: {error.strerror}; trying again")
                self._pause(_ACCEPT_PAUSE_S)
                break
            connection.setblocking(False)
            address = source[0].removeprefix("::ffff:")
            for peer in self._door.arrive(_Peer(self, connection, address), address, self._loop.time()):
                full = True
                peer.close(ConnectionError("newer connections took its place"))
        if full:
            self._pause(_FULL_PAUSE_S)
        self._tend()

    def _pause(self, seconds: float) -> None:
        assert self._listener is not None
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _tend_soon(self) -> None:
        if not self._tending:
            self._tending = True
            self._loop.call_soon(self._tend)

    def _tend(self) -> None:
        """Let strangers in or out, drop silent members, and set the timer for the next time."""
        self._tending = False
        if self._listener is None:
            return
        now = self._loop.time()
        for peer in self._door.late(now):
            peer.close(ProtocolError("it did not finish the handshake in time"))
        while self._heard and (oldest := next(iter(self._heard))) and self._heard[oldest] + self._silence_s <= now:
            oldest.close(_Silent(f"it was silent for {self._silence_s:g} s"))
        for peer in self._door.admit(now):
            self._begin(peer)
        silent = next((since + self._silence_s for since in self._heard.values()), None)
        due = earliest(self._door.deadline(), silent)
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._tend)

    def _begin(self, peer: _Peer) -> None:
        """The first byte of an admitted connection tells what it wants."""
        try:
            first = peer.socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return self._loop.add_reader(peer.socket.fileno(), self._begin, peer)
        except OSError as error:
            return peer.close(error)
        if first == _TLS_HANDSHAKE:
            with contextlib.suppress(OSError):
                peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.stream = Stream(peer.socket, self._identity, True, peer)
        elif first == b"\0" and self._credentials is not None:
            self._loop.remove_reader(peer.socket.fileno())
            peer.task = self._loop.create_task(self._hand_over_token(peer, self._credentials))
        elif first == b"\0":
            peer.close(AuthError("it asks for a token, and this coordinator hands out none"))
        else:
            peer.close(ProtocolError("it speaks another protocol") if first else ConnectionError("it left"))

    async def _hand_over_token(self, peer: _Peer, credentials: auth.Credentials) -> None:
        """For agents that Slurm started without a token. MUNGE is asked in a thread, one request at a time."""
        why: Exception = ConnectionError("it has its answer")
        try:
            data = await asyncio.wait_for(receive_frame(peer.socket), HANDSHAKE_TIMEOUT_S)
            request = codec.parse(pb.TokenRequest, data)
            async with self._one_by_one:
                sealed = await auth.in_thread(
                    lambda: auth.answer_request(credentials, self._job, self._token, request.credential)
                )
            reply = pb.TokenReply(credential=sealed).SerializeToString()
            await asyncio.wait_for(send_frame(peer.socket, reply), HANDSHAKE_TIMEOUT_S)
        except (AuthError, ProtocolError, OSError, asyncio.TimeoutError) as error:
            why = error
        peer.close(why)

    # --- members ---------------------------------------------------------------------------------------------

    def on_frame(self, peer: _Peer, frame: bytes) -> None:
        """A frame of a peer that holds the token. Raises ProtocolError."""
        if peer.node_id:
            self._heard.pop(peer, None)
            self._heard[peer] = self._loop.time()
            if frame == BEAT:
                assert peer.stream is not None
                return peer.stream.send(BEAT)
        envelope = codec.parse(pb.FromAgent, frame)
        if not peer.greeted:
            return self._greet(peer, envelope)
        message = codec.decode(envelope)
        if isinstance(message, t.Look) and not peer.node_id and self._where is not None:
            return self._send_on(peer, self._where())
        if isinstance(message, t.Register) == bool(peer.node_id):
            raise ProtocolError("it registers twice" if peer.node_id else "the agent did not register first")
        if isinstance(message, t.Register):
            return self._register(peer, message)
        if self._members.get(peer.node_id) is peer:
            self._post(ev.FromAgent(peer.node_id, message))

    def _greet(self, peer: _Peer, envelope: pb.FromAgent) -> None:
        if envelope.WhichOneof("what") != "hello":
            raise ProtocolError("the agent did not send its hello")
        peer.greeted = True
        if envelope.hello.version != auth.VERSION:
            why = f"the agent speaks protocol {envelope.hello.version}, this coordinator {auth.VERSION}"
            self._send_on(peer, t.Refused(ExitCode.COORDINATOR_LOST, f"{why}; install one version on all nodes"))
            self._say_refusal(f"refused {peer.address}: {why}")

    def _send_on(self, peer: _Peer, message: t.CoordinatorMessage) -> None:
        """The last message to a peer that does not register."""
        assert peer.stream is not None
        self._push((peer,), message)
        self._door.leave(peer, True, self._loop.time())
        self._leaving.add(peer)
        peer.stream.finish(_LAST_WORDS_S)

    def _register(self, peer: _Peer, register: t.Register) -> None:
        if not register.node.addr:  # the agent does not know it: its connection's source
            register = replace(register, node=replace(register.node, addr=peer.address))
        peer.node_id = register.node.node_id
        older = self._members.get(peer.node_id)
        self._members[peer.node_id] = peer
        self._heard[peer] = self._loop.time()
        if older is not None:
            older.close(ConnectionError("its agent connected again"))
        self._door.leave(peer, True, self._loop.time())
        self._tend_soon()
        self._post(ev.Joined(register))

    def on_end(self, peer: _Peer, why: Exception) -> None:
        """A connection has ended."""
        now = self._loop.time()
        self._heard.pop(peer, None)
        self._leaving.discard(peer)
        if not self._leaving:
            self._all_left.set()
        if peer.node_id:
            if self._members.get(peer.node_id) is peer:
                del self._members[peer.node_id]
                broke = "its agent broke the protocol: " if isinstance(why, ProtocolError) else ""
                self._post(ev.Lost(peer.node_id, f"{broke}{why}", isinstance(why, _Silent)))
            return
        if isinstance(why, (AuthError, ProtocolError)):
            self._say_refusal(f"refused a connection from {peer.address}: {why}")
        self._door.leave(peer, False, now)
        self._tend_soon()

    def _say_refusal(self, sentence: str) -> None:
        """Say the first few; strangers must not fill the log."""
        self._refusals += 1
        if self._refusals <= _REFUSALS_SAID:
            self._say(sentence)


async def resolve(host: str) -> str:
    """The IP address to listen on so that `host` reaches it. Raises UsageError if it does not resolve.

    A name that this machine resolves to loopback only (Debian's /etc/hosts has its name at 127.0.1.1) has another
    address on the other nodes: then it is 0.0.0.0 or ::. "localhost" and IP addresses are taken as they are.
    """
    try:
        found = await bounded.call_async(
            lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM), _RESOLVE_TIMEOUT_S, "the resolver"
        )
    except (OSError, bounded.Overrun) as error:
        why = getattr(error, "strerror", None) or error
        raise UsageError(f"the coordinator's host name {host} does not resolve: {why}") from None
    addresses = [str(entry[4][0]) for entry in found]
    if host == "localhost" or host in addresses:
        return addresses[0]
    reachable = [address for address in addresses if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    return reachable[0] if reachable else "::" if ":" in addresses[0] else "0.0.0.0"
