"""The coordinator's end: the members' connections. It turns streams into events.

Everything runs on the program's one asyncio loop. A stream that breaks, goes silent or does not take messages posts
`Lost`. An agent is silent when it has sent nothing, not even a beat, for the keepalive's interval and timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.control import auth
from nvrx_slurm.control.admission import Caller, Listener
from nvrx_slurm.control.handover import TokenServer
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.messages import FROM_AGENTS, FROM_COORDINATOR
from nvrx_slurm.control.stream import AGE, BEAT
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode, ProtocolError
from nvrx_slurm.system import bounded

_LAST_MESSAGE_S = 2.0  # for a peer to take its last message
_WITH_PLAN = (t.Activity.RUNNING, t.Activity.SUCCEEDED, t.Activity.STOPPING)


class _Silent(ConnectionError):
    """Nothing was heard for too long."""


class ControlServer:
    """The members' connections. `post` gets the coordinator's events; `say` gets sentences for the log.

    `keepalive`: interval and timeout, seconds. `credentials`: hand the token to agents that prove their user by them.
    `token` "": not known yet. Then no peer is let in before `adopt`.
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
        self._post = post
        self._silence_s = sum(keepalive)
        self._job = job
        self._tokens = TokenServer(credentials, job) if credentials is not None else None
        self.listener = Listener(self._on_frame, self._on_end, self._tokens, say)
        self.adopt(token)
        self._members: dict[str, Caller] = {}
        self._heard: dict[Caller, float] = {}  # when a member was heard last, oldest first
        self._leaving: set[Caller] = set()
        self._all_left = asyncio.Event()
        self._where: Callable[[], t.Elsewhere] | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the first member that may be silent

    @property
    def pem(self) -> str:
        """Key and certificate of the job."""
        return self.listener.identity.pem

    def adopt(self, token: str) -> None:
        """Have peers prove this token from now on; "": none can."""
        self.listener.identity = identity(token or auth.new_token(), self._job)
        if self._tokens is not None:
            self._tokens.token = token

    def listen_to(self, post: Callable[[Any], None], where: Callable[[], t.Elsewhere]) -> None:
        """Post events to `post` from now on. `where()` answers agents that ask for the coordinator."""
        self._post = post
        self._where = where

    def heard_at(self, node_id: str) -> float:
        """When this member was here, at least (monotonic seconds): what is received may have been under way."""
        peer = self._members.get(node_id)
        return peer.sent_s if peer is not None else 0.0

    async def start(self, address: str, ports: list[int]) -> str:
        """Listen on the first free one of `ports` (0 = any) at the IP `address`; returns "address:port".

        Raises UsageError when none is free.
        """
        self._loop = asyncio.get_running_loop()
        self.listener.open(address, ports)
        return f"{f'[{address}]' if ':' in address else address}:{self.listener.port}"

    def send(self, node_id: str, message: t.CoordinatorMessage) -> bool:
        """Push to one agent; False when it is not connected here."""
        return bool(self._push((self._members.get(node_id),), message))

    def send_all(self, message: t.CoordinatorMessage) -> None:
        """Push to every agent."""
        self._push(list(self._members.values()), message)

    def _push(self, peers: Iterable[Caller | None], message: t.CoordinatorMessage) -> int:
        frame = FROM_COORDINATOR.encode(message)
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
            peer.stream.finish(_LAST_MESSAGE_S)

    async def close(self, grace_s: float) -> None:
        """Stop serving; open streams get `grace_s` seconds to take what was pushed."""
        self.listener.close()
        for node_id in list(self._members):
            self.drop(node_id)
        await self.all_left(grace_s)
        for peer in list(self._leaving):
            peer.abort(ConnectionError("the coordinator ends"))
        if self._timer is not None:
            self._timer.cancel()

    async def all_left(self, grace_s: float) -> None:
        """Wait until those that were dropped have closed their ends; at most `grace_s` seconds."""
        if self._leaving:
            self._all_left.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._all_left.wait(), grace_s)

    # --- streams ---------------------------------------------------------------------------------------------

    def _on_frame(self, peer: Caller, frame: bytes) -> None:
        """A frame of a peer that holds the token. Raises ProtocolError."""
        if peer.node_id:
            self._heard.pop(peer, None)
            self._heard[peer] = self._loop.time()
            if len(frame) == AGE.size and not frame[0]:
                assert peer.stream is not None
                now, (age_s,) = self._loop.time(), AGE.unpack(frame)
                peer.sent_s = peer.answered_s + max(0.0, min(now - peer.answered_s, age_s))
                peer.answered_s = now
                return peer.stream.send(BEAT)
        message = FROM_AGENTS.decode(frame)
        if isinstance(message, t.Hello) == peer.greeted:
            raise ProtocolError(
                "the agent sent its hello twice"
                if peer.greeted
                else "the agent did not send its hello"
            )
        if isinstance(message, t.Hello):
            return self._greet(peer, message)
        if isinstance(message, t.WhoLeads) and not peer.node_id and self._where is not None:
            return self._send_on(peer, self._where())
        if isinstance(message, t.Register) == bool(peer.node_id):
            raise ProtocolError(
                "it registers twice" if peer.node_id else "the agent did not register first"
            )
        if isinstance(message, t.Register):
            return self._register(peer, message)
        if self._members.get(peer.node_id) is peer:
            self._post(ev.FromAgent(peer.node_id, message))

    def _greet(self, peer: Caller, hello: t.Hello) -> None:
        peer.greeted = True
        if hello.version != auth.VERSION:
            why = f"the agent speaks protocol {hello.version}, this coordinator {auth.VERSION}"
            self._send_on(
                peer,
                t.Refused(ExitCode.COORDINATOR_LOST, f"{why}; install one version on all nodes"),
            )
            self.listener.say_refusal(f"refused {peer.address}: {why}")

    def _send_on(self, peer: Caller, message: t.CoordinatorMessage) -> None:
        """The last message to a peer that does not register."""
        assert peer.stream is not None
        self._push((peer,), message)
        self.listener.admitted(peer)
        self._leaving.add(peer)
        peer.stream.finish(_LAST_MESSAGE_S)

    def _register(self, peer: Caller, register: t.Register) -> None:
        if register.doing in _WITH_PLAN and not register.busy:
            raise ProtocolError(
                f"its registration says {register.doing.value} without the plan of an active node"
            )
        if not register.node.addr:  # the agent does not know it: its connection's source
            register = replace(register, node=replace(register.node, addr=peer.address))
        peer.node_id = register.node.node_id
        older = self._members.get(peer.node_id)
        self._members[peer.node_id] = peer
        self._heard[peer] = self._loop.time()
        if older is not None:
            older.abort(ConnectionError("its agent connected again"))
        self.listener.admitted(peer)
        if self._timer is None:
            self._drop_silent()
        self._post(ev.Joined(register))

    def _drop_silent(self) -> None:
        """Drop silent members; look again when the next one may be silent."""
        now = self._loop.time()
        while (
            self._heard
            and (oldest := next(iter(self._heard)))
            and self._heard[oldest] + self._silence_s <= now
        ):
            oldest.abort(_Silent(f"it was silent for {self._silence_s:g} s"))
        since = next(iter(self._heard.values()), None)
        self._timer = (
            None
            if since is None
            else self._loop.call_at(since + self._silence_s, self._drop_silent)
        )

    def _on_end(self, peer: Caller, why: Exception) -> None:
        self._heard.pop(peer, None)
        self._leaving.discard(peer)
        if not self._leaving:
            self._all_left.set()
        if not peer.node_id:
            self.listener.left(peer, why)
        elif self._members.get(peer.node_id) is peer:
            del self._members[peer.node_id]
            broke = "its agent broke the protocol: " if isinstance(why, ProtocolError) else ""
            unheard_s = min(self._loop.time() - peer.sent_s, 0.9 * self._silence_s)
            silent_s = self._silence_s if isinstance(why, _Silent) else unheard_s
            self._post(ev.Lost(peer.node_id, f"{broke}{why}", silent_s))
