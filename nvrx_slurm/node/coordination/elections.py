"""This node's part in elections: it registers with the coordinator, whichever node that is, and may be it.

The election's core says where to register (`Seek`) and when to coordinate (`Stand`). Agents that come to this node are
let in, or sent on, as it answers (`peers.Registrations`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.control.auth import new_token
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.node.coordination import peers
from nvrx_slurm.node.coordination.coordinator import CoordinatorHost
from nvrx_slurm.node.coordination.lease import LeaseKeeper
from nvrx_slurm.node.coordination.link import LAST_MESSAGES_S, AgentLink, credentials
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.output.out_file import OutFile
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.system import bounded

if TYPE_CHECKING:
    from nvrx_slurm.control.client import ControlClient
    from nvrx_slurm.control.server import ControlServer
    from nvrx_slurm.node.output.logs import LogsRole

Say = Callable[[str], None]

_LINK_S = 5.0
_FIRST_PROBE_S, _LAST_PROBE_S = 0.02, 1.0
_PROBE_LEASES = 3  # a probe gives up after so many leases
_STAND_SHARE = 0.9  # of the join timeout; a candidate gives up then (94), before the agents that wait for it do (96)
_LEAST_STAND_S = 1.0


class Elections:
    """Role: the agent's way to the coordinator. Commands of the agent: `Send`, which `link` carries out.

    `coordinator`: the one that stands or leads on this node, if one does. `prepare`: tells what other nodes import.
    """

    def __init__(
        self,
        job: NodeJob,
        server: ControlServer,
        say: Say,
        agent: Shell,
        lease: Lease,
        logs: LogsRole | None,
        prepare: Callable[[t.Imports], None],
    ) -> None:
        assert job.meeting is not None and job.electable is not None
        self._job = job
        self._meeting = job.meeting
        self._settings = job.electable
        self._lease_s = sum(job.meeting.keepalive)
        self._server = server
        self._token = job.meeting.token
        self._say = say
        self._prepare = prepare
        self._on_defect = agent.finish_with
        self._to_agent = agent.post
        self._logs = logs
        self._loop = asyncio.get_running_loop()
        self._alone_since: float | None = self._loop.time()  # without a coordinator (monotonic seconds)
        self._client: ControlClient | None = None
        self._say_once = once(say)  # the search goes on
        self._number = 0  # of this agent's registrations
        self._electors = 0  # of the last plan
        self._tasks: set[asyncio.Future[Any]] = set()
        self._closed = False
        self.link = AgentLink()
        self.coordinator: CoordinatorHost | None = None
        self.out_file: OutFile | None = None
        me = t.Peer(peer_key(job.node), job.node.host, job.node.addr, job.node.port)
        settings = el.ElectionSettings(lease_s=self._lease_s, first_try_s=self._meeting.first_try_s)
        endpoints = (*self._meeting.mine, *(self._meeting.endpoints if job.coordinator is not None else ()))
        mine = {me.key, *(f"{host}:{port}" for host, port in endpoints if port == me.port)}
        candidates = tuple(me if peer.key in mine else peer for peer in self._meeting.candidates)
        self._core = core = Election(me, candidates, settings, self._loop.time())
        self._shell = Shell(core, EventLog(job.run_dir.election_events(job.node), core, say), type(None), say)
        self._shell.result.add_done_callback(self._on_end)
        self._registrations = peers.Registrations(server, self._shell.post, core.where)
        self._lease = LeaseKeeper(lease, self._lease_s, self._on_lease_over)
        handlers: dict[type, Callable[[Any], None]] = {
            el.Seek: self._seek,
            el.Stand: self._stand,
            el.Raise: self._raise,
            el.Retire: self._retire,
            el.AskWhoLeads: lambda command: self._spawn(self._ask(command.peer)),
            el.AnswerVisitor: self._registrations.answer,
        }
        for command, handler in handlers.items():
            self._shell.on(command, handler)

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """The agent's messages."""
        return {ag.Send: self._send}

    async def start(self) -> None:
        """Begin to look for the coordinator."""
        self._shell.begin()
        self._shell.post(el.Begin())

    def _send(self, command: ag.Send) -> None:
        message = command.message
        if isinstance(message, t.Register):
            self._number += 1
            node = replace(message.node, addr=message.node.addr or self._core.me.addr)
            message = self._core.signed(replace(message, node=node, number=self._number), self._loop.time())
        self.link.send(message)

    async def leave(self) -> None:
        """Leave the coordinator; one of this node goes on."""
        self._closed = True
        await self.link.close()

    async def close(self) -> None:
        """Leave the coordinator; probes end."""
        await self.leave()
        self._shell.retire()
        self._lease.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_MESSAGES_S)

    def _tell(self, event: Any) -> None:
        """Hand an event to the agent's core; a plan says what the next election needs."""
        if isinstance(event, t.Lead):
            self._alone_since = None
        elif isinstance(event, ag.Disconnected) and self._alone_since is None:
            self._alone_since = self._loop.time()
        elif isinstance(event, t.Plan) and event.leader is not None:
            self._electors = event.electors
            self._shell.post(el.Led(event.term, event.leader, event.successors))
        self._to_agent(event)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
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

    def _seek(self, command: el.Seek) -> None:
        self._leave("another candidate is sought")
        self._spawn(self._connect(command.peer))

    def _leave(self, why: str) -> None:
        """Leave the present stream, if there is one; the agent hears of it."""
        client, self._client = self._client, None
        if client is not None:
            self._spawn(client.close(0.0))
            self._tell(ag.Disconnected(why))

    async def _connect(self, peer: t.Peer) -> None:
        from nvrx_slurm.control.client import ControlClient

        meeting = self._meeting
        endpoints = await peers.endpoints(meeting, peer)
        if self._closed:
            return
        proof = await credentials(meeting) if not self._token else None
        client: ControlClient

        def post(event: Any) -> None:
            if self._client is client:
                self._from_coordinator(peer, client, event)

        client = ControlClient(
            endpoints, meeting.key, self._token, post, meeting.keepalive, proof, self._say_once, self._lease.heard
        )
        self._client = client
        self.link.transport = client
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
                how = el.StreamEnd.SILENT if client.silent else el.StreamEnd.CLOSED
            else:
                how = el.StreamEnd.REFUSED if client.refused else el.StreamEnd.UNREACHED
            self._shell.post(el.StreamEnded(how))
        elif isinstance(event, t.Lead):
            self._adopt(client.token)
            if not self._core.me.addr:  # this agent does not know it: its connection's source, as the other end sees it
                self._shell.post(el.Located(client.addresses[0]))
            self._lease.follow()
            self._shell.post(el.Led(event.term, peer))
            self._tell(event)
        elif isinstance(event, t.Imports):
            self._prepare(event)
        elif isinstance(event, t.LogServer):
            if self._logs is not None:
                self._logs.found(client.addresses[1], event.ports, self._token)
        else:
            self._tell(event)

    def _adopt(self, token: str) -> None:
        """The job's token, which this agent has got from the coordinator or makes itself; "": it made it in vain."""
        if token != self._token:
            self._token = token
            self._server.adopt(token)

    async def _ask(self, peer: t.Peer) -> None:
        host = self.coordinator
        token = "" if self._core.fresh else self._token  # what a fresh node has made itself is worth nothing elsewhere
        try:
            found = await peers.ask(self._meeting, self._meeting.token or token, peer)
        except (NvrxError, OSError):  # as a MUNGE that is slow
            found = None
        if found is not None and host is self.coordinator:  # a late answer is worth nothing
            self._shell.post(el.Answered(peer, found))

    # --- this node coordinates --------------------------------------------------------------------------------

    def _stand(self, command: el.Stand) -> None:
        job, before = self._job, self._core.leader
        alone_s = 0.0 if self._alone_since is None else self._loop.time() - self._alone_since
        most_s = job.agent.join_timeout_s if before is None else job.agent.reconnect_timeout_s
        self._leave("this node stands for coordinator")
        self._adopt(self._token or new_token())
        settings = replace(
            self._settings,
            term=command.term,
            electors=max(self._settings.electors, self._electors),
            peer=self._core.me,
            known=self._core.others,
            last_leader=before.key if before is not None else "",
            quorum_timeout_s=max(_LEAST_STAND_S, _STAND_SHARE * most_s - alone_s),
            lease_s=self._lease_s,
        )
        handlers: dict[type, Callable[[Any], None]] = {
            ev.Won: lambda command: self._won(host),
            ev.Lapsed: lambda command: self._lapsed(command.why),
            ev.Probe: lambda command: self._spawn(self._probe(host, command.peer)),
        }
        to_members = self._registrations
        host = CoordinatorHost(
            job, settings, self._say, self._on_defect, self._tell, to_members, handlers, self._prepare
        )
        self.coordinator = host
        self._registrations.lead(host.post)
        self._lease.lead(
            lambda: self._registrations.quorum_heard(host) if host.leads and host is self.coordinator else None
        )
        if host.term > 1 and job.slurm is not None and self.out_file is None:
            self.out_file = OutFile(job.control, job.slurm.job_id)
        self._spawn(_write(job.run_dir.link_latest))
        if host.leads:
            self._won(host)
        self.link.transport = host.local
        host.local.start()

    def _raise(self, command: el.Raise) -> None:
        assert self.coordinator is not None
        self.coordinator.shell.post(ev.Raised(command.term))

    def _won(self, host: CoordinatorHost) -> None:
        self._spawn(_write(self._job.run_dir.take_console))
        self._shell.post(el.Elected())
        self._lease.check()  # that of votes which have come too late is over
        if self._logs is not None and host is self.coordinator:
            self._logs.lead(host.members, host.term, self._token)

    def _lapsed(self, why: str) -> None:
        self._say(f"this node coordinates no more: {why}")
        self._shell.post(el.Resigned())

    def _on_lease_over(self, leads: bool) -> None:
        """A leader was stopped or cut off: it decides nothing more before the others have agreed."""
        host = self.coordinator
        if leads and self._core.state is el.Place.LEADING and host is not None and not host.shell.result.done():
            self._lapsed("it has not heard from most nodes for the length of a lease")
        self._to_agent(ag.LeaseOver())

    def _retire(self, command: el.Retire) -> None:
        host, self.coordinator = self.coordinator, None
        if host is None:
            return
        host.shell.retire()
        if self._logs is not None:
            self._logs.retire()
        if self._core.fresh and not self._meeting.token:  # others have met without it
            self._adopt("")
        self._registrations.retire()
        self._tell(ag.Disconnected("this node coordinates no more"))

    async def _probe(self, host: CoordinatorHost, peer: t.Peer) -> None:
        """Try to connect to where an agent listened, until its host refuses; then that agent is dead."""
        delay_s, until_s = _FIRST_PROBE_S, self._loop.time() + _PROBE_LEASES * self._lease_s
        while host is self.coordinator and self._loop.time() < until_s:
            if await peers.refuses(self._meeting, peer):
                return host.shell.post(ev.ProvenDead(peer))
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_PROBE_S)


async def _write(work: Callable[[], None]) -> None:
    """Also on a file system that hangs this costs no more than a thread."""
    await bounded.call_or_none(work, _LINK_S, "the log directory")
