"""The program of one node: an agent, and on one node also the coordinator, on one asyncio loop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from nvrx_slurm import types as t
from nvrx_slurm.agent.console import Console
from nvrx_slurm.agent.event_log import EventLog
from nvrx_slurm.agent.job import Job
from nvrx_slurm.agent.preflight import Preflight
from nvrx_slurm.agent.progress_file import ProgressFile
from nvrx_slurm.agent.shell import Shell
from nvrx_slurm.agent.time_left import TimeLeft
from nvrx_slurm.agent.workers import Workers
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.agent import Agent, State
from nvrx_slurm.core.job.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.job.restarts import headline, report
from nvrx_slurm.core.machine import Say
from nvrx_slurm.errors import AuthError, ExitCode, NvrxError, UsageError, signal_exit_code
from nvrx_slurm.system import limits
from nvrx_slurm.system.files import HEALTH_NAME
from nvrx_slurm.system.ports import PortReservation
from nvrx_slurm.system.signals import SignalReader, sent_by_slurm

_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_NO_TOKEN = (
    "NVRX_TOKEN is not set and there is no working MUNGE to share one with; let nvrx-run start the step"
    " (in the batch script), or export the same random NVRX_TOKEN for all nodes"
)
_OWN_SIGNAL_S = 0.25  # how much later than a worker we may get the signal that ends the step
_LAST_WORDS_S = 2.0  # for queued messages and console lines at the end


class Link(Protocol):
    """The agent's way to the coordinator."""

    def start(self) -> None:
        """Begin to connect; events go to the agent's shell."""

    def send(self, message: t.AgentMessage) -> None:
        """Send one message."""

    async def close(self, grace_s: float) -> None:
        """Deliver what is queued, then part."""


class AgentShell(Shell):
    """Carries out what the agent's core asks for."""

    core: Agent
    link: Link

    def __init__(self, core: Agent, log: EventLog, workers: Workers, console: Console, preflight: Preflight) -> None:
        super().__init__(core, log)
        self._workers = workers
        self._console = console
        self._preflight = preflight
        self._preparing: asyncio.Task[None] | None = None  # the loop keeps only weak references
        self._port = PortReservation()

    def prepare(self, used: bool) -> None:
        """Make the node ready for the next cycle and look at it; the core hears of the end."""
        self._preparing = asyncio.ensure_future(self._prepare(used))

    async def _prepare(self, used: bool) -> None:
        plan = self.core.plan
        try:
            self.post(ag.Prepared(await self._preflight.prepare(0 if plan is None else plan.cycle + 1, used)))
        except UsageError as error:
            self.finish_with(error)

    def do(self, command: Any) -> None:
        """Carry out one command of the core."""
        if isinstance(command, ag.Send):
            if isinstance(command.message, t.Failed):
                self._preflight.suspicions.failed(command.message.cycle, command.message.faults)
            self.link.send(self._with_port(command.message))
        elif isinstance(command, ag.StartWorkers):
            self._preflight.working()
            self._workers.start(command.plan)
        elif isinstance(command, ag.SignalWorkers):
            self._workers.signal(command.signum, wake=True)
        elif isinstance(command, ag.PassOn):
            self._workers.signal(command.signum)
        elif isinstance(command, ag.WarnRanks):
            self._workers.warn()
        elif isinstance(command, ag.PostGone):
            self._workers.post_gone(command.cycle, command.ranks, command.reason)
        elif isinstance(command, ag.Prepare):
            self.prepare(command.used)
        elif isinstance(command, Say):
            self._console.say(command.text)
        elif isinstance(command, ag.Exit):
            self.finish(command)
        else:
            raise TypeError(f"no way to carry out {command!r}")

    def _with_port(self, message: t.AgentMessage) -> t.AgentMessage:
        """Offer a fresh port with the messages that carry one."""
        if not isinstance(message, (t.Register, t.Stopped)):
            return message
        previous, self._port = self._port, PortReservation()
        previous.release()  # only now, so that the new one is another
        return replace(message, port=self._port.port)


class CoordinatorShell(Shell):
    """Carries out what the coordinator's core asks for."""

    core: Coordinator

    def __init__(
        self, core: Coordinator, log: EventLog, console: Console, progress: ProgressFile | None, time_left: TimeLeft
    ) -> None:
        super().__init__(core, log)
        self._console = console
        self._progress = progress
        self._time_left = time_left
        self.local: LocalLink | None = None
        self.server: Any = None  # ControlServer, where there are other nodes

    def do(self, command: Any) -> None:
        """Carry out one command of the core."""
        if isinstance(command, ev.SendTo):
            if self.local is not None and self.local.deliver(command):
                return
            if self.server is not None:
                self.server.send(command.node_id, command.message)
        elif isinstance(command, ev.Drop):
            if self.server is not None:
                self.server.drop(command.node_id)
        elif isinstance(command, ev.ReadProgress):
            self._read_progress(command.cycle)
        elif isinstance(command, ev.AskTimeLeft):
            self._time_left.ask(lambda left_s: self.post(ev.TimeLeft(left_s)))
        elif isinstance(command, Say):
            self._console.say(command.text)
        elif isinstance(command, ev.Done):
            self.finish(command)
        else:
            raise TypeError(f"no way to carry out {command!r}")

    def _read_progress(self, cycle: int) -> None:
        assert self._progress is not None  # the core asks only where there is a file
        self._progress.read(lambda iteration: self.post(ev.ProgressRead(cycle, iteration)))


class LocalLink:
    """The coordinator's own agent needs no network."""

    def __init__(self, coordinator: CoordinatorShell, agent: AgentShell) -> None:
        self._coordinator = coordinator
        self._agent = agent
        self._node_id = agent.core.node.node_id
        coordinator.local = self

    def start(self) -> None:
        """The coordinator is right here."""
        self._agent.post(ag.Connected())

    def send(self, message: t.AgentMessage) -> None:
        """Hand a message to the coordinator."""
        if isinstance(message, t.Register):
            self._coordinator.post(ev.Joined(message))
        else:
            self._coordinator.post(ev.FROM_AGENT[type(message)](self._node_id, message))

    def deliver(self, command: ev.SendTo) -> bool:
        """Hand a message to the agent; False if it is for another node."""
        if command.node_id != self._node_id:
            return False
        self._agent.post(command.message)
        return True

    async def close(self, grace_s: float) -> None:
        """Leave."""
        self._coordinator.post(ev.Lost(self._node_id, "its agent left"))


class Program:
    """Everything of one node put together, run, and taken down again."""

    def __init__(self, job: Job, notes: Sequence[str] = ()) -> None:
        self._job = job
        self._notes = notes
        self._console = Console(f"nvrx-run[{job.node.host}]")
        # what is ignored (nohup, a shell's background job) stays ignored
        wanted = [s for s in (*_ENDING, *_PASSED_ON) if signal.getsignal(s) is not signal.SIG_IGN]
        self._signals = SignalReader(wanted)
        self._coordinator: CoordinatorShell | None = None
        self._client: Any = None  # ControlClient, where the coordinator is on another node
        self._preflight: Preflight | None = None
        self._agent: AgentShell

    async def run(self) -> int:
        """Run until the job's end; returns the exit code. Nothing of ours is left when it returns."""
        job = self._job
        asyncio.get_running_loop().set_exception_handler(self._on_defect)
        self._console.start()
        for note in self._notes:
            self._console.say(note)
        try:
            workers = Workers(
                job.node,
                job.spec,
                job.run_dir,
                self._console,
                self._on_exit,
                self._on_hang,
                self._on_asked,
                self._others,
            )
            try:
                self._agent = self._make_agent(workers)
                workers.start_monitors()
                return await self._run(workers)
            finally:
                if self._preflight is not None:
                    await self._preflight.close()
                await workers.close()
        except NvrxError as error:
            self._console.say(str(error))
            why = f"the coordinator's node {job.node.host} cannot take part: {error}"
            await self._hang_up(t.Finish(error.exit_code, why))
            return error.exit_code
        except Exception:
            self._console.say("internal error, please report it:\n" + traceback.format_exc())
            await self._hang_up(t.Finish(ExitCode.INTERNAL, f"the coordinator on {job.node.host} broke"))
            return ExitCode.INTERNAL
        finally:
            await self._hang_up()
            self._console.finish(_LAST_WORDS_S)

    async def _run(self, workers: Workers) -> int:
        job = self._job
        if job.coordinator is not None:
            await self._become_coordinator(job.coordinator)
        self._agent.link = await self._make_link()
        asyncio.get_running_loop().add_reader(self._signals.fd, self._on_signals)
        self._agent.link.start()
        end: ag.Exit = await self._agent.result
        await self._agent.link.close(_LAST_WORDS_S)
        if self._preflight is not None:
            await self._preflight.close()
        await workers.close()
        if self._coordinator is None:
            self._console.say(f"node {job.node.host} ends with code {end.code}: {self._why(end)}")
            return end.code
        done: ev.Done = await self._coordinator.result
        if self._coordinator.server is not None:
            await self._coordinator.server.close(_LAST_WORDS_S)
        self._write_result(done)
        return done.code

    async def _hang_up(self, last: t.Finish | None = None) -> None:
        """gRPC that is open when the interpreter ends may crash or hang it. `last`: a word for the other nodes."""
        if self._coordinator is not None and self._coordinator.server is not None:
            server, self._coordinator.server = self._coordinator.server, None
            if last is not None:
                server.send_all(last)
            await server.close(_LAST_WORDS_S if last is not None else 0.0)
        if self._client is not None:
            await self._client.close(0.0)

    def _make_agent(self, workers: Workers) -> AgentShell:
        job = self._job
        core = Agent(job.node, job.agent, asyncio.get_running_loop().time())
        log = EventLog(job.run_dir.agent_events(job.node), core, self._console.say)
        state_dir = workers.private_dir / HEALTH_NAME
        self._preflight = Preflight(job.preflight, job.node.infra_rank, state_dir, self._console.say, self._on_sick)
        self._preflight.start()
        shell = AgentShell(core, log, workers, self._console, self._preflight)
        shell.prepare(used=False)
        return shell

    def _others(self) -> set[int]:
        pid = self._preflight.pid if self._preflight is not None else None
        return set() if pid is None else {pid}

    async def _make_link(self) -> Link:
        if self._coordinator is not None:
            return LocalLink(self._coordinator, self._agent)
        from nvrx_slurm.control.client import ControlClient  # grpc: only where there are several nodes

        meeting = self._job.meeting
        assert meeting is not None
        self._client = ControlClient(
            meeting.endpoints,
            meeting.key,
            meeting.token,
            self._agent.post,
            meeting.keepalive,
            self._credentials(),
            self._console.say,
        )
        return self._client

    async def _become_coordinator(self, settings: CoordinatorSettings) -> None:
        core = Coordinator(settings, asyncio.get_running_loop().time())
        log = EventLog(self._job.run_dir.events("coordinator"), core, self._console.say)
        path = self._job.progress_file
        progress = ProgressFile(path, self._console.say) if path is not None else None
        time_left = TimeLeft(None if self._job.slurm is None else self._job.slurm.job_id)
        self._coordinator = CoordinatorShell(core, log, self._console, progress, time_left)
        self._coordinator.result.add_done_callback(self._on_coordinator_done)
        if self._job.meeting is not None and not await self._serve():
            self._coordinator.finish(None)
            await self._hang_up()
            self._coordinator = None
            return
        self._job.run_dir.link_latest()

    async def _serve(self) -> bool:
        """Listen for the other nodes; False where another agent does so already and this one may yield."""
        from nvrx_slurm.control.auth import new_token
        from nvrx_slurm.control.server import ControlServer, resolve

        meeting, coordinator = self._job.meeting, self._coordinator
        assert meeting is not None and coordinator is not None
        host = meeting.endpoints[0][0]
        self._say_if(limits.files_for(coordinator.core.settings.max_nodes))
        coordinator.server = ControlServer(
            meeting.key,
            meeting.token or new_token(),
            coordinator.post,
            self._console.say,
            meeting.keepalive,
            self._credentials(),
        )
        try:
            where = await coordinator.server.start(await resolve(host), [port for _, port in meeting.endpoints])
        except NvrxError:
            if not self._job.may_yield:
                raise
            return False
        self._console.say(f"coordinator listens on {where}")
        return True

    def _say_if(self, sentence: str) -> None:
        if sentence:
            self._console.say(sentence)

    def _credentials(self) -> Any:
        from nvrx_slurm.slurm.munge import Munge

        assert self._job.meeting is not None
        if self._job.meeting.token:
            return None
        munge = Munge.find(self._job.meeting.munge_socket)
        try:
            if munge is None:
                raise AuthError("there is no libmunge")
            munge.seal(b"can it?")
        except AuthError as error:
            raise UsageError(f"{_NO_TOKEN} ({error})") from None
        return munge

    # --- events from this node ------------------------------------------------------------------------------

    def _on_exit(self, local_rank: int, fault: t.RankFault | None, early: bool) -> None:
        exited = ag.WorkerExited(local_rank, fault, early)
        by_slurm = self._job.agent.in_step and fault is not None and -fault.exit_code in _ENDING
        if by_slurm and self._agent.core.state is State.RUNNING:
            # Slurm signals all processes of the step one after the other: our own signal may be next, and then this
            # is no fault of the worker
            asyncio.get_running_loop().call_later(_OWN_SIGNAL_S, self._agent.post, exited)
        else:
            self._agent.post(exited)

    def _on_hang(self, fault: t.RankFault) -> None:
        self._agent.post(ag.HangSeen(fault))

    def _on_sick(self, why: str) -> None:
        self._agent.post(ag.Sick(why))

    def _on_asked(self, local_rank: int, action: t.WorkloadAction, description: str) -> None:
        self._agent.post(ag.RankAsked(local_rank, action, description))

    def _on_signals(self) -> None:
        for received in self._signals.read():
            everybody = self._job.agent.in_step and sent_by_slurm(received)
            if received.signum in _ENDING:
                self._on_ending(received.signum, everybody)
            elif not self._agent.result.done():
                self._agent.post(ag.Warned(received.signum, everybody))
            elif self._coordinator is not None and received.signum == self._job.agent.warning_signum:
                warning = t.WarnJob(received.signum, f"the coordinator's node got signal {received.signum}")
                self._coordinator.post(ev.GotWarnJob(self._job.node.node_id, warning))

    def _on_ending(self, signum: int, everybody: bool) -> None:
        """The agent may have left while the coordinator on this node serves on: then the signal is for that one."""
        if not self._agent.result.done():
            self._agent.post(ag.Signalled(signum, everybody))
        elif self._coordinator is not None:
            end = t.EndJob(signal_exit_code(signum), f"the coordinator's node got signal {signum}", signum)
            self._coordinator.post(ev.GotEndJob(self._job.node.node_id, end))

    def _on_coordinator_done(self, result: asyncio.Future[Any]) -> None:
        """A coordinator that broke decides nothing any more: its agent must not wait for it."""
        error = None if result.cancelled() else result.exception()
        if isinstance(error, Exception):
            self._agent.finish_with(error)

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody caught, in a callback or task: end with it rather than go on half-done."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._agent.finish_with(error)
        else:
            self._console.say(f"asyncio: {context.get('message')}")

    # --- the end ----------------------------------------------------------------------------------------------

    def _why(self, end: ag.Exit) -> str:
        if end.code == ExitCode.COORDINATOR_LOST:
            return f"{end.reason}; last try: {self._client.last_problem}"
        return end.reason

    def _write_result(self, done: ev.Done) -> None:
        """Say how it ended, first cause last; leave the same as JSON for scripts (and for the front, see cli)."""
        why = [] if done.cause is not None and headline(done.cause) in done.reason else [done.reason]
        why += [report(done.cause)] if done.cause is not None else []
        self._console.say(f"job ends with code {done.code}: " + "\n".join(why))
        cause = asdict(done.cause) if done.cause is not None else None
        requeues = None if self._job.slurm is None else self._job.slurm.restart_count
        content = {"code": done.code, "reason": done.reason, "slurm_restart_count": requeues, "first_cause": cause}
        temporary = self._job.run_dir.result.with_suffix(".tmp")
        try:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
            os.replace(temporary, self._job.run_dir.result)
        except OSError as error:
            self._console.say(f"cannot write {self._job.run_dir.result}: {error.strerror}")


def run(job: Job, notes: Sequence[str] = ()) -> int:
    """Run the agent (and coordinator) of this node; `notes` are said first. Returns the exit code."""
    _hold_standard_descriptors()
    job.run_dir.create()
    return asyncio.run(Program(job, notes).run())


def _hold_standard_descriptors() -> None:
    """Where 0, 1 or 2 came closed, keep them taken: else a log of ours gets that number and the console's lines."""
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        fd = os.dup(fd)
    os.close(fd)
