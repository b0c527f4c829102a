"""The agent's way to the coordinator: over the network, or within this program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import AuthError, UsageError
from nvrx_slurm.node.job import Meeting
from nvrx_slurm.node.shell import Post
from nvrx_slurm.system.ports import PortReservation

if TYPE_CHECKING:
    from nvrx_slurm.control.client import ControlClient

_NO_TOKEN = (
    "NVRX_TOKEN is not set and there is no working MUNGE to share one with; let nvrx-run start the step"
    " (in the batch script), or export the same random NVRX_TOKEN for all nodes"
)
LAST_MESSAGES_S = 2.0  # for queued messages to be delivered at the end


class AgentLink:
    """Role: sends the agent's messages by its transport, which can be replaced while the program runs.

    Before the first candidate is sought there is none: messages are lost, as without a stream.
    """

    def __init__(self, transport: ControlClient | LocalTransport | None = None) -> None:
        self.transport = transport
        self._port = PortReservation()
        self._closed = False
        # checkpoints in this node's memory
        self.held: Callable[[], t.InMemory | None] = lambda: None
        # of each kind: each coordinator has to know them
        self._last: dict[type, t.Imports | t.Warmth] = {}

    async def start(self) -> None:
        """Begin to connect."""
        if self.transport is not None:
            self.transport.start()

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """The agent's messages."""
        return {ag.Send: lambda command: self.send(command.message)}

    def send(self, message: t.AgentMessage) -> None:
        """Send a message; one that has a field for a port (MASTER_PORT of the next plan) offers a fresh one."""
        if isinstance(message, (t.Register, t.Ready)):
            previous, self._port = self._port, PortReservation()
            previous.release()  # only now, so that the new one is another
            message = replace(message, port=self._port.port, held=self.held())
        if self.transport is not None:
            self.transport.send(message)
            for one in self._last.values() if isinstance(message, t.Register) else ():
                self.transport.send(one)
        if isinstance(message, (t.Imports, t.Warmth)):
            self._last[type(message)] = message

    async def close(self) -> None:
        """Deliver what is queued, then disconnect."""
        if not self._closed:
            self._closed = True
            if self.transport is not None:
                await self.transport.close(LAST_MESSAGES_S)
            self._port.release()


class LocalTransport:
    """Between an agent and the coordinator in the same program."""

    def __init__(self, node_id: str, to_agent: Post, to_coordinator: Post) -> None:
        self.node_id = node_id
        self._to_agent = to_agent
        self._to_coordinator = to_coordinator

    def start(self) -> None:
        """The coordinator is here already."""
        self._to_agent(ag.Connected())

    def send(self, message: t.AgentMessage) -> None:
        """Hand a message to the coordinator."""
        if isinstance(message, t.Register):
            self._to_coordinator(ev.Joined(message))
        else:
            self._to_coordinator(ev.FromAgent(self.node_id, message))

    def deliver(self, message: t.CoordinatorMessage) -> None:
        """Hand a message to the agent."""
        self._to_agent(message)

    async def close(self, grace_s: float) -> None:
        """Leave."""
        self._to_coordinator(ev.Lost(self.node_id, "its agent left"))


async def credentials(meeting: Meeting) -> Any:
    """MUNGE, where the nodes have no token; None where they have one. Raises UsageError where there is neither."""
    from nvrx_slurm.control.auth import in_thread
    from nvrx_slurm.slurm.munge import Munge

    if meeting.token:
        return None
    munge = Munge.find(meeting.munge_socket)
    try:
        if munge is None:
            raise AuthError("there is no libmunge")
        await in_thread(lambda: munge.seal(b"can it?"))
    except AuthError as error:
        raise UsageError(f"{_NO_TOKEN} ({error})") from None
    return munge
