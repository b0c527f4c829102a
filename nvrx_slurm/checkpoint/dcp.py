"""Storage of torch.distributed.checkpoint in memory that outlives the worker.

    dcp.save(state, storage_writer=MemoryWriter(iteration))
    ...
    if checkpoint.available() is not None:
        dcp.load(state, storage_reader=MemoryReader())

Each rank keeps what it has: also parts that others have as well, which DCP would save once. So it loads without others.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from nvrx_slurm.checkpoint import rank
from nvrx_slurm.checkpoint.link import CheckpointError


class _Plain:
    """What neither of both has to do."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left of another iteration."""

    def prepare_global_plan(self, every: list[Any]) -> list[Any]:
        """As it is."""
        return every

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here."""
        return False


def _done(result: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(result)
    return done


class MemoryWriter(_Plain, StorageWriter):
    """Keeps one iteration. `is_kept`: whether there was room; a warning says why not."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._plan = plans.SavePlan([])
        self.is_kept = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All ranks do the same."""

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """All that this rank has. Later, parts that others have as well are left out."""
        self._plan = plan
        return plan

    def write_data(
        self, plan: plans.SavePlan, planner: plans.SavePlanner
    ) -> Future[list[WriteResult]]:
        """Blocks for one copy. Raises CheckpointError for what can never be kept."""
        items = []
        for item in self._plan.items:
            data: Any = planner.resolve_data(item)
            size: list[int] = []
            offset = list(item.index.offset or ())
            if isinstance(data, torch.Tensor):
                assert item.tensor_data is not None
                size = list(item.tensor_data.size)
                offset = offset or [0] * len(size)
            else:
                data = data.getvalue()
            items.append([item.index.fqn, offset, size, data])
        self.is_kept = rank.save(items, self._iteration)
        return _done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """A load makes the metadata from what each rank has."""


class MemoryReader(_Plain, StorageReader):
    """Loads the newest iteration that all ranks have. `iteration`: which one that was."""

    def __init__(self) -> None:
        self.iteration = -1
        self._parts: dict[tuple[str, tuple[int, ...]], Any] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Of what this rank has. Raises CheckpointError where the disk has to be read."""
        found = rank.load()
        if found is None:
            raise CheckpointError("no iteration is in memory for all ranks: read the disk")
        items, self.iteration = found
        metadata: dict[str, Any] = {}
        for name, offset, size, data in items:
            self._parts[name, tuple(offset)] = data
            if not isinstance(data, torch.Tensor):
                metadata[name] = BytesStorageMetadata()
                continue
            known = metadata.setdefault(
                name,
                TensorStorageMetadata(
                    TensorProperties.create_from_tensor(data), torch.Size(size), []
                ),
            )
            known.chunks.append(ChunkStorageMetadata(torch.Size(offset), data.size()))
        return Metadata(metadata)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All ranks do the same."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """As it is."""
        return plan

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Copies into the state."""
        for item in plan.items:
            index = item.storage_index
            data = self._parts[index.fqn, tuple(index.offset or ())]
            if not isinstance(data, torch.Tensor):
                planner.load_bytes(item, io.BytesIO(data))
                continue
            places = zip(item.storage_offsets, item.lengths, strict=True)
            for dim, (begin, length) in enumerate(places):
                data = data.narrow(dim, begin, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(data)
            planner.commit_tensor(item, target)
        self._parts = {}
        return _done(None)
