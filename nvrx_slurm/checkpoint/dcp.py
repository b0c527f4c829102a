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
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from nvrx_slurm.checkpoint import rank
from nvrx_slurm.checkpoint.link import CheckpointError

_BYTES = (plans.WriteItemType.BYTE_IO, plans.LoadItemType.BYTE_IO)


class MemoryWriter(StorageWriter):
    """Keeps one iteration. `is_kept`: whether there was room; a warning says why not."""

    def __init__(self, iteration: int) -> None:
        self._iteration = iteration
        self._plan = plans.SavePlan([])
        self.is_kept = False

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left of an earlier save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """All ranks do the same."""

    def prepare_local_plan(self, plan: plans.SavePlan) -> plans.SavePlan:
        """All that this rank has. Later others' parts are left out of the plan."""
        self._plan = plan
        return plan

    def prepare_global_plan(self, every: list[plans.SavePlan]) -> list[plans.SavePlan]:
        """Of no use here."""
        return every

    def write_data(
        self, plan: plans.SavePlan, planner: plans.SavePlanner
    ) -> Future[list[WriteResult]]:
        """Blocks for one copy. Raises CheckpointError for what can never be kept."""
        items = []
        for item in self._plan.items:
            data = planner.resolve_data(item)
            size: list[int] = []
            if isinstance(data, torch.Tensor):
                assert item.tensor_data is not None
                size = list(item.tensor_data.size)
            else:
                data = data.getvalue()
            items.append([item.index.fqn, list(item.index.offset or ()), size, data])
        self.is_kept = rank.save(items, self._iteration)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """A load makes the metadata from what each rank has."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here."""
        return False


class MemoryReader(StorageReader):
    """Loads the newest iteration that all ranks have. `iteration`: which one that was."""

    def __init__(self) -> None:
        self.iteration = -1
        self._parts: dict[tuple[str, tuple[int, ...]], Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is left of an earlier load."""

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
            place = offset or [0] * data.dim()
            known.chunks.append(ChunkStorageMetadata(torch.Size(place), data.size()))
        return Metadata(metadata)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """All ranks do the same."""

    def prepare_local_plan(self, plan: plans.LoadPlan) -> plans.LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, every: list[plans.LoadPlan]) -> list[plans.LoadPlan]:
        """As it is."""
        return every

    def read_data(self, plan: plans.LoadPlan, planner: plans.LoadPlanner) -> Future[None]:
        """Copies into the state."""
        for item in plan.items:
            data = self._part(item.storage_index)
            if item.type in _BYTES:
                planner.load_bytes(item, io.BytesIO(data))
                continue
            for dim, (begin, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                data = data.narrow(dim, begin, length)
            target = planner.resolve_tensor(item)
            target.detach().copy_(data)
            planner.commit_tensor(item, target)
        self._parts = {}
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _part(self, index: MetadataIndex) -> Any:
        offset = tuple(index.offset or ())
        return self._parts.get((index.fqn, offset), self._parts.get((index.fqn, ())))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No path leads here."""
        return False
