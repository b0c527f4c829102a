"""Which rank a process is or watches."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.inprocess.environment import Environment


@dataclass(frozen=True)
class Identity:
    """Which rank, in which call of a wrapped function."""

    rank: int  # initial
    world_size: int  # initial
    prefix: str  # of the call's keys, without the slash
    environment: Environment  # as it was when the function was called; the store's constructor reads it
    gone: frozenset[int] = frozenset()  # initial ranks that have left in an earlier call of this process

    @property
    def leads(self) -> bool:
        """Whether this is the lowest rank left: its monitor process serves the barriers, and the store if it can."""
        return not any(rank not in self.gone for rank in range(self.rank))
