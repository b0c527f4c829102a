"""The workers of this node: started per plan, seen by pidfd, signalled by group, reaped, explained."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.declared import replace
from nvrx_slurm.monitor.lease import Lease
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.monitors.client_check import ClientCheck
from nvrx_slurm.node.monitors.dead_ranks import note_gone
from nvrx_slurm.node.monitors.inspection import inspect, serve_stacks
from nvrx_slurm.node.monitors.monitor_start import MonitorStarter
from nvrx_slurm.node.monitors.monitors import RankMonitor, WatchRules, none_asked, warn_all
from nvrx_slurm.node.monitors.paces import Paces
from nvrx_slurm.node.output import faults
from nvrx_slurm.node.output.console import Console, once
from nvrx_slurm.node.run_dir import ERROR_FILE, Logs
from nvrx_slurm.node.shell import Post
from nvrx_slurm.node.workers.exits import Exits
from nvrx_slurm.node.workers.hanging import name_what_hangs
from nvrx_slurm.node.workers.idle import wait_until_idle
from nvrx_slurm.node.workers.launcher import Launcher, LauncherHooks
from nvrx_slurm.node.workers.orphans import OrphanReaper
from nvrx_slurm.node.workers.worker_spec import StartedWorker, rank_env, worker_env
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import BOARD_NAME
from nvrx_slurm.types import FaultKind, Pace, Plan, RankEvidence, RankFault, Window, WorkloadAction

OPEN_TIMEOUT_S = 10.0  # for the log files; then workers write to /dev/null
_CLOSE_TIMEOUT_S = 5.0
_MONITORS_AFTER_S = 0.1  # without a lease: the first workers' own start comes before that of the monitors' processes
_RULES_AFTER_S = 0.3

Tell = Callable[[Pace | Window | t.Imports | t.Warmth | t.Loaded], None]  # sends to the coordinator


class Workers:
    """Role: the workers of this node and their rank monitors. A rank's exit becomes WorkerExited here.

    What a worker asked for (RankAsked) and that it hung (HangSeen) is posted before its exit.
    """

    def __init__(
        self, job: NodeJob, console: Console, post: Post, private_dir: Path, lease: Lease | None, tell: Tell
    ) -> None:
        self._node, self._spec, self._run_dir, self._lease = job.node, job.spec, job.run_dir, lease
        self._console, self._post = console, post
        self._loop = asyncio.get_running_loop()
        self._alive: dict[int, StartedWorker] = {}
        self._stopping = False
        self._none_left = asyncio.Event()  # no worker is alive
        self._private_dir = private_dir  # sockets of the monitors
        spec = job.spec
        self._rules = WatchRules(spec.limits, spec.termination_signal, spec.settings, 2 * spec.hang_collect_s)
        self._tell = tell
        note = partial(console.say, to_copy=True)
        hooks = LauncherHooks(console.say, note, self._end_inexact, self._tell_imports, tell)
        self._launcher = Launcher(spec, job.node.nproc, private_dir, hooks)
        self.prepare = self._launcher.hint  # for what the ranks of other nodes import
        self._board = private_dir / BOARD_NAME  # tells wrappers which ranks are dead
        self.monitors = self._monitors = list[RankMonitor]()  # once started
        self._paces = Paces(self._monitors, spec, self._alive, tell, self._doubted)
        self._starter: MonitorStarter | None = None  # of the monitors' processes, once
        self._client_check = ClientCheck(spec.limits, self._monitors, console.say)
        self._report: asyncio.Task[None] | None = None  # about the living ranks
        self._stacks: asyncio.AbstractServer | None = None
        self._orphans = OrphanReaper()
        self._cleaning: asyncio.Task[None] | None = None  # helpers of workers that are gone clean up
        self._opening: asyncio.Task[None] | None = None  # opens the logs of the next workers
        self._ending: asyncio.Task[None] | None = None  # watches workers that have got SIGTERM
        self._failed = False  # a worker of this cycle ended by a fault or was stopped
        self._closed = False
        self._plan: Plan | None = None  # the plan of the workers that run, or ran last
        self._exits: Exits | None = None  # of that plan
        self._say_once = once(console.say)

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """What the agent wants of its workers."""
        return {
            ag.StartWorkers: lambda command: self._start_all(command.plan),
            ag.SignalWorkers: self._end,
            ag.PassOn: lambda command: self._signal(command.signum),
            ag.InspectRanks: self._report_ranks,
            ag.WarnRanks: lambda command: warn_all(self._monitors),
            ag.PostGone: partial(note_gone, self._board, self._console.say) if self._spec.wrapped else lambda _: None,
            ag.Prepare: lambda command: self._launcher.hold() if command.used else None,
            ag.EndHeld: lambda command: self._launcher.end_held(),
        }

    async def start(self) -> None:
        """Make one rank monitor per worker and start the first workers' interpreters. Raises UsageError.

        Where another node may start the same ranks, the monitors' processes start before any worker, also on a spare.
        """
        if self._spec.wrapped:
            self._board.touch(0o600)
        if self._spec.monitored:
            for local_rank in range(self._node.nproc):
                monitor = RankMonitor(local_rank, self._private_dir, self._hung, self._asked, self._lease, self._tell)
                self._monitors.append(monitor)  # first: also one half started is closed in the end
                monitor.start()
        self._launcher.begin()
        if self._lease is not None:
            self._start_monitors(0.0)
        self._stacks = await serve_stacks(self._run_dir.path, self._private_dir, self._inspect)

    def _start_monitors(self, after_s: float) -> None:
        if self._monitors and self._starter is None:
            self._starter = MonitorStarter(self._private_dir, self._lease, self._monitors, after_s)

    async def close(self) -> None:
        """Kill what is left, end the monitors. What cannot be ended is said."""
        if self._closed:
            return
        self._closed = True
        if self._stacks is not None:
            self._stacks.close()
        try:
            if self._ending is not None:
                self._ending.cancel()
            self._signal(signal.SIGKILL)
            await self._launcher.close()
            if self._alive:
                await bounded.wait_for(self._none_left.wait(), _CLOSE_TIMEOUT_S)
        except asyncio.TimeoutError:
            for worker in self._alive.values():
                worker.child.signal_group(signal.SIGKILL)
            self._console.say(f"leaving {len(self._alive)} workers behind that do not end after SIGKILL")
        if self._starter is not None:
            await self._starter.close()
        monitors, self._monitors = self._monitors, []
        await asyncio.gather(*(monitor.close() for monitor in monitors))
        if left := await self._orphans.close():
            self._console.say(f"leaving {left} processes behind that workers started: they do not end")

    async def cleaned(self) -> None:
        """Wait until no process of stopped workers runs any more but torch's manager of shared memory. Bounded."""
        if self._cleaning is not None:
            await asyncio.shield(self._cleaning)

    # --- commands -----------------------------------------------------------------------------------------------

    def _start_all(self, plan: Plan) -> None:
        """Start all workers for `plan` as soon as their logs are open; one that cannot be started counts as exited."""
        self._orphans.kill_living(later=False)  # what an earlier cycle left
        self._stopping = self._failed = False
        self._plan = plan
        self._exits = exits = Exits(plan, self._node.nproc, self._spec.in_step, self._post, self._console.say)
        name_what_hangs([self._spec.script, str(self._private_dir)], self._console.say)
        self._opening = asyncio.ensure_future(self._open_and_start(plan, exits))
        self._opening.add_done_callback(bounded.report_defect)

    async def _open_and_start(self, plan: Plan, exits: Exits) -> None:
        first, directory = plan.rank_offset, self._run_dir.node_dir(plan.cycle, self._node)
        with Logs(directory, range(first, first + self._node.nproc)) as logs:
            await logs.open(OPEN_TIMEOUT_S)
            exits.template_s = await self._launcher.wait(plan.forked)
            await self.cleaned()
            await self._orphans.clean()  # those of workers whose helpers could go on until now
            self._opening = None
            if logs.problem:
                said = "what the workers write is lost in this cycle, they go on without"
                self._console.say(f"{directory}: {logs.problem}: {said}")
            for local_rank in range(self._node.nproc):
                where = RankFault(
                    FaultKind.SPAWN, self._node.host, self._node.infra_rank, first + local_rank, local_rank
                )
                try:
                    self._start_one(plan, logs, local_rank, where)
                except OSError as error:
                    fault = replace(where, message=f"{error.strerror or error} ({error.filename or 'process'})")
                    self._loop.call_soon(exits.post, local_rank, fault)
        self._client_check.start()
        if self._alive:
            self._launcher.launched(next(iter(self._alive.values())).child.pid)
            self._paces.begin(plan)
        self._start_monitors(_MONITORS_AFTER_S)
        self._loop.call_later(_RULES_AFTER_S, bounded.begin, faults.read_rules, "rules")

    def _end_opening(self) -> None:
        """The workers are stopped before their logs are open: none of them starts."""
        if self._opening is not None and self._exits is not None:
            self._opening.cancel()
            self._opening = None
            for local_rank in range(self._node.nproc):
                self._loop.call_soon(self._exits.post, local_rank, None)

    def _signal(self, signum: int, wake: bool = False) -> None:
        """Send `signum` to the group of every living worker; `wake`: SIGCONT too."""
        if not self._stopping and (wake or signum in (signal.SIGTERM, signal.SIGKILL, signal.SIGCONT)):
            self._end_opening()
            self._stopping = True
            if self._exits is not None:
                self._exits.stop()
        for local_rank, worker in self._alive.items():
            if self._monitors and self._stopping:
                self._monitors[local_rank].end_hold()
            worker.signal(signum, wake)

    def _end(self, command: ag.SignalWorkers) -> None:
        self._signal(command.signum, True)
        if none_asked(self._monitors):
            self._say_once("ranks were warned, and none has asked should_stop(): what they have not saved is lost")
        if command.idle_s:
            self._ending = asyncio.ensure_future(self._end_idle(command))

    async def _end_idle(self, command: ag.SignalWorkers) -> None:
        stopped = dict(self._alive)

        def alive() -> list[int]:
            return [w.child.pid for r, w in stopped.items() if self._alive.get(r) is w]

        def hung() -> bool:
            return any(worker.hang is not None for worker in self._alive.values())  # its monitor makes it print stacks

        if await wait_until_idle(alive, command.signum, hung, command.idle_s):
            self._post(ag.Idle())

    def _report_ranks(self, command: ag.InspectRanks) -> None:
        async def report() -> None:
            self._post(ag.Inspected(command.cycle, await self._inspect(command.within_s)))

        self._report = asyncio.ensure_future(report())

    async def _inspect(self, within_s: float) -> tuple[RankEvidence, ...]:
        return await inspect([worker.where for worker in self._alive.values()], self._monitors, within_s)

    # --- one worker ---------------------------------------------------------------------------------------------

    def _start_one(self, plan: Plan, logs: Logs, local_rank: int, where: RankFault) -> None:
        if self._lease is not None and self._lease.over:  # this program was stopped, and the plan is an old one
            raise OSError("the lease of this node is over")
        stem = logs.stem(where.rank)
        rank_vars = rank_env(self._spec.contract, plan, self._node, local_rank, f"{stem}{ERROR_FILE}")
        monitor = self._monitors[local_rank] if self._monitors else None
        rank_vars |= {} if monitor is None else monitor.worker_env()
        rank_vars |= {"NVRX_BOARD": str(self._board)} if self._spec.wrapped else {}
        env = worker_env(os.environ, rank_vars, self._node.nproc)
        out, err = logs.of(where.rank)
        self._show(local_rank, where.rank, [out, err])
        held = self._launcher.take(local_rank)
        env = self._launcher.environment(held, env, "" if monitor is None else monitor.page)
        child = held.child
        if monitor is not None:  # before anything of the user's runs: this process may be stopped after that
            monitor.watch(pid=child.pid, pidfd=child.pidfd, cycle=plan.cycle, rank=where.rank, rules=self._rules)
        released_s = self._loop.time()
        try:
            held.release(env, out, err)
        except OSError:
            self._launcher.end(held)
            raise
        where = replace(where, pid=child.pid, log=f"{stem}.err")
        self._alive[local_rank] = StartedWorker(child, where, released_s)
        self._none_left.clear()
        self._loop.add_reader(child.pidfd, self._exited, local_rank)

    def _show(self, local_rank: int, rank: int, files: list[IO[bytes]]) -> None:
        for bit, file in enumerate(files, 1):
            if self._spec.shown(local_rank) & bit and file.name != os.devnull:
                self._console.follow(Path(file.name), self._spec.line_prefix.format(rank=rank), bit, file.tell())

    def _hung(self, local_rank: int, message: Mapping[str, Any]) -> None:
        worker = self._alive.get(local_rank)
        if worker is None or worker.hang is not None or message.get("pid") != worker.child.pid:
            return
        kind = message.get("kind", FaultKind.HANG)
        worker.hang = replace(worker.where, kind=kind, message=str(message.get("sentence", "")))
        if kind is FaultKind.HANG:
            self._post(ag.HangSeen(worker.hang))

    def _doubted(self, local_rank: int, sentence: str) -> None:
        fault = replace(self._alive[local_rank].where, kind=FaultKind.HANG, message=sentence)
        self._post(ag.HangSeen(fault, doubted=True))

    def _tell_imports(self, news: t.Imports) -> None:
        if self._plan is not None and self._plan.group_rank == 0:  # those of other nodes import the same
            self._tell(news)

    def _end_inexact(self, local_rank: int, why: str) -> None:
        """A forked worker would differ from an executed one, and other ranks know it already."""
        worker = self._alive.get(local_rank)
        if worker is not None and worker.hang is None:
            worker.hang = replace(worker.where, kind=FaultKind.INEXACT, message=why)
            worker.signal(signal.SIGKILL, False)

    def _asked(self, local_rank: int, action: WorkloadAction, description: str) -> None:
        self._post(ag.RankAsked(local_rank, action, description))

    # --- its exit -----------------------------------------------------------------------------------------------

    def _exited(self, local_rank: int) -> None:
        if self._monitors:
            self._monitors[local_rank].hear()  # it says why it killed before it kills
        worker = self._alive.pop(local_rank)
        self._loop.remove_reader(worker.child.pidfd)
        code = worker.child.reap()
        if not self._alive:
            self._none_left.set()
        if not self._failed and (code != 0 or self._stopping):
            self._failed = True
            name_what_hangs([self._spec.script, str(self._private_dir)], self._console.say)
        if self._failed and not self._alive and (self._stopping or not self._spec.wrapped):
            # Not earlier: the others may need their helpers to end well. After a success they may go on (an uploader).
            self._orphans.kill_living()
            self._cleaning = asyncio.ensure_future(self._orphans.clean())
        else:
            self._orphans.reap()
        self._client_check.ended(well=code == 0 and not self._stopping, last=not self._alive)
        early, times = False, self._paces.ended(local_rank, worker)
        if self._monitors:
            early = code == 0 and self._monitors[local_rank].leaves
            self._monitors[local_rank].unwatch()
            if not self._failed and 2 * len(self._alive) <= self._node.nproc:
                for other in self._alive:
                    self._monitors[other].should_exit()
        hang = worker.hang
        fault = faults.from_exit_code(code, worker.where) if hang is None else replace(hang, exit_code=code)
        assert self._exits is not None
        self._exits.ended(local_rank, fault, times, early, stopped=self._stopping and hang is None)
