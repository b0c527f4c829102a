"""What workers leave behind: processes whose parent ended and that became children of this agent.

Helpers that clean up get time. They end by themselves once all that hold their pipe have ended: a resource tracker in
some hundredths of a second, torch_shm_manager in two seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Collection

from nvrx_slurm.child import processes
from nvrx_slurm.child.descendants import SHM_MANAGER, cleans, name, nobody
from nvrx_slurm.system import bounded

# A standby or a template's successor is a child of this agent a moment before the agent hears of it. The keeper, which
# the first save of a rank has started, keeps checkpoints for the next cycle.
_UNHEARD = (b"nvrx-standby", b"nvrx-template", b"nvrx-keeper")
_END_TIMEOUT_S = 1.0  # for killed orphans to end when the agent does
_CLEAN_S = 1.0  # for helpers that clean up
_MANAGER_S = 3.0  # where one is torch's: it waits 2 s for new clients, and holds the pipes of resource trackers


class OrphanReaper(processes.Orphans):
    """Reaps ended orphans on SIGCHLD and kills living ones.

    All methods belong to the thread of the running event loop, which has to be the main thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._child_ended = asyncio.Event()
        self._kills = False  # until none is left: one that is killed may have forked another one just before
        self._loop.add_signal_handler(signal.SIGCHLD, self._on_child)

    def kill_living(
        self,
        later: bool = True,
        but: Collection[bytes] = _UNHEARD,
        spare: Callable[[int], bool] = cleans,
    ) -> int:
        """SIGKILL all, without waiting. Returns how many have not ended yet.

        `later`: also those that come until none is left. `but`: not those with these names. `spare`: nor these.
        """
        left = self.kill(processes.own_pids(), but, spare)
        self._kills = later and left > 0
        return left

    async def clean(self) -> None:
        """Wait for helpers that clean up, and kill those that take too long.

        torch's manager goes on: it removes only what has names of its own, and the next workers need not wait for it.
        """
        await self._wait_for_helpers(_is_tracker)
        self.kill(processes.own_pids(), _UNHEARD, _is_manager)

    async def close(self) -> int:
        """Kill all, helpers that clean up last. Returns how many do not end; bounded."""
        self.kill_living()
        await self._wait_for_helpers(cleans)
        deadline = self._loop.time() + _END_TIMEOUT_S
        while True:
            self._child_ended.clear()
            left = self.kill_living(but=(), spare=nobody)
            try:
                if not left:
                    break
                await bounded.wait_for(self._child_ended.wait(), deadline - self._loop.time())
            except asyncio.TimeoutError:
                break
        self._loop.remove_signal_handler(signal.SIGCHLD)
        return left

    async def _wait_for_helpers(self, select: Callable[[int], bool]) -> None:
        began_s = self._loop.time()
        while True:
            self._child_ended.clear()
            living = self.living(processes.own_pids(), cleans)
            longest_s = _MANAGER_S if any(map(_is_manager, living)) else _CLEAN_S
            left_s = began_s + longest_s - self._loop.time()
            if left_s <= 0 or not any(map(select, living)):
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await bounded.wait_for(self._child_ended.wait(), left_s)

    def _on_child(self) -> None:
        if self._kills:
            self.kill_living()
        else:
            self.reap()
        self._child_ended.set()


def _is_manager(pid: int) -> bool:
    return name(pid) == SHM_MANAGER


def _is_tracker(pid: int) -> bool:
    return cleans(pid) and not _is_manager(pid)
