"""Makes the processes of workers: from a standby that has their modules, from a held interpreter, or from nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.child import processes
from nvrx_slurm.core import preload
from nvrx_slurm.declared import Record
from nvrx_slurm.node.output.console import once
from nvrx_slurm.node.workers.start_up import StartUp
from nvrx_slurm.node.workers.template import TemplateProcess
from nvrx_slurm.node.workers.told import Message, Told, as_modules, as_news
from nvrx_slurm.node.workers.worker_spec import LOCAL_RANK_MACRO, WarmSpec, WorkerSpec, worker_env
from nvrx_slurm.system import bounded

_CLOSE_TIMEOUT_S = 5.0
_FORK_AFTER_S = 0.1  # the start of workers and their first imports come before the fork of standbys
_FIRST_INSPECTION_S = 0.5  # until workers are asked what they have loaded; doubled each time
_LAST_INSPECTION_S = 1024.0
_READ_TIMEOUT_S = 5.0
_TOLD = "told"  # the name of the socket
_MOST_TOLD = 32
_MOST_NAMED = 5  # variables in a sentence
_FIRST_WAIT_S = 120.0  # how long the first workers wait for their template


class LauncherHooks(Record):
    """What a launcher tells."""

    say: Callable[[str], None]  # to people
    note: Callable[[str], None] = lambda sentence: None  # for the agent's log
    inexact: Callable[[int, str], None] = lambda local_rank, why: None  # a worker must not go on: all start again
    imports: Callable[[t.Imports], None] = lambda news: None  # what workers import
    warmth: Callable[[t.Warmth], None] = lambda warmth: None


class Launcher:
    """The processes that wait to become workers, those that end unused, and the templates of standbys.

    While a preflight runs, the interpreters of the next workers start. They are held before anything of the user's
    runs, see `processes.hold`. With a WarmSpec, templates fork standbys for the first workers and after each start of
    workers, one template for each prefix of commands. All methods belong to the thread of the running event loop.
    """

    def __init__(self, spec: WorkerSpec, nproc: int, private_dir: Path, hooks: LauncherHooks) -> None:
        self.spec = spec
        self.nproc = nproc
        self.start_up = StartUp(private_dir)
        self.told_path = str(private_dir / _TOLD)  # the socket on which workers tell of their imports
        self.say_once = once(hooks.say)  # to people
        self._warm = spec.warm
        self._hooks = hooks
        self._prefixes = [tuple(prefix) for prefix in spec.prefixes or [()] * nproc]  # by local rank
        self._note_once = once(hooks.note)
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, processes.Held] = {}  # by local rank
        self._standbys: dict[int, processes.Held] = {}  # by local rank
        self._templates: list[TemplateProcess] = []  # one for each prefix
        self._told: Told | None = None
        self._ranks: dict[int, int] = {}  # local rank by process id, of workers that were forked
        self._learned = preload.Learned(self._warm.preload if self._warm is not None else ())
        self._inexact = ""  # why standbys of the present templates are not used
        self._last_told: tuple[object, object] = ((), None)  # modules; modules and reason
        self._is_said = False  # whether it was said that workers cannot be forked
        self._forks = True  # the plan: workers come from standbys
        self._settled = asyncio.Event()  # set while the next workers need not wait for a standby
        self._first = True  # no workers have been launched yet
        self._loaded_s = 0.0  # how long the last workers have loaded libraries, as far as that was seen
        self._preparation: asyncio.Task[None] | None = None  # for the next start
        self._ending: set[processes.Child] = set()
        self._none_left = asyncio.Event()

    def begin(self) -> None:
        """Start the processes of the first workers: their template, with what it is known that they import."""
        if self._warm is not None:
            self._learned.found(self._warm.imports)
            self._build(self._warm)
            for template in self._templates:
                template.want([*template.modules, *((name, {}) for name in self._warm.next)])
        else:
            self._settled.set()
        self.hold()
        if _has_customization():
            self._hold_all()  # most likely they cannot be forked

    def hold(self) -> None:
        """Start the interpreters of the next workers. Where that fails, they are started when they are needed."""
        for template in self._templates:
            template.check()  # whether a module was changed since it was imported
        self._refill()
        if self._settled.is_set():  # else standbys are on their way
            self._hold_all()

    def _hold_all(self) -> None:
        with contextlib.suppress(OSError):
            for local_rank in range(self.nproc):
                if local_rank not in self._held and not self._has_standby(local_rank):
                    self._held[local_rank] = self._hold(local_rank)

    def _hold(self, local_rank: int) -> processes.Held:
        spec = self.spec
        number = str(spec.contract.first_local + local_rank)
        words = [word.replace(LOCAL_RANK_MACRO, number) for word in spec.argv]
        env = worker_env(os.environ, {}, self.nproc)
        return processes.hold([*self._prefixes[local_rank], *words], env, spec.warning_signal, spec.stdin)

    async def wait(self, forked: bool = True) -> float:
        """Wait until no process that these workers need is on its way; at a restart no longer than their imports took.
        Returns how long that was.

        A template imports what the last workers have loaded faster than they would do it again, all at once.
        `forked`: all workers of the job come from templates; else all are executed.
        """
        self._forks = forked
        begun_s = self._loop.time()
        if not forked:
            return 0.0
        self._refill()
        loads_s = self._loaded_s if any(template.grows for template in self._templates) else 0.0
        imports_s = [template.imports_s for template in self._templates]
        bound_s = _FIRST_WAIT_S if self._first else max([loads_s, *imports_s])
        try:
            await bounded.wait_for(self._settled.wait(), bound_s)
        except asyncio.TimeoutError:
            if self._first:
                self.say_once(f"no template was ready within {_FIRST_WAIT_S:g} s, workers are executed")
            self._settled.set()  # later workers do not wait
        return self._loop.time() - begun_s

    # The interpreter and the private directory may be on a shared file system, too. A call that blocks there blocks the
    # agent; then the lease of this node runs out, its monitors kill its ranks, and no worker is started after that.

    def take(self, local_rank: int) -> processes.Held:
        """A process that waits; its release makes it the worker. Raises OSError."""
        standby = self._take_standby(local_rank) if self._forks else None
        held = standby or self._held.pop(local_rank, None)
        if held is not None and held.waits:
            if standby is not None:
                self._ranks[held.child.pid] = local_rank
            else:
                self._ranks.pop(held.child.pid, None)
            return held
        if held is not None:  # it has ended
            self.end(held)
        return self._hold(local_rank)

    def environment(self, held: processes.Held, env: dict[str, str], page: str) -> dict[str, str]:
        """`env` for `held`, with what lets its start-up count steps. `page`: see `RankMonitor.page`."""
        if not (page and self.spec.step_hook):
            return env
        return self.start_up.environment(env, page, forked=held.child.pid in self._ranks)

    def launched(self, pid: int) -> None:
        """All workers have been launched; `pid` is one of them."""
        self._first = False
        self._learned.began()
        self._last_told = (), self._last_told[1]  # the node with rank 0 may be another one now: it tells all
        self._end_all(self._held)
        if self._warm is not None:
            self._prepare(self._prepare_next(self._warm, pid))

    def end_held(self) -> None:
        """The node has no workers in this cycle."""
        self._end_all(self._held)

    def hint(self, news: t.Imports) -> None:
        """Other nodes have seen their ranks import these: a spare prepares for it."""
        self._learned.hinted(as_modules(news))
        self._want()

    async def close(self) -> None:
        """End all that waits. Bounded."""
        if self._preparation is not None:
            self._preparation.cancel()
        if self._told is not None:
            self._told.close()
        self._end_all(self._held)
        self.drop_all(list(self._standbys))
        await asyncio.gather(*(template.close() for template in self._templates))
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
        self._preparation.add_done_callback(bounded.report_defect)

    async def _prepare_next(self, warm: WarmSpec, pid: int) -> None:
        """Standbys for the next workers, which have what worker `pid` loads in the course of time."""
        began_s = self._loop.time()
        await asyncio.sleep(_FORK_AFTER_S)
        self._refill()
        loaded = partial(_loaded_by, pid)
        has_core = len(os.sched_getaffinity(0)) > self.nproc
        before = frozenset[str]()
        after_s = _FIRST_INSPECTION_S
        while after_s <= _LAST_INSPECTION_S:
            await asyncio.sleep(after_s)
            found, libraries = await bounded.call_or_none(loaded, _READ_TIMEOUT_S, "warm") or ((), frozenset[str]())
            # A template that takes a core from workers delays them, so their imports come first.
            if has_core or libraries == before:
                self._learned.found(found if pid not in self._ranks else ())  # else it has what the template has
                self._learned.found(warm.later if self._learned.has("torch") else ())
                self._want()
            loads_more = libraries != before
            if loads_more:
                self._loaded_s = self._loop.time() - began_s
            before = libraries
            after_s = _FIRST_INSPECTION_S if loads_more else after_s * 2

    def _want(self) -> None:
        """Tell the templates which modules to import, at low priority."""
        modules = self._learned.modules()
        for names in self._learned.by_rank():
            some = ", ".join(names[:_MOST_NAMED])
            self.say_once(f"ranks set {some} to values that differ by rank, so each imports what comes after itself")
        for template in self._templates:
            template.want(modules)
        if self._last_told[0] != modules:
            self._last_told = modules, self._last_told[1]
            self._hooks.imports(as_news(modules))
        self._tell_warmth()

    def _tell_warmth(self) -> None:
        """Tell how workers are made, if that has changed."""
        templates = self._templates
        cold = next((one.cold for one in templates if one.cold), "")
        if self._inexact or all(self._has_standby(local_rank) for local_rank in range(self.nproc)):
            cold = self._inexact
        names = tuple(name for name, _ in templates[0].modules) if templates else ()
        warmth = t.Warmth(names[:_MOST_TOLD], cold)
        if templates and self._last_told[1] != warmth:
            self._last_told = self._last_told[0], warmth
            self._hooks.warmth(warmth)

    def _hear(self, message: Message) -> None:
        """A worker tells of its imports."""
        local_rank = self._ranks.get(message.pid)
        why = message.anew or message.restart
        if local_rank is None:
            return
        if not why:
            return self._learned.imported(local_rank, message.imported, message.changes)
        self._inexact = why
        self._learned.missed(message.module)
        self._learned.imported(local_rank, message.module, message.changes)  # until the executed worker knows better
        say = self._note_once if self._is_said else self._hooks.say
        say(f"ranks begin again, executed and not forked: {why}{_way_to_be_warm(message.changes)}")
        self._is_said = True
        self._tell_warmth()
        if message.restart:
            self._hooks.inexact(local_rank, why)

    # --- templates and standbys -----------------------------------------------------------------------------

    def _build(self, warm: WarmSpec) -> None:
        try:
            self.start_up.write()
            self._told = Told(self.told_path, self._hear)
        except OSError as error:
            self.say_once(f"workers are executed: {error.filename or self.told_path}: {error.strerror}")
            self.settle()
            return
        modules: list[preload.Module] = [(name, {}) for name in warm.preload or warm.imports]
        for prefix in dict.fromkeys(self._prefixes):
            ranks = [rank for rank, its in enumerate(self._prefixes) if its == prefix]
            self._templates.append(TemplateProcess(self, warm, prefix, ranks, modules))
        self._refill()

    def renew(self, local_ranks: Sequence[int]) -> None:
        """New standbys of these will have other modules."""
        self._inexact = ""
        self._refill(local_ranks)
        self._tell_warmth()

    def _refill(self, renewed: Sequence[int] = ()) -> None:
        """A standby for each rank that has none; those `renewed` get another one."""
        for template in self._templates:
            template.spawn()  # it does nothing while the template lives
            template.fork([rank for rank in template.ranks if rank in renewed or not self._has_standby(rank)])
        if any(template.is_busy for template in self._templates):
            self._settled.clear()

    def note(self, sentence: str) -> None:
        """A module is left out: said on the console to users who named modules, else in the agent's log."""
        if self._warm is not None and self._warm.preload:
            return self.say_once(sentence)
        self._note_once(sentence)
        for template in self._templates:
            template.hurry = False
        self.settle()

    def _has_standby(self, local_rank: int) -> bool:
        return local_rank in self._standbys and self._standbys[local_rank].waits and not self._inexact

    def add(self, local_rank: int, standby: processes.Held) -> None:
        """A template has forked this one."""
        self._drop(local_rank)
        self._standbys[local_rank] = standby
        self._loop.add_reader(standby.child.pidfd, self._killed, local_rank, standby.child.pid)

    def _killed(self, local_rank: int, pid: int) -> None:
        self._drop(local_rank)
        self._hooks.say(f"standby {pid} of local rank {local_rank} was killed")
        self._tell_warmth()

    def drop_all(self, local_ranks: Sequence[int]) -> None:
        """The standbys of these are not needed, or have old modules: ranks would begin again."""
        for local_rank in local_ranks:
            self._drop(local_rank)

    def _drop(self, local_rank: int) -> None:
        if (standby := self._take_standby(local_rank)) is not None:
            self.end(standby)

    def _take_standby(self, local_rank: int) -> processes.Held | None:
        """The standby of this rank, which belongs to the caller now; None if there is none."""
        standby = self._standbys.pop(local_rank, None)
        if standby is not None:
            self._loop.remove_reader(standby.child.pidfd)
        return standby

    def settle(self) -> None:
        """No standby of a template is on its way any more."""
        self._tell_warmth()
        if not any(template.is_busy for template in self._templates):
            self._settled.set()
            if self._preparation is None:  # before the first start; what cannot be forked is executed
                self._hold_all()


def _loaded_by(pid: int) -> tuple[tuple[str, ...], frozenset[str]]:
    return preload.loaded(Path(f"/proc/{pid}/maps").read_text(errors="replace"))


def _way_to_be_warm(changes: preload.Changes) -> str:
    """What a user can do, where the script sets variables. Their values may be secrets."""
    some = " ".join(f"{name}=..." for name, value in changes.items() if value is not None)
    return f"; to fork them from the start, export {some} in the batch script" if some and len(some) < 200 else ""


def _has_customization() -> bool:
    """Whether a sitecustomize or usercustomize runs in this Python which is not the distribution's own."""
    found = (getattr(sys.modules.get(name), "__file__", None) for name in ("sitecustomize", "usercustomize"))
    return any(file is not None and os.path.dirname(file) != os.path.dirname(os.__file__) for file in found)
