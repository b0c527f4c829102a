"""Collective calls of RankMonitorClient. Uses the torch that the script has imported; imports none."""

from __future__ import annotations

import sys
from typing import Any

from nvrx_slurm.monitor.transport import RankMonitorClientError


def is_initialized() -> bool:
    """Whether the script has a default process group."""
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()


def largest(mine: list[int], group: Any = None) -> list[int]:
    """Each value replaced by the largest of all ranks of `group` (None = the default one). A collective call.

    Takes as long as the slowest rank, at most the group's own timeout. Raises RankMonitorClientError if there is no
    group or it has neither gloo nor nccl, and what torch raises when the call fails.
    """
    if group is None and not is_initialized():
        raise RankMonitorClientError("this call is for all ranks: call torch.distributed.init_process_group() first")
    torch: Any = sys.modules["torch"]
    device = device_for(str(torch.distributed.distributed_c10d.get_backend_config(group)))
    tensor = torch.tensor(mine, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)
    return [int(value) for value in tensor.tolist()]


def device_for(backends: str) -> str:
    """ "cpu" where gloo serves it (no wait for the GPU), "cuda" where only nccl is there.

    `backends`: torch's own description, "gloo", "nccl" or "cpu:gloo,cuda:nccl". Raises RankMonitorClientError.
    """
    pairs = [part.rpartition(":") for part in backends.lower().split(",")]
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        if any(found == backend and where in ("", device) for where, _, found in pairs):
            return device
    raise RankMonitorClientError(f"ranks agree over gloo or nccl, but the process group has {backends}")
