"""RankInfo: the ranks, host and process id of this process."""

from __future__ import annotations

import os
import socket
import sys
from collections import namedtuple

from nvrx_slurm.monitor.transport import RankMonitorClientError


class RankInfo(namedtuple("RankInfo", "global_rank local_rank host pid")):
    """This process: its rank in the job, its rank on the node (ints), the node's name (str), its process id (int)."""

    __slots__ = ()

    @classmethod
    def get_for_current_rank(cls) -> RankInfo:
        """From torch.distributed if the script has initialised it, else from the launcher's environment.

        Raises RankMonitorClientError if neither knows the rank.
        """
        return cls(_global_rank(), env_int("LOCAL_RANK", 0), socket.gethostname(), os.getpid())


def _global_rank() -> int:
    dist = sys.modules.get("torch.distributed")  # not imported for this: that takes a second
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
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
        raise RankMonitorClientError(f"{name} in the environment must be an integer, not {text!r}") from None


def megatron_iteration() -> int | None:
    """The iteration of Megatron's training loop, None if there is none."""
    arguments = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    for name in ("curr_iteration", "iteration"):
        iteration = getattr(arguments, name, None)
        if type(iteration) is int:
            return iteration
    return None
