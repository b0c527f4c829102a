"""Terminate: called when a rank leaves for good."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.state import FrozenState


class Terminate(ABC):
    """Base of all terminations. Called once on a rank that leaves, just before the wrapper raises its exception."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do the work of this rank's end; returns `state`."""
