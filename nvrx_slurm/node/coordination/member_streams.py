"""Messages of the coordinator to its members, over the network or within this program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.node.coordination.link import LAST_MESSAGES_S, LocalTransport

if TYPE_CHECKING:
    from nvrx_slurm.node.coordination.peers import Registrations

News = t.LogServer | t.Imports  # for all members, also those that come later


class MemberStreams:
    """Role of the coordinator's core: messages to the agents, over the network or within this program."""

    def __init__(self, local: LocalTransport | None, server: Registrations | None) -> None:
        self._local = local
        self._server = server
        self._news: dict[type, News] = {}  # for all members, also those that come later
        self._informed: dict[str, set[type]] = {}  # what each of them has got

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Messages to members; one that is not connected misses the message."""
        return {ev.SendTo: self._send, ev.Drop: self._drop}

    async def start(self) -> None:
        """Members connect by themselves."""

    def tell(self, news: News) -> None:
        """Tell all members, and those that come later with their first plan."""
        self._news[type(news)] = news
        for informed in self._informed.values():
            informed.discard(type(news))
        if self._server is not None:
            self._server.send_all(news)

    def share(self, counted: t.Counted) -> None:
        """The same account for all members."""
        if self._local is not None:
            self._local.deliver(counted)
        if self._server is not None:
            self._server.send_all(counted)

    def _send(self, command: ev.SendTo) -> None:
        node_id = command.node_id
        local = self._local
        server = self._server
        if local is not None and node_id == local.node_id:
            local.deliver(command.message)
            return
        if server is None:
            return
        server.send(node_id, command.message)
        if isinstance(command.message, t.Plan):
            informed = self._informed.setdefault(node_id, set())
            for kind in self._news.keys() - informed:
                server.send(node_id, self._news[kind])
            informed.update(self._news)

    def _drop(self, command: ev.Drop) -> None:
        if self._server is not None:
            self._server.drop(command.node_id)

    async def close(self, last: t.Finish | None = None) -> None:
        """Disconnect all; `last` goes to each of them before."""
        server = self._server
        self._server = None
        if server is None:
            return
        if last is not None:
            server.send_all(last)
        await server.close(LAST_MESSAGES_S)
