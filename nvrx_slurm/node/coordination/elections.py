"""This node's part in elections: it listens for other agents, registers with one of them, and may coordinate the job.

The election's core says where to register (`Seek`) and when to coordinate (`Stand`). Agents that come to this node are
let in, or sent on, as it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from nvrx_slurm import types as t
from nvrx_slurm.control.auth import new_token
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election import election as el
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.errors import ExitCode, NvrxError
from nvrx_slurm.node.coordination import peers
from nvrx_slurm.node.coordination.coordinator import CoordinatorHost
from nvrx_slurm.node.coordination.lease import LeaseKeeper
from nvrx_slurm.node.coordination.link import LAST_MESSAGES_S, Link, credentials
from nvrx_slurm.node.coordination.occupied_endpoints import OccupiedEndpoints
from nvrx_slurm.node.event_log import EventLog
from nvrx_slurm.node.job import Job
from nvrx_slurm.node.roles import Post
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.system import bounded

if TYPE_CHECKING:
    from nvrx_slurm.control.client import ControlClient
    from nvrx_slurm.control.server import ControlServer
    from nvrx_slurm.node.output.logs import LogsRole

_LINK_S = 5.0
_FIRST_PROBE_S, _LAST_PROBE_S = 0.02, 1.0
_PROBE_LEASES = 3  # a probe gives up after so many leases
_STAND_SHARE = 0.9  # of the join timeout; a candidate gives up then (94), before the agents that wait for it do (96)
_LEAST_STAND_S = 1.0
_STAND = (el.Seek, el.Stand, el.Raise, el.Retire, el.AskWhoLeads, el.AnswerVisitor)


class Elections:
    """Role: the agent's way to the coordinator, whichever node that is. Commands of the agent: `Send`.

    `on_coordinator(role)`: a coordinator has begun here, or (None) has ended.
    """

    commands: ClassVar[tuple[type, ...]] = (ag.Send,)

    def __init__(
        self,
        job: Job,
        server: ControlServer,
        say: Callable[[str], None],
        on_defect: Callable[[Any], None],
        on_coordinator: Callable[[CoordinatorHost | None], None],
        lease: LeaseKeeper,
    ) -> None:
        assert job.meeting is not None and job.electable is not None
        self._job, self._meeting, self._settings = job, job.meeting, job.electable
        self._server, self._token, self._say = server, job.meeting.token, say
        self._on_defect, self._on_coordinator = on_defect, on_coordinator
        self._lease = lease
        self._loop = asyncio.get_running_loop()
        self._to_agent: Post
        self._alone_since: float | None = self._loop.time()  # without a coordinator (monotonic seconds)
        self._link: Link
        self._client: ControlClient | None = None
        self._coordinator: CoordinatorHost | None = None
        self._visitors: dict[str, ev.Joined] = {}
        self._foreign = OccupiedEndpoints(len(job.meeting.candidates), say)
        self._numbers: dict[str, int] = {}
        self._admitted: dict[str, t.Node] = {}
        self._number = 0
        self._electors = 0  # of the last plan
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed = False
        self.logs: LogsRole | None = None
        me = t.Peer(peer_key(job.node), job.node.host, job.node.addr, job.node.port)
        settings = el.ElectionSettings(lease_s=sum(self._meeting.keepalive), first_try_s=self._meeting.first_try_s)
        endpoints = (*self._meeting.mine, *(self._meeting.endpoints if job.coordinator is not None else ()))
        mine = {me.key, *(f"{host}:{port}" for host, port in endpoints if port == me.port)}
        candidates = tuple(me if peer.key in mine else peer for peer in self._meeting.candidates)
        core = el.Election(me, candidates, settings, self._loop.time())
        self._shell = Shell(core, EventLog(job.run_dir.election_events(job.node), core, say), type(None), say)
        self._shell.add(self)
        self._shell.result.add_done_callback(self._on_end)
        self.core = core
        for command in _STAND:
            self._shell.on(command, getattr(self, f"_on_{command.__name__.lower()}"))
        server.listen_to(self._from_server, core.where)
        lease.on_lapse = self._on_own_lease_over

    def connect(self, to_agent: Post, link: Link) -> None:
        """Where the coordinator's messages go, and what sends the agent's."""
        self._to_agent, self._link = to_agent, link

    async def start(self) -> None:
        """Begin to look for the coordinator."""
        self._shell.begin()
        self._shell.post(el.Begin())

    def handle(self, command: ag.Send) -> None:
        """Send a message to the coordinator."""
        message = command.message
        if isinstance(message, t.Register):
            self._number += 1
            node = replace(message.node, addr=message.node.addr or self.core.me.addr)
            command = ag.Send(replace(message, node=node, vote=self.core.term, number=self._number))
        self._link.handle(command)

    async def leave(self) -> None:
        """Leave the coordinator; one of this node goes on."""
        self._closed = True
        await self._link.close()

    async def close(self) -> None:
        """Leave the coordinator; probes end."""
        await self.leave()
        self._shell.retire()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_MESSAGES_S)

    def _tell(self, event: Any) -> None:
        """Hand an event to the agent's core."""
        if isinstance(event, t.Lead):
            self._alone_since = None
        elif isinstance(event, ag.Disconnected) and self._alone_since is None:
            self._alone_since = self._loop.time()
        self._to_agent(event)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_end)

    def _on_end(self, work: asyncio.Future[Any]) -> None:
        """A task, or the election itself, has ended."""
        self._tasks.discard(work)
        error = None if work.cancelled() else work.exception()
        if error is not None:
            self._on_defect(error)

    # --- this node registers elsewhere ------------------------------------------------------------------------

    def _on_seek(self, command: el.Seek) -> None:
        self._leave("another candidate is sought")
        self._spawn(self._seek(command.peer))

    def _leave(self, why: str) -> None:
        """Leave the present stream, if there is one; the agent hears of it."""
        client, self._client = self._client, None
        if client is not None:
            self._spawn(client.close(0.0))
            self._tell(ag.Disconnected(why))

    async def _seek(self, peer: t.Peer) -> None:
        from nvrx_slurm.control.client import ControlClient

        endpoints = await peers.endpoints(self._meeting, peer)
        if self._closed:
            return
        proof = await credentials(self._meeting) if not self._token else None
        client: ControlClient

        def post(event: Any) -> None:
            if self._client is client:
                self._from_coordinator(peer, client, event)

        client = ControlClient(
            endpoints, self._meeting.key, self._token, post, self._meeting.keepalive, proof, self._foreign.say
        )
        client.on_beat = self._lease.heard
        self._client = client
        self._link.transport = client
        client.start()

    def _from_coordinator(self, peer: t.Peer, client: ControlClient, event: Any) -> None:
        """What happens on the stream to the node that is sought."""
        if isinstance(event, t.Elsewhere):
            self._leave("another node coordinates the job")
            self._shell.post(event)
        elif isinstance(event, (ag.Disconnected, ag.Unreached)):
            self._client = None
            if isinstance(event, ag.Disconnected):
                self._tell(event)
            elif self._foreign.hold_all(peer.key, client.foreign, self._loop.time()) and self._number == 0:
                why = f"no coordinator of this job can be reached: {event.why}"
                return self._tell(t.Refused(ExitCode.COORDINATOR_LOST, why))
            self._shell.post(el.StreamEnded(peers.how_ended(client)))
        elif isinstance(event, t.Lead):
            self._adopt(client.token)
            if not self.core.me.addr:  # this agent does not know it: its connection's source, as the other end sees it
                self._shell.post(el.Located(client.local_address))
            self._lease.follow()
            self._shell.post(el.Led(event.term, peer))
            self._tell(event)
        elif isinstance(event, t.LogServer):
            if self.logs is not None:
                self.logs.found(client.peer_address, event.ports, self._token)
        else:
            self._learn(event)
            self._tell(event)

    def _adopt(self, token: str) -> None:
        """The job's token, which this agent has got from the coordinator or makes itself; "": it made it in vain."""
        if token != self._token:
            self._token = token
            self._server.adopt(token)

    def _on_askwholeads(self, command: el.AskWhoLeads) -> None:
        self._spawn(self._ask_who_leads(command.peer))

    async def _ask_who_leads(self, peer: t.Peer) -> None:
        role = self._coordinator
        token = "" if self.core.fresh else self._token  # what a fresh node has made itself is worth nothing elsewhere
        try:
            found = await peers.ask(self._meeting, self._meeting.token or token, peer)
        except (NvrxError, OSError, RuntimeError):  # MUNGE is slow, or no thread can be made
            found = None
        if found is not None and role is not None and role is self._coordinator:  # a late answer is worth nothing
            self._shell.post(found)

    # --- this node coordinates --------------------------------------------------------------------------------

    def _on_stand(self, command: el.Stand) -> None:
        before = self.core.leader
        alone_s = 0.0 if self._alone_since is None else self._loop.time() - self._alone_since
        most_s = self._job.agent.join_timeout_s if before is None else self._job.agent.reconnect_timeout_s
        self._leave("this node stands for coordinator")
        self._adopt(self._token or new_token())
        settings = replace(
            self._settings,
            term=command.term,
            electors=max(self._settings.electors, self._electors),
            peer=self.core.me,
            known=self.core.others,
            last_leader=before.key if before is not None else "",
            fence_s=command.fence_s,
            leader_fence_s=command.leader_fence_s,
            quorum_timeout_s=max(_LEAST_STAND_S, _STAND_SHARE * most_s - alone_s),
            lease_s=sum(self._meeting.keepalive),
            began_s=time.time(),
        )
        role = CoordinatorHost(
            self._job, settings, self._say, self._on_defect, peers.Admitted(self._server, self._admitted)
        )
        self._coordinator = role
        role.begin()
        role.shell.on(ev.Won, self._on_won)
        role.shell.on(ev.Lapsed, self._on_lapsed)
        role.shell.on(ev.Probe, lambda command: self._spawn(self._probe(role, command.peer)))
        self._lease.lead(self._heard)
        self._on_coordinator(role)
        self._spawn(self._write(self._job.run_dir.link_latest))
        if role.leads:
            self._on_won(ev.Won())
        self._link.transport = role.connect(self._job.node.node_id, self._from_own_coordinator)
        self._link.transport.start()

    async def _write(self, work: Callable[[], None]) -> None:
        """Also on a file system that hangs this costs no more than a thread."""
        with contextlib.suppress(OSError, RuntimeError, bounded.Overrun):
            await bounded.call_async(work, _LINK_S, "the log directory")

    def _from_own_coordinator(self, event: Any) -> None:
        self._learn(event)
        self._tell(event)

    def _learn(self, event: Any) -> None:
        """A plan says what the next election needs."""
        if isinstance(event, t.Plan) and event.leader is not None:
            self._electors = event.electors
            self._shell.post(el.Led(event.term, event.leader, event.successors))

    def _on_raise(self, command: el.Raise) -> None:
        assert self._coordinator is not None
        self._coordinator.shell.post(ev.Raised(command.term))

    def _on_won(self, command: ev.Won) -> None:
        self._spawn(self._write(self._job.run_dir.take_console))
        self._lease.check()
        self._shell.post(el.Elected())
        role = self._coordinator
        if self.logs is not None and role is not None:
            self.logs.lead(role.members, role.term, self._token)

    def _on_lapsed(self, command: ev.Lapsed) -> None:
        self._say(f"this node coordinates no more: {command.why}")
        self._shell.post(el.Resigned())

    def _on_own_lease_over(self) -> None:
        """This node was stopped or cut off: it decides nothing more before the others have agreed."""
        role = self._coordinator
        if self.core.state is el.Place.LEADING and role is not None and not role.shell.result.done():
            self._on_lapsed(ev.Lapsed("it has not heard from most nodes for the length of a lease"))

    def _on_retire(self, command: el.Retire) -> None:
        role, self._coordinator = self._coordinator, None
        if role is None:
            return
        self._on_coordinator(None)
        role.retire()
        if self.logs is not None:
            self.logs.retire()
        if self.core.fresh and not self._meeting.token:  # others have met without it
            self._adopt("")
        for node_id in list(self._admitted):
            self._server.drop(node_id)
        self._admitted.clear()
        self._tell(ag.Disconnected("this node coordinates no more"))

    def _heard(self) -> float | None:
        """When a quorum was heard last (monotonic seconds); None: this node does not lead."""
        role = self._coordinator
        if role is None or not role.leads:
            return None
        return role.heard(self._server.heard_at, self._admitted)

    async def _probe(self, role: CoordinatorHost, peer: t.Peer) -> None:
        """Try to connect to where an agent listened, until its host refuses; then that agent is dead."""
        delay_s, until_s = _FIRST_PROBE_S, self._loop.time() + _PROBE_LEASES * sum(self._meeting.keepalive)
        while role is self._coordinator and self._loop.time() < until_s:
            if await peers.refuses(peer):
                return role.shell.post(ev.ProvenDead(peer))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_PROBE_S)

    # --- agents that come to this node ------------------------------------------------------------------------

    def _from_server(self, event: Any) -> None:
        if isinstance(event, ev.Joined):
            node_id = event.message.node.node_id
            if event.message.number < self._numbers.get(node_id, 0):
                return self._server.drop(node_id)
            self._numbers[node_id] = event.message.number
            self._visitors[node_id] = event
            self._shell.post(el.Visited(node_id, event.message.vote))
            return
        node_id = event.node_id
        if node_id in self._visitors:
            del self._visitors[node_id]
        elif self._coordinator is not None and node_id in self._admitted:
            if isinstance(event, ev.Lost):
                del self._admitted[node_id]
            self._coordinator.shell.post(event)

    def _on_answervisitor(self, command: el.AnswerVisitor) -> None:
        event = self._visitors.pop(command.visitor, None)
        if event is None:
            return  # it has left
        if command.elsewhere is None and self._coordinator is not None:
            self._admitted[command.visitor] = event.message.node
            self._coordinator.shell.post(event)
        else:
            if command.elsewhere is not None:
                self._server.send(command.visitor, command.elsewhere)
            self._server.drop(command.visitor)
