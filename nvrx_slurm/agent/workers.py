"""The workers of this node: started per plan, seen by pidfd, signalled by group, reaped, explained."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from nvrx_slurm.agent import faults
from nvrx_slurm.agent.board import BOARD_ENV, Board
from nvrx_slurm.agent.client_check import ClientCheck
from nvrx_slurm.agent.console import Console
from nvrx_slurm.agent.monitors import OnAsked, RankMonitor
from nvrx_slurm.agent.rank_log import open_log
from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.agent.worker_env import WorkerContract, rank_env, worker_env
from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import processes
from nvrx_slurm.system.files import PrivateDir
from nvrx_slurm.types import FaultKind, Node, Plan, RankFault

_DETAILS_TIMEOUT_S = 1.0  # a hung file system must not hold up the report of a fault
_CLOSE_TIMEOUT_S = 5.0
_OWN_FILES = 32
_FILES_PER_WORKER = 10  # two logs, pidfds, the monitor's page and sockets
_ORPHANS_TIMEOUT_S = 1.0  # for killed orphans to end when we do


def _check_open_files(nproc: int) -> None:
    """A monitor that cannot be started later on costs no job, but where there is no room from the start, say so."""
    needed = _OWN_FILES + nproc * _FILES_PER_WORKER
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"this process may open {hard} files but {nproc} workers with their monitors need {needed}:"
            " raise the hard limit (ulimit -Hn)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@dataclass(frozen=True)
class WorkerSpec:
    """What to start and how to watch it."""

    argv: Sequence[str]
    contract: WorkerContract
    limits: Mapping[str, Any]  # seconds, by the names of `core.rank.watch.Limits`
    termination_signal: int
    shown: Callable[[int], int]  # local rank -> bits of streams copied to the console: 1 stdout, 2 stderr
    monitored: bool = True
    settings: Mapping[str, Any] | None = None  # for the rank's `client.cfg`
    prefixes: Sequence[Sequence[str]] = ()  # by local rank: what goes before `argv` (numactl)
    warning_signal: int = 0  # that workers without a handler for it shall not die of; 0 = none
    wrapped: bool = False  # min-healthy: a dead worker's helpers speak for it to the other ranks until the cycle ends


@dataclass
class _Worker:
    child: processes.Child
    plan: Plan
    where: RankFault  # template of its fault
    stderr: Path
    error_file: Path
    hang: RankFault | None = None


class Workers:
    """All workers of one node. `on_exit(local_rank, fault, early)` and `on_hang(fault)` are called on the running loop.

    `early`: it ended well, after `should_stop()` had told it to save its work and end. What it asked for
    (`on_asked(local_rank, action, description)`, see RankMonitor) is told before its exit. `others`: the pids of the
    agent's other children, which are no orphans.
    """

    def __init__(
        self,
        node: Node,
        spec: WorkerSpec,
        run_dir: RunDir,
        console: Console,
        on_exit: Callable[[int, RankFault | None, bool], None],
        on_hang: Callable[[RankFault], None],
        on_asked: OnAsked,
        others: Callable[[], set[int]] = set,
    ) -> None:
        self._others = others
        self._node = node
        self._spec = spec
        self._run_dir = run_dir
        self._console = console
        self._on_exit = on_exit
        self._on_hang = on_hang
        self._on_asked = on_asked
        self._loop = asyncio.get_running_loop()
        self._alive: dict[int, _Worker] = {}
        self._stopping = False
        self._nobody = asyncio.Event()  # no worker is alive
        self._nobody.set()
        self._private = PrivateDir()  # sockets of the monitors
        self._board = Board(self._private.path) if spec.wrapped else None
        self._monitors: list[RankMonitor] = []
        self._client_check = ClientCheck(spec.limits, self._any_connected, console.say)
        self._orphans = processes.Orphans()
        self._output_lost = False
        self._failed = False  # a worker of this cycle ended by a fault or was stopped
        self._child_ended = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        self._explained: asyncio.Task[None] | None = None  # the last one: faults are reported in the order of exits

    @property
    def private_dir(self) -> Path:
        """A directory of this agent's own, for as long as it lives."""
        return self._private.path

    def start_monitors(self) -> None:
        """Start one rank monitor per worker; they live as long as the agent. Raises UsageError where limits forbid."""
        if not self._spec.monitored:
            return
        _check_open_files(self._node.nproc)
        for local_rank in range(self._node.nproc):
            monitor = RankMonitor(local_rank, self._private.path, self._hung, self._on_asked)
            self._monitors.append(monitor)  # first: also one half started is closed in the end
            try:
                monitor.start()
            except OSError as error:
                why = error.strerror or error
                raise UsageError(f"the rank monitor {local_rank} cannot be started: {why}; see ulimit -a") from None

    def start(self, plan: Plan) -> None:
        """Start all workers for `plan`; one that cannot be started counts as exited."""
        if self._spec.wrapped:
            self._orphans.kill(self._known())  # of an earlier cycle
        self._stopping = self._failed = self._output_lost = False
        directory = self._run_dir.node_dir(plan.cycle, self._node)
        for local_rank in range(self._node.nproc):
            rank = plan.rank_offset + local_rank
            where = RankFault(FaultKind.SPAWN, self._node.host, self._node.infra_rank, rank, local_rank)
            try:
                self._start_one(plan, directory, local_rank, where)
            except OSError as error:
                fault = replace(where, message=f"{error.strerror or error} ({error.filename or 'process'})")
                self._loop.call_soon(self._on_exit, local_rank, fault, False)
        self._client_check.start()

    def _any_connected(self) -> bool:
        return not self._monitors or any(monitor.connected for monitor in self._monitors)

    def signal(self, signum: int, wake: bool = False) -> None:
        """Send `signum` to the group of every living worker; `wake`: SIGCONT too (a stopped one acts on nothing)."""
        self._stopping = self._stopping or signum in (signal.SIGTERM, signal.SIGKILL) or wake
        for worker in self._alive.values():
            worker.child.signal_group(signum)
            if wake:
                worker.child.signal_group(signal.SIGCONT)

    def post_gone(self, cycle: int, ranks: tuple[int, ...], reason: str) -> None:
        """Tell the in-process wrappers of this node that ranks elsewhere are dead."""
        if self._board is None:
            return
        try:
            self._board.post(cycle, ranks, reason)
        except OSError as error:
            self._console.say(f"the wrappers will hear of dead ranks late: {self._board.path}: {error.strerror}")

    def warn(self) -> None:
        """Have `should_stop()` say yes in all workers that are alive."""
        for local_rank in self._alive:
            if self._monitors:
                self._monitors[local_rank].warn()

    async def close(self) -> None:
        """Kill what is left, end the monitors, remove our directory. Bounded, and never raises: what breaks is said."""
        try:
            self.signal(signal.SIGKILL)
            await asyncio.wait_for(self._nobody.wait(), _CLOSE_TIMEOUT_S)
        except asyncio.TimeoutError:
            self._console.say(f"leaving {len(self._alive)} workers behind that do not end after SIGKILL")
        except Exception as error:
            self._console.say(f"the workers cannot be killed: {error}")
        monitors, self._monitors = self._monitors, []
        for problem in await asyncio.gather(*(monitor.close() for monitor in monitors), return_exceptions=True):
            if problem is not None:
                self._console.say(f"a rank monitor cannot be ended: {problem}")
        await self._end_orphans()
        try:
            self._private.remove()
        except OSError as error:
            self._console.say(f"{self._private.path} cannot be removed: {error.strerror}")

    # --- what workers leave behind ------------------------------------------------------------------------------

    def _known(self) -> set[int]:
        """Children that are no orphans."""
        monitors = {monitor.pid for monitor in self._monitors if monitor.pid is not None}
        return self._others() | monitors | {worker.child.pid for worker in self._alive.values()}

    def _on_child(self) -> None:
        self._orphans.reap(self._known())
        self._child_ended.set()

    async def _end_orphans(self) -> None:
        deadline = self._loop.time() + _ORPHANS_TIMEOUT_S
        while True:
            self._child_ended.clear()
            left = self._orphans.kill(self._known())
            if not left:
                break
            try:
                await asyncio.wait_for(self._child_ended.wait(), deadline - self._loop.time())
            except asyncio.TimeoutError:
                self._console.say(f"leaving {left} processes behind that workers started: they do not end")
                break
        self._loop.remove_signal_handler(signal.SIGCHLD)

    # --- one worker ---------------------------------------------------------------------------------------------

    def _start_one(self, plan: Plan, directory: Path, local_rank: int, where: RankFault) -> None:
        stem = directory / f"rank_{where.rank}"
        error_file = stem.with_suffix(".error.json")
        with contextlib.suppress(OSError):
            error_file.unlink()
        rank_vars = rank_env(self._spec.contract, plan, self._node, local_rank, str(error_file))
        monitor = self._monitors[local_rank] if self._monitors else None
        if monitor is not None:
            rank_vars.update(monitor.worker_env())
        if self._board is not None:
            rank_vars[BOARD_ENV] = str(self._board.path)
        env = worker_env(os.environ, rank_vars, self._node.nproc)
        argv = [*(self._spec.prefixes[local_rank] if self._spec.prefixes else ()), *self._spec.argv]
        out_path, err_path = stem.with_suffix(".out"), stem.with_suffix(".err")
        with self._log(out_path) as out, self._log(err_path) as err:
            self._show(local_rank, where.rank, (out, err))
            child = processes.start(argv, env, out, err, self._spec.warning_signal)
        where = replace(where, pid=child.pid, log=str(err_path))
        self._alive[local_rank] = worker = _Worker(child, plan, where, err_path, error_file)
        self._nobody.clear()
        self._loop.add_reader(child.pidfd, self._exited, local_rank)
        if monitor is not None:
            monitor.watch(
                pid=child.pid,
                pidfd=child.pidfd,
                cycle=plan.cycle,
                rank=worker.where.rank,
                limits=self._spec.limits,
                signum=self._spec.termination_signal,
                cfg=self._spec.settings,
            )

    def _log(self, path: Path) -> IO[bytes]:
        """The file for one stream of a rank; a full disk ends no training, so then it is /dev/null, said once."""
        file, problem = open_log(path)
        if problem and not self._output_lost:
            self._output_lost = True
            self._console.say(f"{path}: {problem}: what the workers write is lost in this cycle, they go on without")
        return file

    def _show(self, local_rank: int, rank: int, files: tuple[IO[bytes], IO[bytes]]) -> None:
        streams = self._spec.shown(local_rank)
        for bit, file in enumerate(files, 1):
            if streams & bit and file.name != os.devnull:
                self._console.follow(Path(file.name), f"[rank {rank}] ", bit, file.tell())

    def _hung(self, local_rank: int, message: Mapping[str, Any]) -> None:
        worker = self._alive.get(local_rank)
        if worker is None or worker.hang is not None or message.get("pid") != worker.child.pid:
            return
        worker.hang = replace(worker.where, kind=FaultKind.HANG, message=str(message.get("sentence", "")))
        self._on_hang(worker.hang)

    def _exited(self, local_rank: int) -> None:
        if self._monitors:
            self._monitors[local_rank].hear()  # it says why it killed before it kills
        worker = self._alive.pop(local_rank)
        if not self._alive:
            self._nobody.set()
        self._loop.remove_reader(worker.child.pidfd)
        code = worker.child.reap()
        self._failed = self._failed or code != 0 or self._stopping
        if self._failed and not self._alive and (self._stopping or not self._spec.wrapped):
            # Not earlier: the others may need their helpers to end well. After a success they may go on (an uploader).
            self._orphans.kill(self._known())
        else:
            self._orphans.reap(self._known())
        self._client_check.ended(well=code == 0 and not self._stopping, last=not self._alive)
        early = False
        if self._monitors:
            early = code == 0 and self._monitors[local_rank].leaves
            self._monitors[local_rank].unwatch()
        fault = faults.from_exit_code(code, worker.where)
        if worker.hang is not None:
            fault = replace(worker.hang, exit_code=code)
        if fault is None or self._stopping:
            self._on_exit(local_rank, fault, early)
            return
        self._explained = asyncio.ensure_future(self._explain(local_rank, fault, worker, self._explained))

    async def _explain(
        self, local_rank: int, fault: RankFault, worker: _Worker, before: asyncio.Task[None] | None
    ) -> None:
        details = self._loop.create_future()
        # A thread that may be left behind, stuck in a file system that hangs: an executor's would hold up our exit.
        arguments = (details, fault, worker)
        threading.Thread(target=self._read_details, args=arguments, name="faults", daemon=True).start()
        try:
            fault = await asyncio.wait_for(details, _DETAILS_TIMEOUT_S)
        except asyncio.TimeoutError:
            fault = replace(fault, message=fault.message or "its log could not be read within a second")
        if before is not None:
            await asyncio.wait({before})
        self._on_exit(local_rank, fault, False)

    def _read_details(self, details: asyncio.Future[RankFault], fault: RankFault, worker: _Worker) -> None:
        found = faults.with_details(fault, worker.error_file, worker.stderr)

        def hand_over() -> None:
            if not details.done():
                details.set_result(found)

        try:
            self._loop.call_soon_threadsafe(hand_over)
        except RuntimeError:
            return  # the loop is closed: nobody waits for it any more
