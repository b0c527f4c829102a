"""The keeper of checkpoints in memory, where --ft-checkpoint-memory starts it; else the first save does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nvrx_slurm.checkpoint import link
from nvrx_slurm.node.workers.worker_spec import WorkerContract
from nvrx_slurm.system import bounded
from nvrx_slurm.system.memory import free_bytes
from nvrx_slurm.types import Node

_START_S = 40.0
_CLOSE_S = 5.0
_GIB = 1 << 30


class KeeperStart:
    """Role: starts the keeper. It is an orphan of this agent, and outlives it for a while if that is killed.

    The role of the workers ends it, with all other orphans; so this one is closed before that.
    """

    def __init__(self, contract: WorkerContract, node: Node, say: Callable[[str], None]) -> None:
        self._size, self._say = contract.checkpoint_memory, say
        place = {"NVRX_RUN_DIR": contract.run_dir, "NVRX_INFRA_RANK": str(node.infra_rank)}
        self._env = {**os.environ, **place, link.LIMIT: str(self._size)}
        self._starting: asyncio.Task[None] | None = None

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """It has no commands."""
        return {}

    async def start(self) -> None:
        """Begin; ranks need not wait, because their first save would start it, too."""
        self._starting = asyncio.ensure_future(self._start())

    async def close(self) -> None:
        """Until it is known whether there is a keeper."""
        if self._starting is not None:
            await asyncio.wait({self._starting}, timeout=_CLOSE_S)

    async def _start(self) -> None:
        start = partial(link.start, link.address(self._env, os.getpid()), self._env, os.getpid())
        try:
            free, of = await bounded.call_async(free_bytes, _START_S, "memory")
            if self._size > free:
                asked, left = f"{self._size / _GIB:.3g}G", f"{free / _GIB:.3g}G"
                self._say(f"--ft-checkpoint-memory is {asked}, and {of} leaves {left}: saves may be refused")
            await bounded.call_async(start, _START_S, "keeper")
        except (link.CheckpointError, bounded.Overrun) as error:
            self._say(str(error))
