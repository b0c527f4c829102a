"""The transport of this node's agent: one stream to the node that is sought, or the way within this program."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.election import events as el
from nvrx_slurm.node.coordination import peers
from nvrx_slurm.node.coordination.link import AgentLink, LocalTransport, credentials
from nvrx_slurm.node.job import Meeting
from nvrx_slurm.node.output.console import once

if TYPE_CHECKING:
    from nvrx_slurm.control.client import ControlClient
    from nvrx_slurm.control.server import ControlServer


class Transport:
    """Connects to one node at a time. `link` has the agent's messages; the job's token is `token`.

    `tell`: hands an event to the agent's core. `heard`: gets what the node that is sought says, and as
    `StreamEnded` how the stream to it ended. `beat`: called with the time of each beat that was answered.
    """

    def __init__(
        self,
        meeting: Meeting,
        server: ControlServer,
        say: Callable[[str], None],
        tell: Callable[[Any], None],
        heard: Callable[[t.Peer, ControlClient, Any], None],
        beat: Callable[[float], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._meeting = meeting
        self._server = server
        self._say_once = once(say)  # the search goes on
        self._tell = tell
        self._heard = heard
        self._beat = beat
        self._spawn = spawn
        self.token = meeting.token
        self.link = AgentLink()
        self._client: ControlClient | None = None
        self._closed = False

    def seek(self, peer: t.Peer) -> None:
        """Leave the present stream, and connect to this node."""
        self.leave("another candidate is sought")
        self._spawn(self._connect(peer))

    def stay(self, local: LocalTransport) -> None:
        """From now on the coordinator is in this program."""
        self.link.transport = local
        local.start()

    def leave(self, why: str) -> None:
        """Leave the present stream, if there is one; the agent hears of it."""
        client = self._client
        self._client = None
        if client is not None:
            self._spawn(client.close(0.0))
            self._tell(ag.Disconnected(why))

    async def close(self) -> None:
        """Deliver what is queued, then leave for good."""
        self._closed = True
        await self.link.close()

    def adopt(self, token: str) -> None:
        """The job's token, which this agent has got from the coordinator or makes itself; "": it made it in vain."""
        if token != self.token:
            self.token = token
            self._server.adopt(token)

    async def _connect(self, peer: t.Peer) -> None:
        from nvrx_slurm.control.client import ControlClient

        meeting = self._meeting
        endpoints = await peers.endpoints(meeting, peer)
        if self._closed:
            return
        proof = await credentials(meeting) if not self.token else None
        client: ControlClient

        def post(event: Any) -> None:
            if self._client is client:
                self._on_event(peer, client, event)

        client = ControlClient(
            endpoints,
            meeting.key,
            self.token,
            post,
            meeting.keepalive,
            proof,
            self._say_once,
            self._beat,
        )
        self._client = client
        self.link.transport = client
        client.start()

    def _on_event(self, peer: t.Peer, client: ControlClient, event: Any) -> None:
        """What happens on the stream to the node that is sought."""
        if isinstance(event, t.Elsewhere):
            self.leave("another node coordinates the job")
        elif isinstance(event, ag.Disconnected):
            self._client = None
            self._tell(event)
            how = el.StreamEnd.SILENT if client.silent else el.StreamEnd.CLOSED
            event = el.StreamEnded(how)
        elif isinstance(event, ag.Unreached):
            self._client = None
            how = el.StreamEnd.REFUSED if client.refused else el.StreamEnd.UNREACHED
            event = el.StreamEnded(how)
        self._heard(peer, client, event)
