"""What is called when the wrapped function has returned on all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.state import FrozenState


class Completion(ABC):
    """Called once on every rank, after all active ranks returned and before the wrapper does."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Note or do what belongs to a successful end; returns `state`."""
