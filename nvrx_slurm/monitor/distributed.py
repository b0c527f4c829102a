"""The rank of this process, and collective calls. Uses the torch that the script has imported; imports none."""

from __future__ import annotations

import os
import socket
import sys
from collections import namedtuple
from typing import Any

from nvrx_slurm.monitor.transport import RankMonitorClientError


def is_initialized() -> bool:
    """Whether the script has a default process group."""
    dist = sys.modules.get("torch.distributed")  # not imported for this: that takes a second
    return dist is not None and dist.is_available() and dist.is_initialized()


def largest(mine: list[int], group: Any = None) -> list[int]:
    """Each value replaced by the largest of all ranks of `group` (None = the default one). A collective call.

    Takes as long as the slowest rank, at most the group's own timeout. Raises RankMonitorClientError if there is no
    group or it has neither gloo nor nccl, and what torch raises when the call fails.
    """
    if group is None and not is_initialized():
        raise RankMonitorClientError(
            "this call is for all ranks: call torch.distributed.init_process_group() first"
        )
    torch: Any = sys.modules["torch"]
    device = device_for(str(torch.distributed.distributed_c10d.get_backend_config(group)))
    tensor = torch.tensor(mine, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)
    return [int(value) for value in tensor.tolist()]


def texts_of_all(mine: str, group: Any = None) -> list[str]:
    """What each rank of `group` says, in the order of ranks. A collective call, as `largest`.

    Of bytes: torch's own gathering of objects unpickles them.
    """
    text = mine.encode()
    (longest,) = largest([len(text)], group)
    torch: Any = sys.modules["torch"]
    device = device_for(str(torch.distributed.distributed_c10d.get_backend_config(group)))
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=device)
    found = [torch.empty_like(padded) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(found, padded, group=group)
    return [bytes(one.tolist()).rstrip().decode() for one in found]


def place(group: Any = None) -> tuple[int, int]:
    """This process's rank in `group`, and how many others there are; (0, 0) without a process group."""
    if not is_initialized():
        return 0, 0
    dist: Any = sys.modules["torch.distributed"]
    return dist.get_rank(group), dist.get_world_size(group) - 1


def any_of(mine: bool, group: Any = None) -> bool:
    """Whether it is so on any rank of `group`, as `largest`; in a job of one rank without a group, on this one."""
    if group is not None or is_initialized() or env_int("WORLD_SIZE", 1) > 1:
        return largest([int(mine)], group) == [1]
    return mine


def device_for(backends: str) -> str:
    """ "cpu" where gloo serves it (no wait for the GPU), "cuda" where only nccl is there.

    `backends`: torch's own description, "gloo", "nccl" or "cpu:gloo,cuda:nccl". Raises RankMonitorClientError.
    """
    pairs = [part.rpartition(":") for part in backends.lower().split(",")]
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        if any(found == backend and where in ("", device) for where, _, found in pairs):
            return device
    raise RankMonitorClientError(
        f"ranks agree over gloo or nccl, but the process group has {backends}"
    )


class RankInfo(namedtuple("RankInfo", "global_rank local_rank host pid")):
    """This process: its rank in the job, its rank on the node (ints), the node's name (str), its process id (int)."""

    __slots__ = ()

    @classmethod
    def get_for_current_rank(cls) -> RankInfo:
        """The place of this rank: from torch.distributed if the script has initialised it, else from the launcher's
        environment.

        Raises RankMonitorClientError if neither knows the rank.
        """
        return cls(_global_rank(), env_int("LOCAL_RANK", 0), socket.gethostname(), os.getpid())


def _global_rank() -> int:
    if is_initialized():
        return int(sys.modules["torch.distributed"].get_rank())
    rank = env_int("RANK", -1)
    if rank < 0:
        raise RankMonitorClientError(
            "the rank of this process is not known: RANK is not set and torch.distributed is not initialised; "
            "start the script with nvrx-run"
        )
    return rank


def env_int(name: str, default: int) -> int:
    """An int in the environment. Raises RankMonitorClientError for other values."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise RankMonitorClientError(
            f"{name} in the environment must be an integer, not {text!r}"
        ) from None


def megatron_iteration() -> int | None:
    """The iteration of Megatron's training loop, None if there is none."""
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    for name in ("curr_iteration", "iteration"):
        iteration = getattr(arguments, name, None)
        if type(iteration) is int:
            return iteration
    return None
