"""What workers leave behind: processes whose parent ended and that became children of this agent."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Collection

from nvrx_slurm.child import processes
from nvrx_slurm.system import bounded

# A standby or a template's successor is a child of this agent a moment before the agent hears of it.
_UNHEARD = (b"nvrx-standby", b"nvrx-template")
_END_TIMEOUT_S = 1.0  # for killed orphans to end when the agent does


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

    def kill_living(self, later: bool = True, but: Collection[bytes] = _UNHEARD) -> int:
        """SIGKILL all, without waiting. Returns how many have not ended yet.

        `later`: also those that come until none is left. `but`: not those with these names.
        """
        left = self.kill(processes.own_pids(), but)
        self._kills = later and left > 0
        return left

    async def close(self) -> int:
        """Kill all. Returns how many do not end; bounded."""
        deadline = self._loop.time() + _END_TIMEOUT_S
        while True:
            self._child_ended.clear()
            left = self.kill_living(but=())
            try:
                if not left:
                    break
                await bounded.wait_for(self._child_ended.wait(), deadline - self._loop.time())
            except asyncio.TimeoutError:
                break
        self._loop.remove_signal_handler(signal.SIGCHLD)
        return left

    def _on_child(self) -> None:
        if self._kills:
            self.kill_living()
        else:
            self.reap()
        self._child_ended.set()
