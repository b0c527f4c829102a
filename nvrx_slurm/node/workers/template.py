"""The process that imports modules and forks standbys, seen from the agent; its program is `warm.template`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvrx_slurm.child import processes
from nvrx_slurm.child.supervised import SupervisedProcess
from nvrx_slurm.core.preload import WATCHED, Changes, Module
from nvrx_slurm.node.monitors.monitors import faulthandler_env
from nvrx_slurm.node.workers.worker_spec import RANK_NAMES, WarmSpec, worker_env

if TYPE_CHECKING:
    from nvrx_slurm.node.workers.launcher import Launcher

_START = str(Path(__file__).parents[2] / "warm" / "start.py")
_BUILD_S = 900.0  # for the imports, also from a busy file system
_FORK_S = 30.0  # for the answer to a request
_MAX_STANDBYS = 253  # descriptors in one message, SCM_MAX_FD of the kernel
_WHY = {  # exit codes of warm/start.py
    97: "this Python runs another sitecustomize than that of their template",
    98: "sitecustomize or usercustomize changes sys.path or the environment, after a template has imported modules",
}


class TemplateProcess(SupervisedProcess):
    """The process over its lives. All methods belong to the thread of the running event loop.

    `ranks`: the local ranks whose standbys it forks; `prefix`: what goes before their Python (numactl).
    `modules`: what it imports, and under which variables; one that makes it unfit is left out.
    The launcher is told of each standby, when none is on its way any more, and when its standbys have other modules.
    """

    def __init__(
        self,
        launcher: Launcher,
        warm: WarmSpec,
        prefix: Sequence[str],
        ranks: Sequence[int],
        modules: Sequence[Module],
    ) -> None:
        super().__init__()
        self._launcher = launcher
        self._warm = warm
        self._prefix = prefix
        self.ranks = ranks
        self._modules = list(modules)
        self.hurry = True  # workers wait
        self._watched = [*WATCHED, *dict(modules)]  # the modules that workers tell of
        self._is_ready = self._starts_again = False
        self.imports_s = 0.0  # how long its imports took
        self._is_renewed = False  # standbys of an earlier process have other modules
        self._is_unfit = False  # no worker can be forked
        self._known = dict(modules)  # also what was left out
        self._wanted: list[int] = []  # local ranks without a standby
        self._asked: dict[int, socket.socket] = {}  # our ends of the sockets of standbys that are being forked
        self._bound: asyncio.TimerHandle | None = None
        self._is_checking = False  # whether a file has changed
        self._more: list[Module] = []  # what a successor shall import, too
        self._growth: asyncio.TimerHandle | None = None  # while a successor imports
        self._successor = 0  # its pid, once it is ready

    @property
    def modules(self) -> Sequence[Module]:
        """What it has imported, or is about to."""
        return self._modules

    @property
    def cold(self) -> str:
        """Why no worker can be forked from it; "" = it can, or workers wait until it can."""
        if self._is_unfit or self._child is None:
            return "no template can be made"
        return "" if self._is_ready or self.hurry else "its template still imports"

    @property
    def grows(self) -> bool:
        """Whether more modules are imported, or will be at once, than its standbys have."""
        return bool(self._more) or self._is_renewed

    @property
    def is_busy(self) -> bool:
        """Whether it forks, or imports."""
        imports = self.hurry or self.grows
        return self._child is not None and (imports or bool(self._asked) or self._is_checking)

    def spawn(self) -> None:
        """Start the process if there is none; where that fails, workers are executed."""
        if not self._is_unfit:
            super().spawn()

    def _start(self) -> tuple[processes.Child, socket.socket]:
        launcher = self._launcher
        spec = launcher.spec
        hook_dir = launcher.start_up.directory
        inherited = worker_env(os.environ, faulthandler_env() if spec.monitored else {}, launcher.nproc)
        command = ["", _START, os.fspath(hook_dir), spec.argv[0], *self._prefix, *spec.argv]
        null = subprocess.DEVNULL

        def start(control: int) -> processes.Child:
            setup = {
                "control": control,
                "agent": os.getpid(),
                "told": launcher.told_path,
                "modules": self._modules,
                "watched": self._watched,
                "path0": self._warm.path0,
                "rank_names": RANK_NAMES,
                "python_path": inherited.get("PYTHONPATH"),
                "scout": self._warm.scout if self.hurry else "",  # later ones are told by ranks
                "hurry": self.hurry,
            }
            env = {**inherited, "NVRX_TEMPLATE": json.dumps(setup)}
            return processes.start(command, env, null, null, spec.warning_signal, pass_fds=[control])

        return processes.with_channel(start)

    def _on_start(self) -> None:
        self._is_ready = self._starts_again = False
        self._expect_answer(_BUILD_S)

    def _on_failure(self, error: OSError) -> None:
        self.hurry = False
        self._launcher.say_once(f"no template process can be made, workers are executed: {error.strerror}")
        self._launcher.settle()

    # --- what it is asked for -------------------------------------------------------------------------------

    def fork(self, local_ranks: Sequence[int]) -> None:
        """Make a standby for each of these, now or when the process can."""
        self._wanted = list(local_ranks)[:_MAX_STANDBYS]
        if self._child is None or not self._is_ready or self._asked or not self._wanted:
            return
        wanted, self._wanted, theirs = self._wanted, [], []
        for local_rank in wanted:
            self._asked[local_rank], its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.append(its)
        self._tell([its.fileno() for its in theirs], fork=len(theirs))
        for its in theirs:
            its.close()
        self._expect_answer(_FORK_S)

    def check(self) -> None:
        """Ask whether a file of an imported module has changed: then a new template is made, and none is forked."""
        if self._child is not None and self._is_ready and self._modules and not self._is_checking:
            self._is_checking = True
            self._tell(check=True)

    def want(self, modules: Sequence[Module]) -> None:
        """Import these, too, in a successor: a copy of the process that takes its place when it is ready.

        Where one was imported under other variables, or is not wanted any more, a new process imports all.
        """
        wanted = dict(modules)
        had = (*self._modules, *self._more)
        if any(name not in wanted or wanted[name] != changes for name, changes in had):
            self._modules, self._more, self._known = list(modules), [], wanted
            self._is_renewed = self._starts_again = True
            if any(wanted.get(name, changes) != changes for name, changes in had):
                self._is_ready = False
                self._launcher.drop_all(self.ranks)  # ranks would begin again
            return self._kill() if self._child is not None else self.spawn()
        new = [module for module in modules if module[0] not in self._known]
        self._known.update(new)
        self._more += new
        self._grow()

    def _grow(self) -> None:
        if self._more and self._child is not None and self._is_ready and self._growth is None:
            self._growth = self._loop.call_later(_BUILD_S, self._on_overdue)
            self._tell(grow=self._more)

    def _tell(self, fds: Sequence[int] = (), **message: object) -> None:
        self.send(json.dumps(message).encode(), fds)

    # --- its answers ----------------------------------------------------------------------------------------

    def _expect_answer(self, bound_s: float) -> None:
        self._bound = self._loop.call_later(bound_s, self._kill)

    def _on_message(self, data: bytes) -> None:
        try:
            message = json.loads(data)
            if "successor" in message:
                self._successor = int(message["successor"])
                return self._tell(end=self._successor)
            if "unfit" in message and self._growth is not None:
                return self._leave_out(self._more, message)
            if self._bound is not None:
                self._bound.cancel()
            if "pids" in message:
                self._take(message["pids"])
            elif "ready" in message:
                self._is_ready, self.hurry, self.imports_s = True, False, float(message["ready"])
                self._take_changes(message["changes"])
                self.fork(self._wanted)
                self._grow()
                if self._is_renewed:
                    self._is_renewed = False
                    self._launcher.renew(self.ranks)
            elif "fresh" in message:
                self._is_checking = False
                self._launcher.settle()
            elif "unfit" in message:
                self._starts_again = True
                self._leave_out(self._modules, message)
            else:  # a file that it read has changed
                self._is_renewed = self._starts_again = True
                self._launcher.drop_all(self.ranks)
        except (ValueError, TypeError, KeyError) as error:
            self._launcher.say_once(f"the template process said what it should not: {error!r}")
            self._kill()

    def _take_changes(self, changes: Changes) -> None:
        """Its modules were imported under these, and so shall be what comes next."""
        for modules in (self._modules, self._more):
            modules[:] = [(name, {**changes, **own}) for name, own in modules]
        self._known.update((*self._modules, *self._more))

    def _leave_out(self, modules: list[Module], message: Mapping[str, str]) -> None:
        module = message["unfit"]
        why = message["why"]
        modules[:] = [one for one in modules if one[0] != module]
        left_out = f"workers import {module} themselves, since a process that has imported it cannot be forked"
        self._launcher.note(f"{left_out}: {why}")
        self._end_growth()
        self._grow()
        self._launcher.settle()

    def _on_overdue(self) -> None:
        self._more = []
        self._kill()

    def _end_growth(self) -> None:
        if self._growth is not None:
            self._growth.cancel()
        self._growth = None

    def _take(self, pids: Sequence[int]) -> None:
        """The standbys are children of this process now."""
        asked = self._asked
        self._asked = {}
        for pid, (local_rank, control) in zip(pids, asked.items(), strict=True):
            try:
                self._launcher.add(local_rank, processes.Held(processes.adopt(pid), control))
            except OSError:  # it has ended, or could not be made
                control.close()
        self.fork(self._wanted)
        self._launcher.settle()

    def _on_end(self) -> None:
        """The successor belongs to this process now, as standbys do, and has the other end of the channel."""
        successor = self._successor
        self._successor = 0
        self.hear()
        if not successor or self._child is None or self._starts_again:
            return super()._on_end()
        try:
            child = processes.adopt(successor)
        except OSError:  # it has ended
            return super()._on_end()
        self._loop.remove_reader(self._child.pidfd)
        self._child.reap()
        self._child = child
        self._loop.add_reader(child.pidfd, self._on_end)
        self._modules = [*self._modules, *self._more]
        self._more = []
        self._end_growth()
        if self._closed:
            self._kill()
        self._launcher.renew(self.ranks)

    def _on_exit(self, pid: int, code: int) -> None:
        if self._bound is not None:
            self._bound.cancel()
        for control in self._asked.values():
            control.close()
        self._wanted = [*self._asked, *self._wanted]
        self._asked = {}
        self._is_checking = False
        self._end_growth()
        if self._closed:
            return
        if code in _WHY:
            self._launcher.note(f"workers are executed: {_WHY[code]}")
            self._is_unfit = True
        elif code and not self._starts_again:
            self._launcher.say_once(f"the template process ended with {code}, workers are executed")
        if self._starts_again:
            self.spawn()
        if self._child is None:
            self.hurry = False
        self._launcher.settle()
