"""What is called when a rank leaves for good."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.state import FrozenState


class Terminate(ABC):
    """Called once on a rank that leaves, just before the wrapper raises what made it leave."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Note or do what belongs to this rank's end; returns `state`."""
