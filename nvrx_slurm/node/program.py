"""The program of one node: an agent, and on one node also the coordinator, as roles on one asyncio loop.

This file says which roles there are, and in which order they start and end. What they do is in the files of the roles:
`signals`, `workers`, `preflight`, `members`, `elections`, `link`, `logs`; the coordinator is in `coordinator`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.control.auth import new_token
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election.quorum import peer_key, peer_of
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ExitCode, NvrxError, UsageError, signal_exit_code
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.node.coordination.coordinator import CoordinatorHost
from nvrx_slurm.node.coordination.elections import Elections
from nvrx_slurm.node.coordination.link import LAST_MESSAGES_S, AgentLink, credentials
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.monitors import signs
from nvrx_slurm.node.monitors.losses import LossWatch
from nvrx_slurm.node.output.console import Console
from nvrx_slurm.node.preflight.head_start import HeadStart
from nvrx_slurm.node.preflight.preflight import Preflight
from nvrx_slurm.node.shell import NodeRole, Shell
from nvrx_slurm.node.signals import Signals, block_signals
from nvrx_slurm.node.workers.workers import Workers
from nvrx_slurm.slurm.api.facts import NotInstalled, SlurmError
from nvrx_slurm.system import bounded, limits
from nvrx_slurm.system.files import HEALTH_NAME

if TYPE_CHECKING:
    from nvrx_slurm.control.server import ControlServer
    from nvrx_slurm.node.output.logs import LogsRole
    from nvrx_slurm.node.workers.memory import KeeperRole

_SIGNALLED = signal_exit_code(0)  # codes above tell the signal that ended the job
_BATCH_HOST_S = 900.0  # Slurm notices a silent node after SlurmdTimeout, 300 s by default
_ASK_SLURM_S = 70.0  # for one try, which takes at most 62 s
_RETRY_SLURM_S = 5.0
_TRIES_BEFORE_SCANCEL = 3  # Slurm may be restarting
_LAST_SENTENCE_S = 0.05  # for the console's thread to write it, also to the launchers' file
_LAST_LINES_S = 2.0  # for queued console lines at the end


class NodeProgram:
    """All roles of one node put together, run, and ended again."""

    def __init__(self, job: NodeJob, head_start: HeadStart, notes: Sequence[str] = ()) -> None:
        self._job = job
        self._notes = notes
        copy = job.run_dir.launcher_log(job.node) if job.logs is not None and job.logs.logfile else None
        prompts = job.spec.stdin == 0
        self._console = Console(f"nvrx-run[{job.node.host}]", copy=copy, prompts=prompts, began_s=job.began_s)
        self._signal_reader = block_signals()
        self._head_start = head_start
        self._roles: list[NodeRole] = []
        self._own_coordinator: CoordinatorHost | None = None  # the coordinator of a job with one node
        self._elections: Elections | None = None
        self._server: ControlServer | None = None
        self._logs: LogsRole | None = None
        self._shell: Shell
        self._signals: Signals
        self._link: AgentLink
        self._has_link = False
        self._told_early: list[t.Warmth] = []  # before there was a link
        self._examining: asyncio.Future[None] | None = None
        self._main: asyncio.Task[Any] | None
        self._code = int(ExitCode.INTERNAL)  # until the agent has ended

    async def run(self) -> int:
        """Run until the job's end; returns the exit code. Nothing of ours is left when it returns."""
        asyncio.get_running_loop().set_exception_handler(self._on_defect)
        self._main = asyncio.current_task()
        self._signals = Signals(self._signal_reader, self._job, self._coordinator_shell, self._interrupt)
        self._console.draw(self._job.run_dir.status)
        try:
            await self._start()
            return await self._end(await self._shell.result)
        except asyncio.CancelledError:
            self._console.say(f"node {self._job.node.host} ends with code {self._code}, without waiting for others")
            return self._code
        except Exception as error:
            is_defect = not isinstance(error, NvrxError) and not getattr(error, "errno", None)
            why, trace = f"node {self._job.node.host} cannot take part: {error}", traceback.format_exc()
            self._console.say(f"internal error, please report it:\n{trace}" if is_defect else why)
            self._console.say(trace, to_copy=True)
            code = getattr(error, "exit_code", ExitCode.INTERNAL if is_defect else ExitCode.NODE_REFUSED)
            # The machine may be the cause: then the others elect a coordinator. A defect would go round.
            others_go_on = self._elections is not None and not is_defect
            await self._close(None if others_go_on else t.Finish(code, f"the coordinator's {why}"))
            return int(code)
        finally:
            await self._close()
            self._console.finish(_LAST_LINES_S)
            if self._elections is not None and self._elections.out_file is not None:
                self._elections.out_file.finish(_LAST_LINES_S)

    @property
    def _coordinator(self) -> CoordinatorHost | None:
        """The coordinator on this node, if there is one."""
        return self._own_coordinator if self._elections is None else self._elections.coordinator

    def _interrupt(self, signum: int) -> None:
        if self._code == ExitCode.INTERNAL:
            self._code = signal_exit_code(signum)
        if self._main is not None:
            self._main.cancel()

    def _coordinator_shell(self) -> Shell | None:
        return None if self._coordinator is None else self._coordinator.shell

    # --- the order of start and end ---------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start workers, preflight, logs, signals, coordinator and link, in this order; then the agent's core begins.

        The processes of workers and preflight start first, because they take longest. The link needs to know whether
        the coordinator is here.
        """
        say = self._console.say
        if self._job.electable is not None:
            await self._listen()
        job = self._job
        for note in self._notes:
            say(note)
        core = Agent(job.node, job.agent, asyncio.get_running_loop().time())
        self._shell = shell = Shell(core, EventLog(job.run_dir.agent_events(job.node), core, say), ag.Exit, say)
        shell.on(t.Examine, self._examine)
        path = self._head_start.private_dir.path
        checks = self._head_start.checks
        rank = job.node.infra_rank
        state_dir = path / HEALTH_NAME
        lease = Lease(listener=self._server.listener.fileno()) if self._server is not None else None
        workers = Workers(job, self._console, shell.post, path, lease, self._tell)
        post = shell.post
        refuse = shell.finish_with
        keeper = await self._start_keeper()

        async def cleaned(used: bool) -> None:
            if used:
                await workers.cleaned()
            if keeper is not None:
                await keeper.settle()

        preflight = Preflight(job.preflight, rank, state_dir, say, post, refuse, checks, cleaned)
        action = (job.spec.settings or {}).get("loss_action", "warn")
        await self.add(preflight, workers, LossWatch(action, workers.monitors, shell.post))
        if job.logs is not None:
            from nvrx_slurm.node.output.logs import LogsRole

            self._logs = LogsRole(job.logs, job, path, say)
            await self.add(self._logs)
        self._signals.begin(shell)
        if self._server is not None and lease is not None:
            self._elections = Elections(job, self._server, say, shell, lease, self._logs, workers.prepare)
            self._link = self._elections.link
            await self.add(self._elections)
        else:
            assert job.coordinator is not None
            self._own_coordinator = host = CoordinatorHost(job, job.coordinator, say, shell.finish_with, shell.post)
            if self._logs is not None:
                self._logs.lead(host.members, host.term, new_token())
            self._link = AgentLink(host.local)
            await self.add(self._link)
        self._has_link = True
        if keeper is not None:
            (self._link if self._elections is None else self._elections.link).held = lambda: keeper.held
        for told in self._told_early:
            self._tell(told)
        shell.begin()

    async def _start_keeper(self) -> KeeperRole | None:
        """The first role: it hears of workers before they start."""
        contract = self._job.spec.contract
        server = self._server
        if not contract.checkpoint_memory and not contract.checkpoint_interface:
            return None
        from nvrx_slurm.node.workers.memory import KeeperRole

        pem = None if server is None else lambda: server.pem
        keeper = KeeperRole(contract, self._job.node, self._console.say, pem)
        await self.add(keeper)
        return keeper

    def _tell(self, told: t.Pace | t.Window | t.Imports | t.Warmth | t.Loaded) -> None:
        if self._has_link:
            self._link.send(told)
        elif isinstance(told, t.Warmth):
            self._told_early.append(told)

    def _examine(self, command: t.Examine) -> None:
        async def examine() -> None:
            found = await bounded.call_or_none(signs.read, signs.TIMEOUT_S, "signs")
            if found is not None:
                self._link.send(t.Examined(command.term, command.cycle, found))

        self._examining = asyncio.ensure_future(examine())  # the loop keeps only weak references

    async def _listen(self) -> None:
        """Listen for the other agents: each of them may have to coordinate the job."""
        from nvrx_slurm.control import addresses  # TLS: only where there are several nodes
        from nvrx_slurm.control.server import ControlServer

        job = self._job
        say = self._console.say
        assert job.meeting is not None and job.electable is not None
        sentence = limits.files_for(job.electable.max_nodes)  # each agent may have to coordinate the job
        if job.coordinator is not None and sentence:
            say(sentence)
        meeting, proof = job.meeting, await credentials(job.meeting)
        self._server = server = ControlServer(
            meeting.key, meeting.token, lambda event: None, say, meeting.keepalive, proof
        )
        first = job.coordinator is not None
        address = job.node.addr or addresses.ANY_ADDRESS
        ports, mine = meeting.ports_of(peer_key(job.node)), [port for _, port in meeting.mine]
        others = [*(ports if len(ports) > 1 else mine), 0]  # a single port is the first coordinator's
        try:
            if first or job.node.addr:
                address = await addresses.resolve(meeting.endpoints[0][0] if first else address)
            where = await server.start(address, ports if first else others)
        except UsageError:
            if not job.may_yield:
                raise
            first = False  # another agent of this host has the endpoint
            where = await server.start(address, others)
            job = replace(job, coordinator=None)
        if first:
            say(f"coordinator listens on {where}")
        self._job = replace(job, node=replace(job.node, port=server.listener.port))

    async def _end_logs(self) -> None:
        if self._logs is not None:
            if self._logs.spec.logfile:
                await asyncio.sleep(_LAST_SENTENCE_S)
            await self._logs.close()
            await self._logs.end(self._logs.drain_s)

    async def _end(self, end: ag.Exit) -> int:
        """The agent has ended. Its roles end, then the coordinator when the job does."""
        job = self._job
        self._code = end.code
        signalled = end.code > _SIGNALLED
        if self._logs is not None:
            self._logs.last_call(signalled)  # Slurm kills all this KillWait after its signal
        for role in (self._link, *self._roles):
            logs = self._logs if self._coordinator is not None else None  # until the end of the job has been said
            if role not in (self._elections, logs):
                await role.close()
        if self._elections is not None:
            await self._elections.leave()
        host = self._coordinator
        if host is not None:
            if signalled:  # it may have come before the agent had a coordinator to tell
                ends = t.EndJob(end.code, end.reason, end.code - _SIGNALLED)
                host.shell.post(ev.FromAgent(job.node.node_id, ends))
            if end.code == ExitCode.NODE_REFUSED:  # the agent has ended, and its workers: their node is not waited for
                host.shell.post(ev.ProvenDead(peer_of(job.node)))
            if signalled and not host.leads:  # its agent, which has left, was the first of its voters
                host.shell.retire()
            done = await host.finish(self._end_logs)
            if done is not None:  # else another node coordinates the job
                # Without a quorum another part of the job may go on.
                if job.slurm is not None and host.leads and host.nodes_are_lost:
                    await self._end_job(job.slurm.job_id, int(done.code), done.report.out_of_time)
                return int(done.code)
        why = end.reason
        if end.code == ExitCode.COORDINATOR_LOST:
            why += f"; last try: {getattr(self._link.transport, 'last_problem', '')}"
        self._console.say(f"node {self._job.node.host} ends with code {end.code}: {why}")
        return end.code

    async def _end_job(self, job_id: int, code: int, out_of_time: bool) -> None:
        """End the Slurm job where the batch host is gone: no batch script does, and Slurm may take minutes to
        notice."""
        from nvrx_slurm.core.chain import ChainLink, Next, decide

        chain = self._job.until_done
        again = chain is not None and decide([ChainLink(code, 0.0, out_of_time)], chain, 0.0).next is Next.CONTINUE
        until_s = asyncio.get_running_loop().time() + _BATCH_HOST_S
        tries = 0
        while asyncio.get_running_loop().time() < until_s:
            with_scancel = tries >= _TRIES_BEFORE_SCANCEL
            end = partial(self._job.control.end_without_batch_host, job_id, code, with_scancel, again)
            try:
                if done := await bounded.call_async(end, _ASK_SLURM_S, "Slurm"):
                    self._console.say(done)
                return
            except NotInstalled as error:
                self._console.say(f"{error}: if job {job_id} has lost its batch host, end it by hand: scancel {job_id}")
                return
            except (bounded.Overrun, SlurmError) as error:
                if not tries:
                    self._console.say(f"trying to end job {job_id}, whose batch host may be gone: {error}")
                tries += 1
            await asyncio.sleep(_RETRY_SLURM_S)
        self._console.say(f"job {job_id} could not be ended; if it still runs, end it by hand: scancel {job_id}")

    async def _close(self, last: t.Finish | None = None) -> None:
        """End everything at once; `last` tells the other nodes how the job ends, if this is the coordinator's."""
        self._main = None  # a further signal changes nothing
        if self._coordinator is not None:
            await self._coordinator.close(last)
        for role in reversed(self._roles):
            await role.close()
        if self._logs is not None:
            await self._logs.end(0.0)
        server = self._server
        self._server = None
        if server is not None:
            await server.close(LAST_MESSAGES_S)

    # --- roles ------------------------------------------------------------------------------------------------

    async def add(self, *roles: NodeRole) -> None:
        """Start roles, now or while the program runs; from then on they get their commands."""
        for role in roles:
            self._roles.append(role)  # first: also one half started is closed in the end
            self._shell.add(role)
            await role.start()

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception was not caught, in a callback or task: end with it rather than go on half-done."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._shell.finish_with(error)
        else:
            self._console.say(f"asyncio: {context.get('message')}")


def run(job: NodeJob, head_start: HeadStart, notes: Sequence[str] = ()) -> int:
    """Run the agent (and coordinator) of this node; `notes` are said first. Returns the exit code."""
    job.run_dir.create()
    if job.meeting is None:  # else each coordinator of the job does it
        job.run_dir.link_latest()
    return asyncio.run(NodeProgram(job, head_start, notes).run())
