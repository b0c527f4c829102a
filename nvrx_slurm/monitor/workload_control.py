"""Requests of a rank to the job (rank -> rank monitor -> agent -> coordinator)."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.types import WorkloadAction


@dataclass(frozen=True)
class WorkloadControlRequest:
    """`action` for the job, and a `description` for people: the reason in the log, and of the job's end.

    Raises TypeError if `action` is no WorkloadAction or `description` no string. Names: nvidia_resiliency_ext.
    """

    action: WorkloadAction
    description: str = "<not set>"

    def __post_init__(self) -> None:
        if not isinstance(self.action, WorkloadAction):
            names = ", ".join(f"WorkloadAction.{action.name}" for action in WorkloadAction)
            raise TypeError(f"action must be one of {names}, not {self.action!r}")
        if not isinstance(self.description, str):
            raise TypeError(f"description must be a string, not {type(self.description).__name__}")
