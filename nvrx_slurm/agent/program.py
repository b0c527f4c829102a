"""The program of one node: an agent, and on one node also the coordinator, as roles on one asyncio loop.

This file says which roles there are, and in which order they start and end. What they do is in the files of the roles:
`signals`, `workers`, `preflight`, `coordinator`, `link`.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.agent.console import TRACEBACK_HOLD_S, Console
from nvrx_slurm.agent.coordinator import CoordinatorRole
from nvrx_slurm.agent.early import Early
from nvrx_slurm.agent.event_log import EventLog
from nvrx_slurm.agent.job import Job
from nvrx_slurm.agent.link import Link, remote_transport
from nvrx_slurm.agent.preflight import Preflight
from nvrx_slurm.agent.roles import Role
from nvrx_slurm.agent.shell import Shell
from nvrx_slurm.agent.signals import Signals
from nvrx_slurm.agent.workers import Workers
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.agent import Agent
from nvrx_slurm.core.job.coordinator import CoordinatorSettings
from nvrx_slurm.errors import ExitCode, NvrxError, signal_exit_code
from nvrx_slurm.system.files import HEALTH_NAME

_SIGNALLED = signal_exit_code(0)  # codes above tell the signal that ended the job
_LAST_LINES_S = 2.0  # for queued console lines at the end


class Program:
    """All roles of one node put together, run, and ended again."""

    def __init__(self, job: Job, early: Early, notes: Sequence[str] = ()) -> None:
        self._job = job
        self._notes = notes
        hold_s = 0.0 if job.meeting is None or job.coordinator is None else TRACEBACK_HOLD_S
        self._console = Console(f"nvrx-run[{job.node.host}]", hold_s=hold_s)
        # Before threads and child processes exist:
        self._signals = Signals(job.node.node_id, job.agent.in_step, job.agent.warning_signum)
        self._early = early
        self._roles: list[Role] = []
        self._coordinator: CoordinatorRole | None = None
        self._shell: Shell
        self._link: Link

    async def run(self) -> int:
        """Run until the job's end; returns the exit code. Nothing of ours is left when it returns."""
        asyncio.get_running_loop().set_exception_handler(self._on_defect)
        self._console.start()
        for note in self._notes:
            self._console.say(note)
        try:
            await self._start()
            return await self._end(await self._shell.result)
        except NvrxError as error:
            self._console.say(str(error))
            why = f"the coordinator's node {self._job.node.host} cannot take part: {error}"
            await self._close(t.Finish(error.exit_code, why))
            return error.exit_code
        except Exception:
            self._console.say("internal error, please report it:\n" + traceback.format_exc())
            await self._close(t.Finish(ExitCode.INTERNAL, f"the coordinator on {self._job.node.host} broke"))
            return ExitCode.INTERNAL
        finally:
            await self._close()
            self._console.finish(_LAST_LINES_S)

    # --- the order of start and end ---------------------------------------------------------------------------

    async def _start(self) -> None:
        """Start signals, workers, preflight, coordinator and link, in this order; then the agent's core begins.

        The processes of workers and preflight start first, because they take longest. The link needs to know whether
        the coordinator is here.
        """
        job, say = self._job, self._console.say
        core = Agent(job.node, job.agent, asyncio.get_running_loop().time())
        self._shell = shell = Shell(core, EventLog(job.run_dir.agent_events(job.node), core, say), ag.Exit, say)
        self._signals.agent = shell
        path, resident = self._early.private_dir.path, self._early.resident
        rank, state_dir = job.node.infra_rank, path / HEALTH_NAME
        preflight = Preflight(job.preflight, rank, state_dir, say, shell.post, shell.finish_with, resident)
        await self.add(preflight, Workers(job.node, job.spec, job.run_dir, self._console, shell.post, path))
        await self.add(self._signals)
        if job.coordinator is None or not await self._try_to_coordinate(job.coordinator):
            assert job.meeting is not None
            self._link = Link(shell.post, await remote_transport(job.meeting, shell.post, say))
        await self.add(self._link)
        shell.begin()

    async def _end(self, end: ag.Exit) -> int:
        """The agent has ended. Its roles end, then the coordinator when the job does."""
        for role in (self._link, *self._roles):
            if role is not self._signals and role is not self._coordinator:
                await role.close()
        if self._coordinator is not None:
            if end.code > _SIGNALLED:  # the signal may have come before the agent had a coordinator to tell
                ends = t.EndJob(end.code, end.reason, end.code - _SIGNALLED)
                self._coordinator.shell.post(ev.FromAgent(self._job.node.node_id, ends))
            return await self._coordinator.finish()
        why = end.reason
        if end.code == ExitCode.COORDINATOR_LOST:
            why += f"; last try: {getattr(self._link.transport, 'last_problem', '')}"
        self._console.say(f"node {self._job.node.host} ends with code {end.code}: {why}")
        return end.code

    async def _close(self, last: t.Finish | None = None) -> None:
        """End everything at once; `last` tells the other nodes how the job ends, if this is the coordinator's."""
        if self._coordinator is not None:
            await self._coordinator.close(last)
        for role in reversed(self._roles):
            await role.close()

    # --- roles ------------------------------------------------------------------------------------------------

    async def add(self, *roles: Role) -> None:
        """Start roles, now or while the program runs; from then on they get their commands."""
        for role in roles:
            self._roles.append(role)  # first: also one half started is closed in the end
            self._shell.add(role)
            await role.start()

    async def become_coordinator(self, settings: CoordinatorSettings) -> None:
        """Coordinate the job from now on; this node's agent leaves its coordinator, if it has one.

        Raises UsageError where this node cannot listen for the other nodes.
        """
        role = CoordinatorRole(self._job, settings, self._console.say, self._shell.finish_with)
        try:
            await role.start()
        except BaseException:
            await role.close()
            raise
        self._coordinator = role
        self._signals.coordinator = role.shell
        transport = role.connect(self._job.node.node_id, self._shell.post)
        if hasattr(self, "_link"):
            await self._link.switch(transport)
        else:
            self._link = Link(self._shell.post, transport)

    async def _try_to_coordinate(self, settings: CoordinatorSettings) -> bool:
        """False where another agent listens already and this one may yield to it."""
        try:
            await self.become_coordinator(settings)
        except NvrxError:
            if not self._job.may_yield:
                raise
            return False
        return True

    def _on_defect(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception was not caught, in a callback or task: end with it rather than go on half-done."""
        error = context.get("exception")
        if isinstance(error, Exception):
            self._shell.finish_with(error)
        else:
            self._console.say(f"asyncio: {context.get('message')}")


def run(job: Job, early: Early, notes: Sequence[str] = ()) -> int:
    """Run the agent (and coordinator) of this node; `notes` are said first. Returns the exit code."""
    job.run_dir.create()
    return asyncio.run(Program(job, early, notes).run())
