"""What the workers of a node are, and how they are watched."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvrx_slurm.child import processes
from nvrx_slurm.node.workers.worker_env import WorkerContract
from nvrx_slurm.types import RankFault


@dataclass(frozen=True)
class WarmSpec:
    """What standbys of this job are like."""

    script: str | None  # the file that workers run, None = not known
    path0: str | None  # what Python puts in front of sys.path; None = nothing
    preload: Sequence[str] = ()  # modules that the user named; () = those that workers load


@dataclass(frozen=True)
class WorkerSpec:
    """What to start and how to watch it."""

    argv: Sequence[str]
    contract: WorkerContract
    limits: Mapping[str, Any]  # seconds, by the names of `core.rank.watch.Limits`
    termination_signal: int
    shown: Callable[[int], int]  # local rank -> bits of streams copied to the console: 1 stdout, 2 stderr
    line_prefix: str = "[rank {rank}] "  # of the lines on the console
    monitored: bool = True
    settings: Mapping[str, Any] | None = None  # for the rank's `client.cfg`
    prefixes: Sequence[Sequence[str]] = ()  # by local rank: what goes before `argv` (numactl)
    warning_signal: int = 0  # that workers without a handler for it shall not die of; 0 = none
    in_step: bool = False  # Slurm signals the workers itself
    hang_collect_s: float = 0.0  # how long a look at all ranks may take when one hangs
    warm: WarmSpec | None = None  # None: workers are always executed
    wrapped: bool = False  # min-healthy: a dead worker's helpers speak for it to the other ranks until the cycle ends


@dataclass
class StartedWorker:
    """One worker that was started. `hang`: what its monitor said."""

    child: processes.Child
    where: RankFault  # template of its fault
    hang: RankFault | None = None

    def signal(self, signum: int, wake: bool) -> None:
        """To its process group; `wake`: SIGCONT too, because a stopped one acts on nothing."""
        if self.hang is not None and signum == signal.SIGTERM:
            return  # its monitor ends it, after it has printed its stacks
        self.child.signal_group(signum)
        if wake:
            self.child.signal_group(signal.SIGCONT)
