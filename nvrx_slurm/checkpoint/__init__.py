"""Checkpoints in memory that outlives the worker: what a training script calls.

    from nvrx_slurm import checkpoint

    found = checkpoint.load(state)  # (state, iteration), or None: begin, or read the disk
    ...
    checkpoint.save(state, iteration)

A process of the node keeps the memory (`checkpoint.keeper`). torch is imported with the first call.
"""

from __future__ import annotations

from typing import Any

__all__ = ["available", "load", "save"]


def save(state: Any, iteration: int) -> bool:
    """Copy `state` into memory that this process's death does not touch. Blocks for one copy.

    `state`: tensors, DTensors, numbers, texts, bytes and None in dicts, lists and tuples. `iteration` >= 0.
    False: it is not kept, and a warning says why. Raises CheckpointError for what cannot be saved at all.
    """
    from nvrx_slurm.checkpoint import rank

    return rank.save(state, iteration)


def load(state: Any = None) -> tuple[Any, int] | None:
    """The newest state that all ranks have saved, and its iteration; None: there is none, and a warning says why.

    `state`: tensors in it are overwritten in place. Collective: each rank of torch.distributed calls it. Raises
    CheckpointError if the job has several ranks and torch.distributed is not initialized.
    """
    from nvrx_slurm.checkpoint import rank

    return rank.load(state)


def available() -> int | None:
    """The iteration that `load` would try first. Collective, as `load` is."""
    from nvrx_slurm.checkpoint import rank

    return rank.available()
