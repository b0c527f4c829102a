"""The coordinator of the job, on the node that has this role: its core, its members' connections, its result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.election.quorum import Quorum, peer_key
from nvrx_slurm.node.coordination.link import LAST_MESSAGES_S, LocalTransport
from nvrx_slurm.node.coordination.progress_file import ProgressFile
from nvrx_slurm.node.coordination.time_left import TimeLeft
from nvrx_slurm.node.event_log import EventLog
from nvrx_slurm.node.job import Job
from nvrx_slurm.node.output.result import BackgroundWrites, publish, write_hang
from nvrx_slurm.node.roles import Post
from nvrx_slurm.node.shell import Shell

if TYPE_CHECKING:
    from nvrx_slurm.node.coordination.peers import Admitted
    from nvrx_slurm.node.output.attributor import Attributor


class Members:
    """Role of the coordinator's core: messages to the agents, over the network or within this program."""

    commands: ClassVar[tuple[type, ...]] = (ev.SendTo, ev.Drop)

    def __init__(self) -> None:
        self.local: LocalTransport | None = None
        self.server: Admitted | None = None
        self._news: t.LogServer | None = None  # for all members, also those that come later
        self._informed: set[str] = set()

    def tell(self, news: t.LogServer) -> None:
        """Tell all members, and those that come later with their first plan."""
        self._news, self._informed = news, set()
        if self.server is not None:
            self.server.send_all(news)

    async def start(self) -> None:
        """Members connect by themselves."""

    def handle(self, command: ev.SendTo | ev.Drop) -> None:
        """Send to one member, or drop it; one that is not connected misses the message."""
        if isinstance(command, ev.Drop):
            if self.server is not None:
                self.server.drop(command.node_id)
        elif self.local is not None and command.node_id == self.local.node_id:
            self.local.deliver(command.message)
        elif self.server is not None:
            self.server.send(command.node_id, command.message)
            if self._news is not None and command.node_id not in self._informed and isinstance(command.message, t.Plan):
                self._informed.add(command.node_id)
                self.server.send(command.node_id, self._news)

    async def close(self, last: t.Finish | None = None) -> None:
        """Disconnect all; `last` goes to each of them before."""
        server, self.server = self.server, None
        if server is not None:
            if last is not None:
                server.send_all(last)
            await server.close(LAST_MESSAGES_S)


class CoordinatorHost:
    """Coordinates the job, from `begin` on.

    `on_defect(error)`: the coordinator broke and decides nothing any more.
    """

    def __init__(
        self,
        job: Job,
        settings: CoordinatorSettings,
        say: Callable[[str], None],
        on_defect: Callable[[Any], None],
        server: Admitted | None = None,
    ) -> None:
        self._job = job
        self._say = say
        self._on_defect = on_defect
        self._settings = settings
        self.members = Members()
        self.members.server = server
        self.shell: Shell
        self._attributor: Attributor | None = None
        self._writes = BackgroundWrites(say)

    def begin(self) -> None:
        """Begin to coordinate."""
        self.shell = shell = coordinator_shell(self._settings, self._job, self._say)
        shell.add(self.members)
        shell.on(ev.HangFound, self._report_hang)
        self._attribute()
        if self._job.cycle_info is not None:
            from nvrx_slurm.node.output.cycle_info import CycleInfo

            assert isinstance(shell.core, Coordinator)
            shell.on(ev.SendTo, CycleInfo(self._job.cycle_info, shell.core, self._writes).sent)
        shell.result.add_done_callback(self._on_end)
        shell.begin()

    def _report_hang(self, command: ev.HangFound) -> None:
        path = self._job.run_dir.hang_report(command.cycle)
        self._writes.begin(path, partial(write_hang, path, command))

    def _attribute(self) -> None:
        """Where there is an attribution service, tell it of cycles."""
        spec, shell = self._job.attribution, self.shell
        if spec is None:
            return
        from nvrx_slurm.node.output.attributor import Attributor

        self._attributor = attributor = Attributor(spec, self._say, shell.post)
        shell.on(ev.CycleBegan, attributor.begun)
        shell.on(ev.CycleOver, attributor.over)
        shell.result.add_done_callback(lambda _: attributor.end())

    @property
    def leads(self) -> bool:
        """Whether it has been elected."""
        return self._quorum.elected

    @property
    def term(self) -> int:
        """The term in which it stands or leads."""
        core = self.shell.core
        assert isinstance(core, Coordinator)
        return core.job.term

    @property
    def _quorum(self) -> Quorum:
        core = self.shell.core
        assert isinstance(core, Coordinator)
        return core.roster.quorum

    def heard(self, at: Callable[[str], float], members: Mapping[str, t.Node]) -> float:
        """When a quorum was heard last (monotonic seconds). `at(node_id)`: when that member was."""
        quorum, now = self._quorum, asyncio.get_running_loop().time()
        own = {peer_key(self._job.node)}
        latest = sorted(((at(node_id), peer_key(node)) for node_id, node in members.items()), reverse=True)
        for heard_s, key in latest:
            if quorum.enough(own):
                break
            own.add(key)
            now = heard_s
        return now if quorum.enough(own) else 0.0

    @property
    def nodes_are_lost(self) -> bool:
        """Whether a node of the job is dead, or out of reach."""
        return bool(self._quorum.dead or self._quorum.fences or self._settings.last_leader)

    def retire(self) -> None:
        """End without an end of the job: another node coordinates it."""
        self.shell.retire()

    def connect(self, node_id: str, to_agent: Post) -> LocalTransport:
        """A transport for the agent in the same program."""
        self.members.local = LocalTransport(node_id, to_agent, self.shell.post)
        return self.members.local

    async def finish(self, before_result: Callable[[], Awaitable[None]]) -> ev.JobOver | None:
        """Wait for the end of the job, disconnect the members, publish its result; `before_result` comes before the
        file. Returns the end, or None where this node coordinates no more."""
        await asyncio.wait({self.shell.result})
        if self.shell.result.cancelled():
            return None
        done: ev.JobOver = self.shell.result.result()
        await self.members.close()
        await self._writes.close()
        requeues = None if self._job.slurm is None else self._job.slurm.restart_count
        await publish(done, self._job.run_dir.result, requeues, self._say, self.leads, before_result)
        await self._end_attribution()
        return done

    async def close(self, last: t.Finish | None = None) -> None:
        """Disconnect the members without waiting for the job's end; `last` tells them how it ends."""
        await self.members.close(last)
        self.shell.finish(None)
        await self._end_attribution()

    async def _end_attribution(self) -> None:
        if self._attributor is not None:
            await self._attributor.close()

    def _on_end(self, result: Any) -> None:
        error = None if result.cancelled() else result.exception()
        if isinstance(error, Exception):
            self._on_defect(error)


def coordinator_shell(settings: CoordinatorSettings, job: Job, say: Callable[[str], None]) -> Shell:
    """The coordinator's core with its log and the readers that it asks; without members."""
    core = Coordinator(settings, asyncio.get_running_loop().time())
    log = EventLog(job.run_dir.coordinator_events(settings.term, job.node), core, say)
    shell = Shell(core, log, ev.JobOver, say)
    time_left = TimeLeft(job.control, None if job.slurm is None else job.slurm.job_id)
    shell.result.add_done_callback(lambda _: time_left.close())
    shell.on(ev.AskTimeLeft, lambda command: time_left.ask(lambda left_s: shell.post(ev.TimeLeftRead(left_s))))
    if job.progress_file is not None:
        progress = ProgressFile(job.progress_file, say)
        shell.on(
            ev.ReadProgress,
            lambda command: progress.read(lambda found: shell.post(ev.ProgressRead(command.cycle, found))),
        )
    return shell
