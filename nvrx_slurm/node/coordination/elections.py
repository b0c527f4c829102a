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
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import NvrxError
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.node.coordination import peers
from nvrx_slurm.node.coordination.coordinator import CoordinatorHost
from nvrx_slurm.node.coordination.lease import LeaseKeeper
from nvrx_slurm.node.coordination.link import LAST_MESSAGES_S
from nvrx_slurm.node.coordination.transport import Transport
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.node.job import Meeting, NodeJob
from nvrx_slurm.node.output.out_file import OutFile
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.system import bounded

if TYPE_CHECKING:
    from nvrx_slurm.control.client import ControlClient
    from nvrx_slurm.control.server import ControlServer
    from nvrx_slurm.node.output.logs import LogsRole

Say = Callable[[str], None]

_LINK_S = 5.0
_FIRST_PROBE_S = 0.02
_LAST_PROBE_S = 1.0
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
        self._say = say
        self._prepare = prepare
        self._on_defect = agent.finish_with
        self._to_agent = agent.post
        self._logs = logs
        self._loop = asyncio.get_running_loop()
        # without a coordinator (monotonic seconds)
        self._alone_since: float | None = self._loop.time()
        self._number = 0  # of this agent's registrations
        self._electors = 0  # of the last plan
        self._tasks: set[asyncio.Future[Any]] = set()
        self.coordinator: CoordinatorHost | None = None
        self.out_file: OutFile | None = None
        me = peer_of(job.node)
        settings = el.ElectionSettings(lease_s=self._lease_s, first_try_s=self._meeting.first_try_s)
        candidates = _candidates(me, job, self._meeting)
        self._core = core = Election(me, candidates, settings, self._loop.time())
        log = EventLog(job.run_dir.election_events(job.node), core, say)
        self._shell = Shell(core, log, type(None), say)
        self._shell.result.add_done_callback(self._on_end)
        self._registrations = peers.Registrations(server, self._shell.post, core.where)
        self._lease = LeaseKeeper(lease, self._lease_s, self._on_lease_over)
        self._transport = Transport(
            self._meeting,
            server,
            say,
            self._tell,
            self._heard,
            self._lease.heard,
            self._spawn,
        )
        self.link = self._transport.link
        self._shell.on(el.Seek, lambda command: self._transport.seek(command.peer))
        self._shell.on(el.Stand, self._stand)
        self._shell.on(el.Raise, self._raise)
        self._shell.on(el.Retire, self._retire)
        self._shell.on(el.AskWhoLeads, lambda command: self._spawn(self._ask(command.peer)))
        self._shell.on(el.AnswerVisitor, self._registrations.answer)

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
            addr = message.node.addr or self._core.me.addr
            node = replace(message.node, addr=addr)
            numbered = replace(message, node=node, number=self._number)
            message = self._core.signed(numbered, self._loop.time())
        self.link.send(message)

    async def leave(self) -> None:
        """Leave the coordinator; one of this node goes on."""
        await self._transport.close()

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

    def _heard(self, peer: t.Peer, client: ControlClient, event: Any) -> None:
        """What the node that is sought says, and how the stream to it ended."""
        if isinstance(event, (t.Elsewhere, el.StreamEnded)):
            self._shell.post(event)
        elif isinstance(event, t.Lead):
            self._transport.adopt(client.token)
            # An agent that does not know its address: its connection's source, as the other end sees it.
            if not self._core.me.addr:
                self._shell.post(el.Located(client.addresses[0]))
            self._lease.follow()
            self._shell.post(el.Led(event.term, peer))
            self._tell(event)
        elif isinstance(event, t.Imports):
            self._prepare(event)
        elif not isinstance(event, t.LogServer):
            self._tell(event)
        elif self._logs is not None:
            self._logs.found(client.addresses[1], event.ports, self._transport.token)

    async def _ask(self, peer: t.Peer) -> None:
        host = self.coordinator
        token = self._meeting.token
        if not self._core.fresh:  # what a fresh node has made itself is worth nothing elsewhere
            token = token or self._transport.token
        try:
            found = await peers.ask(self._meeting, token, peer)
        except (NvrxError, OSError):  # as a MUNGE that is slow
            found = None
        if found is not None and host is self.coordinator:  # a late answer is worth nothing
            self._shell.post(el.Answered(peer, found))

    # --- this node coordinates --------------------------------------------------------------------------------

    def _stand(self, command: el.Stand) -> None:
        job = self._job
        before = self._core.leader
        alone_s = 0.0
        if self._alone_since is not None:
            alone_s = self._loop.time() - self._alone_since
        most_s = job.agent.join_timeout_s if before is None else job.agent.reconnect_timeout_s
        self._transport.leave("this node stands for coordinator")
        self._transport.adopt(self._transport.token or new_token())
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
        host = CoordinatorHost(
            job,
            settings,
            self._say,
            self._on_defect,
            self._tell,
            self._registrations,
            handlers,
            self._prepare,
        )
        self.coordinator = host
        self._registrations.lead(host.post)
        self._lease.lead(lambda: self._quorum_heard(host))
        if host.term > 1 and job.slurm is not None and self.out_file is None:
            self.out_file = OutFile(job.control, job.slurm.job_id)
        self._spawn(_write(job.run_dir.link_latest))
        if host.leads:
            self._won(host)
        self._transport.stay(host.local)

    def _quorum_heard(self, host: CoordinatorHost) -> float | None:
        leads = host.leads and host is self.coordinator
        return self._registrations.quorum_heard(host) if leads else None

    def _raise(self, command: el.Raise) -> None:
        assert self.coordinator is not None
        self.coordinator.shell.post(ev.Raised(command.term))

    def _won(self, host: CoordinatorHost) -> None:
        self._spawn(_write(self._job.run_dir.take_console))
        self._shell.post(el.Elected())
        heard_s = self._quorum_heard(host)
        if heard_s is not None and el.may_have_left(heard_s, self._loop.time(), self._lease_s):
            self._lapsed("its votes were under way for so long that the voters may have left")
        else:
            self._lease.check()
        if self._logs is not None and host is self.coordinator:
            self._logs.lead(host.members, host.term, self._transport.token)

    def _lapsed(self, why: str) -> None:
        self._say(f"this node coordinates no more: {why}")
        self._shell.post(el.Resigned())

    def _on_lease_over(self, leads: bool) -> None:
        """A leader was stopped or cut off: it decides nothing more before the others have agreed."""
        host = self.coordinator
        coordinates = host is not None and not host.shell.result.done()
        if coordinates and leads and self._core.state is el.Place.LEADING:
            self._lapsed("it has not heard from most nodes for the length of a lease")
        self._to_agent(ag.LeaseOver())

    def _retire(self, command: el.Retire) -> None:
        host = self.coordinator
        self.coordinator = None
        if host is None:
            return
        host.shell.retire()
        if self._logs is not None:
            self._logs.retire()
        if self._core.fresh and not self._meeting.token:  # others have met without it
            self._transport.adopt("")
        self._registrations.retire()
        self._tell(ag.Disconnected("this node coordinates no more"))

    async def _probe(self, host: CoordinatorHost, peer: t.Peer) -> None:
        """Try to connect to where an agent listened, until its host refuses; then that agent is dead."""
        delay_s = _FIRST_PROBE_S
        until_s = self._loop.time() + _PROBE_LEASES * self._lease_s
        while self._loop.time() < until_s:
            if host is not self.coordinator:
                return
            if await peers.refuses(self._meeting, peer):
                heard_since_s = self._loop.time() - el.MEMBER_SHARE * self._lease_s
                unheard = self._registrations.unheard(heard_since_s)
                proof = ev.ProvenDead(peer, unheard)
                host.shell.post(proof)
                return
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LAST_PROBE_S)


def _candidates(me: t.Peer, job: NodeJob, meeting: Meeting) -> tuple[t.Peer, ...]:
    """The nodes that may lead before the first plan; this one with its key."""
    endpoints = [*meeting.mine]
    if job.coordinator is not None:
        endpoints += meeting.endpoints
    mine = {me.key}
    for host, port in endpoints:
        if port == me.port:
            mine.add(f"{host}:{port}")
    found = []
    for peer in meeting.candidates:
        found.append(me if peer.key in mine else peer)
    return tuple(found)


async def _write(work: Callable[[], None]) -> None:
    """Run `work` in a thread, which is abandoned if the file system hangs."""
    await bounded.call_or_none(work, _LINK_S, "the log directory")
