"""Standbys for the workers of this node: when templates are made, of what, and when they fork."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nvrx_slurm.child import processes
from nvrx_slurm.core import preload
from nvrx_slurm.node.workers.template import Template, TemplateSpec
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import WARM_NAME

_PROGRAM = Path(__file__).parents[2] / "warm" / "template.py"
_FORK_AFTER_S = 0.1  # the start of workers comes before that of their standbys
_FIRST_INSPECTION_S = 1.0  # at what the workers have loaded; each further inspection comes after twice as long
_LAST_INSPECTION_S = 1024.0
_WITHOUT_TORCH_S = 32.0  # until then workers may be about to import torch
_READ_TIMEOUT_S = 5.0
_ANSWER_S = 2.0  # for a standby to show that it can run
_FIRST_WAIT_S = 120.0  # of the first workers for a template that the user asked for


@dataclass(frozen=True)
class WarmSpec:
    """What standbys of this job are like."""

    script: str | None  # the file that workers run, None = not known
    path0: str | None  # what Python puts in front of sys.path; None = nothing
    preload: Sequence[str] = ()  # modules that the user named; () = those that workers load


class Warm:
    """The templates and standbys of this node. All methods belong to the thread of the running event loop.

    `spec`: None = there are none. `argv`: of all workers, Python first. `prefixes`: by local rank, what goes before it;
    each has its own template.
    `end(standby)` ends a process that is not needed.
    """

    def __init__(
        self,
        spec: WarmSpec | None,
        argv: Sequence[str],
        prefixes: Sequence[Sequence[str]],
        env: Mapping[str, str],
        warning_signal: int,
        private_dir: Path,
        end: Callable[[processes.Held], None],
        say: Callable[[str], None],
    ) -> None:
        self._spec, self._argv, self._env, self._end = spec, argv, env, end
        self._prefixes = [tuple(prefix) for prefix in prefixes]
        self._warning_signal, self._private_dir = warning_signal, private_dir
        self._say_sentence, self._said = say, set[str]()
        self._loop = asyncio.get_running_loop()
        self._templates: dict[tuple[str, ...], Template] = {}  # by prefix
        self._standbys: dict[int, processes.Held] = {}  # by local rank
        self._silent = set[int]()  # local ranks whose standbys have yet to answer
        self._settled = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._inspection: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The agent starts: a template that the user asked for comes before the first workers."""
        if self._spec is not None and self._spec.preload:
            self._build(self._spec.preload, hurry=True)
        else:
            self._settled.set()

    async def wait(self) -> None:
        """Until no first standby is on its way; bounded."""
        try:
            await asyncio.wait_for(self._settled.wait(), _FIRST_WAIT_S)
        except asyncio.TimeoutError:
            self._say(f"no template was ready within {_FIRST_WAIT_S:g} s, workers are executed")
            self._settled.set()  # later workers do not wait
        asked = [asyncio.wait_for(self._ask(rank), _ANSWER_S) for rank in self._standbys]
        await asyncio.gather(*asked, return_exceptions=True)  # TimeoutError; OSError: it has ended
        for local_rank in self._silent.intersection(self._standbys):  # it never gets the environment of a rank
            self._drop(local_rank, "does not answer")

    async def _ask(self, local_rank: int) -> None:
        """A standby that can run sends back what it gets."""
        self._silent.add(local_rank)
        control = self._standbys[local_rank].control
        control.send(b"?", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        control.setblocking(False)
        if await self._loop.sock_recv(control, 1):
            self._silent.discard(local_rank)

    def take(self, local_rank: int) -> processes.Held | None:
        """The standby of this rank, which belongs to the caller now; None if there is none."""
        standby = self._standbys.pop(local_rank, None)
        if standby is not None:
            self._loop.remove_reader(standby.child.pidfd)
        return standby

    def provides(self, local_rank: int) -> bool:
        """Whether this rank has a standby, or the first one is on its way."""
        return self._has(local_rank) or not self._settled.is_set()

    def _has(self, local_rank: int) -> bool:
        return local_rank in self._standbys and self._standbys[local_rank].waits

    def workers_started(self, pid: int) -> None:
        """`pid`: one of them."""
        if self._templates:
            self._later(_FORK_AFTER_S, self._refill)
        elif self._spec is not None:
            self._later(_FIRST_INSPECTION_S, partial(self._begin_inspection, pid, _FIRST_INSPECTION_S, ()))

    def stays_spare(self) -> None:
        """The node has no workers: its template imports what the script does."""
        if not self._templates and self._spec is not None and self._spec.script is not None:
            self._later(_FIRST_INSPECTION_S, partial(self._begin_read, Path(self._spec.script)))

    async def close(self) -> None:
        """End all processes; standbys are ended by `end`. Bounded."""
        self._end_timer()
        for local_rank in list(self._standbys):
            self._drop(local_rank)
        await asyncio.gather(*(template.close() for template in self._templates.values()))

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say_sentence(sentence)

    # --- which modules --------------------------------------------------------------------------------------

    def _later(self, after_s: float, call: Callable[[], None]) -> None:
        self._end_timer()
        self._timer = self._loop.call_later(after_s, call)

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._inspection is not None:
            self._inspection.cancel()

    def _begin_inspection(self, pid: int, after_s: float, before: tuple[str, ...]) -> None:
        self._inspection = asyncio.ensure_future(self._inspect(pid, after_s, before))

    async def _inspect(self, pid: int, after_s: float, before: tuple[str, ...]) -> None:
        """Two inspections that find the same: the worker has imported what it needs."""
        found = await self._read(Path(f"/proc/{pid}/maps"), preload.loaded)
        if found and found == before and ("torch" in found or after_s >= _WITHOUT_TORCH_S):
            self._build(found)
        elif after_s < _LAST_INSPECTION_S:
            self._timer = self._loop.call_later(2 * after_s, self._begin_inspection, pid, 2 * after_s, found)

    def _begin_read(self, script: Path) -> None:
        self._inspection = asyncio.ensure_future(self._read_script(script))

    async def _read_script(self, script: Path) -> None:
        self._build(await self._read(script, preload.imported))

    async def _read(self, path: Path, parse: Callable[[str], tuple[str, ...]]) -> tuple[str, ...]:
        """The modules that the text of a file tells; () where it cannot be read in time."""

        def read() -> tuple[str, ...]:
            return parse(path.read_text(errors="replace"))

        try:
            return await bounded.call_async(read, _READ_TIMEOUT_S, "warm")
        except (OSError, bounded.Overrun, RuntimeError):  # RuntimeError: no thread can be made
            return ()

    # --- templates ------------------------------------------------------------------------------------------

    def _build(self, names: Sequence[str], hurry: bool = False) -> None:
        if not names:
            return
        hook_dir, path0 = self._private_dir / WARM_NAME, self._spec.path0 if self._spec is not None else None
        try:
            hook_dir.mkdir(exist_ok=True)
            (hook_dir / "sitecustomize.py").write_bytes(_PROGRAM.read_bytes())
        except OSError as error:
            self._say(f"workers are executed: {error.filename}: {error.strerror}")
            self._settle()
            return
        for prefix in dict.fromkeys(self._prefixes):
            spec = TemplateSpec(prefix, self._argv, self._env, path0, hook_dir, self._warning_signal)
            template = Template(spec, names, hurry, self._add, self._settle, self._say)
            self._templates[prefix] = template
            template.spawn()
        self._refill()

    def _refill(self) -> None:
        for prefix, template in self._templates.items():
            template.spawn()  # one that has ended
            template.fork([rank for rank, its in enumerate(self._prefixes) if its == prefix and not self._has(rank)])

    def _add(self, local_rank: int, standby: processes.Held) -> None:
        self._drop(local_rank)
        self._standbys[local_rank] = standby
        self._loop.add_reader(standby.child.pidfd, self._drop, local_rank, "was killed")

    def _drop(self, local_rank: int, why: str = "") -> None:
        """End a standby; `why` is for people."""
        if (standby := self.take(local_rank)) is None:
            return
        self._end(standby)
        if why:
            pid = standby.child.pid
            self._say_sentence(f"standby {pid} of local rank {local_rank} {why}: that worker will be executed")

    def _settle(self) -> None:
        if not any(template.is_busy for template in self._templates.values()):
            self._settled.set()
