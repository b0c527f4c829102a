"""The process that imports modules and forks standbys, seen from the agent; its program is `warm.template`."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nvrx_slurm.child import processes
from nvrx_slurm.child.supervised import SupervisedProcess
from nvrx_slurm.frozen import frozen
from nvrx_slurm.node.workers.worker_spec import RANK_NAMES

_START = str(Path(__file__).parents[2] / "warm" / "start.py")
_BUILD_S = 900.0  # for the imports, also from a busy file system
_FORK_S = 30.0  # for the answer to a request
_MAX_STANDBYS = 253  # descriptors in one message, SCM_MAX_FD of the kernel
_WHY = {  # exit codes of warm/start.py
    97: "this Python runs another sitecustomize than that of their template",
    98: "sitecustomize or usercustomize changes sys.path or the environment, after a template has imported modules",
}


@frozen
class TemplateSpec:
    """The workers that a template forks."""

    prefix: Sequence[str]  # what goes before Python (numactl)
    argv: Sequence[str]  # Python and its arguments
    env: Mapping[str, str]  # without what only a rank has
    path0: str | None  # what Python puts in front of sys.path; None = nothing
    hook_dir: Path
    ignored: int = 0  # a signal that workers shall not die of; 0 = none


class TemplateProcess(SupervisedProcess):
    """The process over its lives. All methods belong to the thread of the running event loop.

    `modules`: what it imports; one that makes it unfit is left out. `on_standby(local_rank, standby)` hands over each
    standby, `on_settled()` tells that none is on its way any more. `say(sentence)` is for people.
    """

    def __init__(
        self,
        spec: TemplateSpec,
        modules: Sequence[str],
        hurry: bool,
        on_standby: Callable[[int, processes.Held], None],
        on_settled: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._spec, self._modules, self._hurry = spec, list(modules), hurry
        self._on_standby, self._on_settled, self._say = on_standby, on_settled, say
        self._is_ready = self._starts_again = False
        self._wanted: list[int] = []  # local ranks without a standby
        self._asked: dict[int, socket.socket] = {}  # our ends of the sockets of standbys that are being forked
        self._bound: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it imports or forks."""
        return self._child is not None and (not self._is_ready or bool(self._asked))

    def spawn(self) -> None:
        """Start the process if there is none; where that fails, workers are executed."""
        if self._modules:
            super().spawn()

    def _start(self) -> tuple[processes.Child, socket.socket]:
        spec = self._spec
        start_py = [sys.executable, "-I", "-S", _START, os.fspath(spec.hook_dir)]
        command = [*spec.prefix, *start_py, *spec.argv]
        null = subprocess.DEVNULL

        def start(control: int) -> processes.Child:
            setup = {
                "control": control,
                "agent": os.getpid(),
                "modules": self._modules,
                "path0": spec.path0,
                "rank_names": RANK_NAMES,
                "python_path": spec.env.get("PYTHONPATH"),
                "hurry": self._hurry,
            }
            env = {**spec.env, "NVRX_TEMPLATE": json.dumps(setup)}
            return processes.start(command, env, null, null, spec.ignored, pass_fds=[control])

        return processes.with_channel(start)

    def _on_start(self) -> None:
        self._is_ready = self._starts_again = False
        self._expect_answer(_BUILD_S)

    def _on_failure(self, error: OSError) -> None:
        self._say(f"no template process can be made, workers are executed: {error.strerror}")
        self._on_settled()

    def fork(self, local_ranks: Sequence[int]) -> None:
        """Make a standby for each of these, now or when the process is ready."""
        self._wanted = list(local_ranks)[:_MAX_STANDBYS]
        if self._child is None or not self._is_ready or self._asked or not self._wanted:
            return
        theirs = []
        for local_rank in self._wanted:
            self._asked[local_rank], its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            theirs.append(its)
        self.send(b"x", [its.fileno() for its in theirs])
        for its in theirs:
            its.close()
        self._expect_answer(_FORK_S)

    # --- its answers ----------------------------------------------------------------------------------------

    def _expect_answer(self, bound_s: float) -> None:
        self._bound = self._loop.call_later(bound_s, self._kill)

    def _on_message(self, data: bytes) -> None:
        if self._bound is not None:
            self._bound.cancel()
        try:
            message = json.loads(data)
            if "pids" in message:
                self._take(message["pids"])
            elif "ready" in message:
                self._is_ready, self._hurry = True, False
                self.fork(self._wanted)
            elif "unfit" in message:
                self._leave_out(message["unfit"], message["why"])
            else:
                self._starts_again = True  # a file that it read has changed
        except (ValueError, TypeError, KeyError) as error:
            self._say(f"the template process said what it should not: {error!r}")
            self._kill()

    def _leave_out(self, module: str, why: str) -> None:
        self._say(f"workers import {module} themselves, since a process that has imported it cannot be forked: {why}")
        self._modules.remove(module)
        self._starts_again = True

    def _take(self, pids: Sequence[int]) -> None:
        """The standbys are children of this process now."""
        asked, self._asked = self._asked, {}
        for pid, (local_rank, control) in zip(pids, asked.items(), strict=False):
            try:
                self._on_standby(local_rank, processes.Held(processes.adopt(pid), control))
            except OSError:  # it has ended
                control.close()
        for control in list(asked.values())[len(pids) :]:  # no process could be made
            control.close()
        self._on_settled()

    def _on_exit(self, pid: int, code: int) -> None:
        if self._bound is not None:
            self._bound.cancel()
        for control in self._asked.values():
            control.close()
        self._asked = {}
        if self._closed:
            return
        if code in _WHY:
            self._say(f"workers are executed: {_WHY[code]}")
            self._modules = []
        elif code:
            self._say(f"the template process ended with {code}, workers are executed")
        if self._starts_again:
            self.spawn()
        if self._child is None:
            self._on_settled()
