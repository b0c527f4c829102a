"""Completion: called after the wrapped function has returned on all active ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nvrx_slurm.inprocess.state import FrozenState


class Completion(ABC):
    """Base of all completions. Called once on each rank, before the wrapper returns."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do the work of a successful end; returns `state`."""
