"""Makes the processes of workers: from a standby that has their modules, from a held interpreter, or from nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from nvrx_slurm.child import processes
from nvrx_slurm.core import preload
from nvrx_slurm.node.monitors.monitors import faulthandler_env
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.workers.template import TemplateProcess, TemplateSpec
from nvrx_slurm.node.workers.worker_spec import LOCAL_RANK_MACRO, WarmSpec, WorkerSpec, worker_env
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import WARM_NAME

_CLOSE_TIMEOUT_S = 5.0
_PROGRAM = Path(__file__).parents[2] / "warm" / "template.py"
_FORK_AFTER_S = 0.02  # the start of workers comes before that of their standbys
_FIRST_INSPECTION_S = 0.5  # of what the workers have loaded; each further inspection comes after twice as long
_LAST_INSPECTION_S = 1024.0
_SPARE_INSPECTION_S = 1.0  # of the script, where there are no workers
_WITHOUT_TORCH_S = 32.0  # until then workers may be about to import torch
_READ_TIMEOUT_S = 5.0
_FIRST_WAIT_S = 120.0  # of the first workers for their template
_Told = TypeVar("_Told")


class Launcher:
    """The processes that wait to become workers, those that end unused, and the templates of standbys.

    While a preflight runs, the interpreters of the next workers start. They are held before anything of the user's
    runs, see `processes.hold`. With a WarmSpec, templates fork standbys for the first workers and after each start of
    workers, one template for each prefix of commands. All methods belong to the thread of the running event loop.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        nproc: int,
        private_dir: Path,
        say: Callable[[str], None],
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self._spec, self._warm, self._private_dir = spec, spec.warm, private_dir
        self._prefixes = [tuple(prefix) for prefix in spec.prefixes or [()] * nproc]  # by local rank
        self._say, self._say_once, self._note_once = say, once(say), once(note)
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, processes.Held] = {}  # by local rank
        self._standbys: dict[int, processes.Held] = {}  # by local rank
        self._templates: dict[tuple[str, ...], TemplateProcess] = {}  # by prefix
        self._settled = asyncio.Event()  # no standby that the next workers wait for is on its way
        self._first = True  # no workers have been launched yet
        self._preparation: asyncio.Task[None] | None = None  # for the next start
        self._ending: set[processes.Child] = set()
        self._none_left = asyncio.Event()

    def begin(self) -> None:
        """Start the processes of the first workers: their template, where it is known what they import."""
        modules = () if self._warm is None else self._warm.preload or self._warm.imports
        if modules:
            self._build(modules, hurry=True)
        else:
            self._settled.set()
        self.hold()
        if _has_customization():
            self._hold_all()  # most likely they cannot be forked

    def hold(self) -> None:
        """Start the interpreters of the next workers. Where that fails, they are started when they are needed."""
        self._refill()
        if self._settled.is_set():  # else standbys are on their way
            self._hold_all()

    def _hold_all(self) -> None:
        with contextlib.suppress(OSError):
            for local_rank in range(len(self._prefixes)):
                if local_rank not in self._held and not self._has_standby(local_rank):
                    self._held[local_rank] = self._hold(local_rank)

    def _hold(self, local_rank: int) -> processes.Held:
        number = str(self._spec.contract.first_local + local_rank)
        command = [*self._prefixes[local_rank], *(word.replace(LOCAL_RANK_MACRO, number) for word in self._spec.argv)]
        return processes.hold(command, worker_env(os.environ, {}, len(self._prefixes)), self._spec.warning_signal)

    async def wait(self) -> None:
        """Until no process that these workers need is on its way; at a restart no longer than their imports took."""
        self._refill()
        took_s = max((template.imports_s for template in self._templates.values()), default=0.0)
        try:
            await bounded.wait_for(self._settled.wait(), _FIRST_WAIT_S if self._first else took_s)
        except asyncio.TimeoutError:
            if self._first:
                self._say_once(f"no template was ready within {_FIRST_WAIT_S:g} s, workers are executed")
            self._settled.set()  # later workers do not wait

    # The interpreter and the private directory may be on a shared file system, too. A call that blocks there blocks the
    # agent; then the lease of this node runs out, its monitors kill its ranks, and no worker is started after that.

    def take(self, local_rank: int) -> processes.Held:
        """A process that waits; its release makes it the worker. Raises OSError."""
        held = self._take_standby(local_rank) or self._held.pop(local_rank, None)
        if held is not None and held.waits:
            return held
        if held is not None:  # it has ended
            self.end(held)
        return self._hold(local_rank)

    def launched(self, pid: int) -> None:
        """All workers have been launched; `pid` is one of them."""
        self._first = False
        self._end_all(self._held)
        if self._warm is not None:
            self._prepare(self._prepare_next(self._warm, pid))

    def end_held(self) -> None:
        """The node has no workers in this cycle. The template of a spare imports what the script does."""
        self._end_all(self._held)
        if self._warm is not None and self._warm.script is not None and not self._warm.preload:
            self._prepare(self._inspect_script(Path(self._warm.script)))

    async def close(self) -> None:
        """End all that waits. Bounded."""
        if self._preparation is not None:
            self._preparation.cancel()
        self._end_all(self._held)
        for local_rank in list(self._standbys):
            self._drop(local_rank)
        await asyncio.gather(*(template.close() for template in self._templates.values()))
        if self._ending:
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._none_left.wait(), _CLOSE_TIMEOUT_S)

    def _end_all(self, held: dict[int, processes.Held]) -> None:
        while held:
            self.end(held.popitem()[1])

    def end(self, held: processes.Held) -> None:
        """End a process that waits and is not needed."""
        held.kill()
        self._ending.add(held.child)
        self._none_left.clear()
        self._loop.add_reader(held.child.pidfd, self._on_end, held.child)

    def _on_end(self, child: processes.Child) -> None:
        self._loop.remove_reader(child.pidfd)
        child.reap()
        self._ending.discard(child)
        if not self._ending:
            self._none_left.set()

    # --- preparations for the next start ----------------------------------------------------------------------

    def _prepare(self, work: Coroutine[Any, Any, None]) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
        self._preparation = asyncio.ensure_future(work)
        self._preparation.add_done_callback(_report_defect)

    async def _prepare_next(self, warm: WarmSpec, pid: int) -> None:
        """Standbys for the next workers, which have what worker `pid` loads in the course of time."""
        await asyncio.sleep(_FORK_AFTER_S)
        self._refill()
        has_core = len(os.sched_getaffinity(0)) > len(self._prefixes)
        after_s, before = _FIRST_INSPECTION_S, frozenset[str]()
        while not warm.preload and after_s <= _LAST_INSPECTION_S:
            await asyncio.sleep(after_s)
            found, libraries = await self._read(Path(f"/proc/{pid}/maps"), preload.loaded)
            # A template that takes a core from workers delays them, so their imports come first.
            is_time = has_core or libraries == before
            if self._templates or is_time and ("torch" in found or after_s >= _WITHOUT_TORCH_S):
                self._add_modules([*found, *warm.later])
            after_s, before = after_s * 2, libraries

    async def _inspect_script(self, script: Path) -> None:
        await asyncio.sleep(_SPARE_INSPECTION_S)
        self._add_modules(await self._read(script, preload.imported))

    def _add_modules(self, names: Sequence[str]) -> None:
        """At low priority, to the templates that there are or to new ones."""
        if not self._templates:
            return self._build(names)
        for template in self._templates.values():
            template.grow(names)

    async def _read(self, path: Path, parse: Callable[[str], _Told]) -> _Told:
        """What the text of a file tells; where it cannot be read in time, what an empty one does."""

        def read() -> _Told:
            return parse(path.read_text(errors="replace"))

        try:
            return await bounded.call_async(read, _READ_TIMEOUT_S, "warm")
        except (OSError, bounded.Overrun, RuntimeError):  # RuntimeError: no thread can be made
            return parse("")

    # --- templates and standbys -----------------------------------------------------------------------------

    def _build(self, names: Sequence[str], hurry: bool = False) -> None:
        if not names:
            return
        hook_dir, path0 = self._private_dir / WARM_NAME, self._warm.path0 if self._warm is not None else None
        try:
            hook_dir.mkdir(exist_ok=True)
            (hook_dir / "sitecustomize.py").write_bytes(_PROGRAM.read_bytes())
        except OSError as error:
            self._say_once(f"workers are executed: {error.filename}: {error.strerror}")
            self._settle()
            return
        env = worker_env(os.environ, faulthandler_env() if self._spec.monitored else {}, len(self._prefixes))
        for prefix in dict.fromkeys(self._prefixes):
            spec = TemplateSpec(prefix, self._spec.argv, env, path0, hook_dir, self._spec.warning_signal)
            renew = partial(self._refill, [rank for rank, its in enumerate(self._prefixes) if its == prefix])
            self._templates[prefix] = TemplateProcess(
                spec, names, hurry, self._add, self._settle, renew, self._say_once, self._note
            )
        self._refill()

    def _refill(self, renewed: Sequence[int] = ()) -> None:
        """A standby for each rank that has none; those `renewed` get another one."""
        for prefix, template in self._templates.items():
            template.spawn()  # one that has ended
            ranks = [rank for rank, its in enumerate(self._prefixes) if its == prefix]
            template.fork([rank for rank in ranks if rank in renewed or not self._has_standby(rank)])
        if any(template.is_busy for template in self._templates.values()):
            self._settled.clear()

    def _note(self, sentence: str) -> None:
        """A module is left out: said on the console to users who named modules, else in the agent's log."""
        if self._warm is not None and self._warm.preload:
            return self._say_once(sentence)
        self._note_once(sentence)
        for template in self._templates.values():
            template.hurry = False
        self._settle()

    def _has_standby(self, local_rank: int) -> bool:
        return local_rank in self._standbys and self._standbys[local_rank].waits

    def _add(self, local_rank: int, standby: processes.Held) -> None:
        self._drop(local_rank)
        self._standbys[local_rank] = standby
        self._loop.add_reader(standby.child.pidfd, self._killed, local_rank, standby.child.pid)

    def _killed(self, local_rank: int, pid: int) -> None:
        self._drop(local_rank)
        self._say(f"standby {pid} of local rank {local_rank} was killed: that worker will be executed")

    def _drop(self, local_rank: int) -> None:
        if (standby := self._take_standby(local_rank)) is not None:
            self.end(standby)

    def _take_standby(self, local_rank: int) -> processes.Held | None:
        """The standby of this rank, which belongs to the caller now; None if there is none."""
        standby = self._standbys.pop(local_rank, None)
        if standby is not None:
            self._loop.remove_reader(standby.child.pidfd)
        return standby

    def _settle(self) -> None:
        if not any(template.is_busy for template in self._templates.values()):
            self._settled.set()
            if self._preparation is None:  # before the first start; what cannot be forked is executed
                self._hold_all()


def _has_customization() -> bool:
    """Whether a sitecustomize or usercustomize runs in this Python which is not the distribution's own."""
    found = (getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize"))
    return any(file is not None and os.path.dirname(file) != os.path.dirname(os.__file__) for file in found)


def _report_defect(task: asyncio.Task[None]) -> None:
    """At once: no code awaits its result."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        task.get_loop().call_exception_handler({"message": "a preparation of workers broke", "exception": error})
