"""The coordinator of the job, on the node that has this role: its core, its members' connections, its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from nvrx_slurm import types as t
from nvrx_slurm.core.account.follower import JobAccount
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator, CoordinatorSettings, Stage
from nvrx_slurm.core.election.quorum import peer_key
from nvrx_slurm.declared import replace
from nvrx_slurm.node.coordination.link import LocalTransport
from nvrx_slurm.node.coordination.member_streams import MemberStreams
from nvrx_slurm.node.coordination.questions import AllocationClock, ProgressFile, RankOutput, began
from nvrx_slurm.node.coordination.slow_ranks import SlowRanks
from nvrx_slurm.node.event_file import EventLog
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.output import strikes
from nvrx_slurm.node.output.result import content, sentence, write_hang, write_result
from nvrx_slurm.node.output.writer import HANGS_S, Writer
from nvrx_slurm.node.publish.listeners import listeners
from nvrx_slurm.node.publish.publisher import Publisher
from nvrx_slurm.node.shell import Post, Shell

if TYPE_CHECKING:
    from nvrx_slurm.node.coordination.checkpoints import CheckpointWatch
    from nvrx_slurm.node.coordination.peers import Registrations
    from nvrx_slurm.node.output.attributor import Attributor


_MOST_FILES = 16  # that wait for the file system of the logs
_AT_ONCE_S = 0.5  # for listeners, where the program ends without the job's end


class CoordinatorHost:
    """Coordinates the job.

    `on_defect(error)`: the coordinator broke and decides nothing any more. `to_agent` gets its messages to the agent of
    this node, whose transport is `local`. `server`: the connections of other agents. `handlers`: for the commands of a
    coordinator that is elected. `prepare`: tells this node what others import.
    """

    def __init__(
        self,
        job: NodeJob,
        settings: CoordinatorSettings,
        say: Callable[[str], None],
        on_defect: Callable[[Any], None],
        to_agent: Post,
        server: Registrations | None = None,
        handlers: Mapping[type, Callable[[Any], None]] | None = None,
        prepare: Callable[[t.Imports], None] = lambda news: None,
    ) -> None:
        self._job = job
        settings = replace(settings, began_s=time.time(), job_began_s=job.began_s)
        self._settings = settings
        self._say = say
        self._on_defect = on_defect
        self._prepare = prepare
        self._loop = asyncio.get_running_loop()
        self._core = core = Coordinator(settings, self._loop.time())
        self._account = JobAccount(core)
        log = EventLog(job.run_dir.coordinator_events(settings.term, job.node), core, say)
        self.shell = shell = Shell(core, log, ev.JobOver, say)
        self.local = LocalTransport(job.node.node_id, to_agent, self.post)
        self.members = MemberStreams(self.local, server)
        self._attributor: Attributor | None = None
        self._slow_ranks = SlowRanks(core, shell.post)
        # when the job was submitted and started (Unix seconds)
        self._allocation: tuple[int, int] | None = None
        self._files = Writer(say, most=_MOST_FILES)
        self._cycle_files = Writer(say, most=_MOST_FILES)
        self._tasks = set[asyncio.Task[None]]()  # the loop keeps only weak references
        watch = self._watch_checkpoints()
        self._publisher = Publisher(
            core,
            job.labels,
            job.node.node_id,
            job.progress_file,
            self._counted,
            watch,
            listeners(job, settings.began_s, say),
        )
        shell.add(self.members)
        shell.on(ev.HangFound, self._report_hang)
        shell.on(ev.Strike, self._note_strike)
        for command, handler in (handlers or {}).items():
            shell.on(command, handler)
        self._answer_questions(watch)
        self._tell_of_cycles()
        shell.after_steps = self._after_steps
        shell.result.add_done_callback(self._on_end)
        shell.begin()

    def _after_steps(self) -> None:
        self._publisher.mark()
        if self._account.is_due:
            self._loop.call_soon(self._count)

    def _count(self) -> None:
        """A plan has left. The event is for the log: `nvrx goodput` reads it where a job has left no result."""
        counted = self._account.count()
        self.members.share(counted)
        self.shell.post(counted)

    def post(self, event: Any) -> None:
        """Hand an event of an agent to the core. How far ranks are is only shown."""
        message = event.message if isinstance(event, ev.FromAgent) else None
        if isinstance(message, t.Pace):
            self._publisher.told(event.node_id, message)
        elif isinstance(message, t.Imports):
            self._prepare(message)
            self.members.tell(message)
        elif isinstance(message, t.Window):
            self._slow_ranks.told(message, self._loop.time())
        else:
            self.shell.post(event)

    def _report_hang(self, command: ev.HangFound) -> None:
        path = self._job.run_dir.hang_report(command.cycle)
        self._files.put(path, partial(write_hang, path, command))

    def _note_strike(self, command: ev.Strike) -> None:
        place = self._job.run_dir
        add = partial(
            strikes.add,
            place.log_dir,
            command.host,
            place.job_id,
            command.why,
        )
        self._files.put(place.log_dir, add)

    def _answer_questions(self, watch: CheckpointWatch | None) -> None:
        """What the core asks for is read in threads, and posted later."""
        job = self._job
        shell = self.shell
        core = self._core
        slurm = job.slurm
        clock = AllocationClock(job.control, None if slurm is None else slurm.job_id)

        async def tell_time() -> None:
            left_s = await clock.left_s()
            shell.post(ev.TimeLeftRead(left_s))

        shell.on(ev.AskTimeLeft, lambda command: self._spawn(tell_time()))
        output = RankOutput(job.run_dir)

        async def tell_reached(command: ev.ReadReached) -> None:
            ranks = core.job.assignment.ends(core.roster.members)
            reached = await output.reached(command.cycle, ranks)
            shell.post(ev.ReachedRead(command.cycle, reached))

        shell.on(ev.ReadReached, lambda command: self._spawn(tell_reached(command)))
        is_first_step = slurm is not None and job.run_dir.path.name == f"r{slurm.restart_count}"
        if slurm is not None and is_first_step:
            self._spawn(self._ask_when_it_began(slurm.job_id))
        progress = None if job.progress_file is None else ProgressFile(job.progress_file, self._say)
        if progress is None and watch is None:
            return

        async def tell_progress(cycle: int) -> None:
            if watch is not None:
                await watch.read(resumes=True)
            if progress is not None:
                found = await progress.read()
            else:
                found = None if watch is None else watch.iteration
            shell.post(ev.ProgressRead(cycle, found))

        shell.on(ev.ReadProgress, lambda command: self._spawn(tell_progress(command.cycle)))

    def _watch_checkpoints(self) -> CheckpointWatch | None:
        if self._job.checkpoints is None:
            return None
        from nvrx_slurm.node.coordination.checkpoints import CheckpointWatch

        watch = CheckpointWatch(
            *self._job.checkpoints,
            self._core,
            self._account,
            self.shell.post,
            self._say,
        )
        self._spawn(watch.watch())
        return watch

    def _counted(self) -> t.Account | None:
        """The account until the last plan, or the end. Before a plan earlier coordinators may have counted more."""
        result = self.shell.result
        if result.done() and self._core.state is Stage.CLOSED:
            done = self._account.complete(result.result())
            return done.report.account
        return None if self._core.job.fresh else self._account.known

    async def _ask_when_it_began(self, job_id: int) -> None:
        self._allocation = await began(self._job.control, job_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _tell_of_cycles(self) -> None:
        """An attribution service, and the files of --ft-cycle-info-dir, where there are such."""
        spec = self._job.attribution
        files = self._job.cycle_info
        shell = self.shell
        if spec is not None:
            from nvrx_slurm.node.output.attributor import Attributor

            self._attributor = attributor = Attributor(spec, self._say, shell.post)
            shell.on(ev.CycleBegan, attributor.begun)
            shell.on(ev.CycleOver, attributor.over)
            shell.result.add_done_callback(lambda _: attributor.end())
        if files is not None:
            from nvrx_slurm.node.output.cycle_info import CycleInfo

            info = CycleInfo(files, self._core, self._cycle_files)
            shell.on(ev.CycleBegan, info.begun)
            shell.on(ev.CycleOver, info.over)

    @property
    def leads(self) -> bool:
        """Whether it has been elected."""
        return self._core.roster.quorum.elected

    @property
    def term(self) -> int:
        """The term in which it stands or leads."""
        return self._core.job.term

    def heard(self, at: Callable[[str], float], members: Mapping[str, t.Node]) -> float:
        """When a quorum was heard last (monotonic seconds). `at(node_id)`: when that member was."""
        quorum = self._core.roster.quorum
        now = self._loop.time()
        own = {peer_key(self._job.node)}
        heard = [(at(node_id), peer_key(node)) for node_id, node in members.items()]
        for heard_s, key in sorted(heard, reverse=True):
            if quorum.enough(own):
                break
            own.add(key)
            now = heard_s
        return now if quorum.enough(own) else 0.0

    @property
    def nodes_are_lost(self) -> bool:
        """Whether a node of the job is dead, or out of reach."""
        quorum = self._core.roster.quorum
        return bool(quorum.dead or quorum.fences or self._settings.last_leader)

    async def finish(self, before_result: Callable[[], Awaitable[None]]) -> ev.JobOver | None:
        """Wait for the end of the job, disconnect the members, publish its result; `before_result` comes before the
        file. Returns the end, or None where this node coordinates no more."""
        await asyncio.wait({self.shell.result})
        if self.shell.result.cancelled():
            return None
        done = self._account.complete(self.shell.result.result())
        await self.members.close()
        self._say(sentence(done))
        await asyncio.gather(
            before_result(),
            self._publisher.close(),
            self._files.close(HANGS_S),
            self._cycle_files.close(HANGS_S),
        )
        # Else another part of the job may go on, and a front ends its step where it finds the file.
        if self.leads:
            requeues = None if self._job.slurm is None else self._job.slurm.restart_count
            path = self._job.run_dir.result
            told = content(done, requeues, self._allocation)
            last = Writer(self._say)  # behind no file on a file system that hangs
            last.put(path, partial(write_result, path, told))
            await last.close(HANGS_S)
        await self._end_attribution()
        return done

    async def close(self, last: t.Finish | None = None) -> None:
        """Disconnect the members without waiting for the job's end; `last` tells them how it ends."""
        await self.members.close(last)
        self.shell.finish(None)
        told = asyncio.ensure_future(self._publisher.close())
        await asyncio.wait({told}, timeout=_AT_ONCE_S)
        await self._end_attribution()

    async def _end_attribution(self) -> None:
        if self._attributor is not None:
            await self._attributor.close()

    def _on_end(self, result: Any) -> None:
        for task in self._tasks:
            task.cancel()
        self._publisher.stop()
        if self._core.state is Stage.CLOSED and self.leads:
            self._publisher.publish()
        error = None if result.cancelled() else result.exception()
        if isinstance(error, Exception):
            self._on_defect(error)
