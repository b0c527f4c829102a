"""Makes the processes of workers: from a standby that has their modules, from a held interpreter, or from nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from nvrx_slurm.child import processes
from nvrx_slurm.node.monitors.monitors import faulthandler_env
from nvrx_slurm.node.workers.warm import Warm, WarmSpec
from nvrx_slurm.node.workers.worker_env import LOCAL_RANK_MACRO, worker_env

_CLOSE_TIMEOUT_S = 5.0


class Launcher:
    """The processes that wait to become workers, and those that end unused.

    While a preflight runs, the interpreters of the next workers start. They are held before anything of the user's
    runs, see `processes.hold`. All methods belong to the thread of the running event loop.
    """

    def __init__(
        self,
        argv: Sequence[str],
        prefixes: Sequence[Sequence[str]],
        first_local: int,
        warning_signal: int,
        monitored: bool,
        warm: WarmSpec | None,
        private_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        """`prefixes`: by local rank, what goes before `argv`. `first_local`: LOCAL_RANK of the agent's first worker."""
        self._commands = [
            [*prefix, *(word.replace(LOCAL_RANK_MACRO, str(first_local + local_rank)) for word in argv)]
            for local_rank, prefix in enumerate(prefixes)
        ]
        self._warning_signal = warning_signal
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, processes.Held] = {}  # by local rank
        self._ending: set[processes.Child] = set()
        self._none_left = asyncio.Event()
        env = worker_env(os.environ, faulthandler_env() if monitored else {}, len(prefixes))
        self._warm = Warm(warm, argv, prefixes, env, warning_signal, private_dir, self.end, say)

    def begin(self) -> None:
        """Start the processes of the first workers."""
        self._warm.begin()
        self.hold()

    def hold(self) -> None:
        """Start the interpreters of the next workers. Where that fails, they are started when they are needed."""
        with contextlib.suppress(OSError):
            for local_rank in range(len(self._commands)):
                if local_rank not in self._held and not self._warm.provides(local_rank):
                    self._held[local_rank] = self._hold(local_rank)

    def _hold(self, local_rank: int) -> processes.Held:
        env = worker_env(os.environ, {}, len(self._commands))
        return processes.hold(self._commands[local_rank], env, self._warning_signal)

    async def wait(self) -> None:
        """Until no process that the first workers need is on its way; bounded."""
        await self._warm.wait()

    # The interpreter and the private directory may be on a shared file system, too. A call that blocks there blocks the
    # agent; then the lease of this node runs out, its monitors kill its ranks, and no worker is started after that.

    def take(self, local_rank: int) -> processes.Held:
        """A process that waits; its release makes it the worker. Raises OSError."""
        held = self._warm.take(local_rank) or self._held.pop(local_rank, None)
        if held is not None and held.waits:
            return held
        if held is not None:  # it has ended
            self.end(held)
        return self._hold(local_rank)

    def launched(self, pid: int) -> None:
        """All workers have been launched; `pid` is one of them."""
        self._warm.workers_started(pid)

    def end_held(self) -> None:
        """The node has no workers in this cycle."""
        held, self._held = self._held, {}
        for one in held.values():
            self.end(one)
        self._warm.stays_spare()

    async def close(self) -> None:
        """End all that waits. Bounded."""
        self.end_held()
        await self._warm.close()
        if self._ending:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), _CLOSE_TIMEOUT_S)

    def end(self, held: processes.Held) -> None:
        """End a process that waits and is not needed."""
        held.kill()
        self._ending.add(held.child)
        self._none_left.clear()
        self._loop.add_reader(held.child.pidfd, self._ended, held.child)

    def _ended(self, child: processes.Child) -> None:
        self._loop.remove_reader(child.pidfd)
        child.reap()
        self._ending.discard(child)
        if not self._ending:
            self._none_left.set()
