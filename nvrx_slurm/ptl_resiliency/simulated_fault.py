"""Faults to inject into a training, for tests of its recovery."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass

_SIGNALS = {"rank_killed": signal.SIGKILL, "rank_hung": signal.SIGSTOP}


@dataclass(frozen=True)
class SimulatedFaultParams:
    """`fault_type`: "rank_killed" (SIGKILL), "rank_hung" (SIGSTOP) or "random" (one of them).

    Strikes `base_delay` seconds after the start of the fit, or up to `rand_delay` seconds later. `rank_to_fail`: None =
    one rank at random. Raises ValueError for another type.
    """

    fault_type: str
    base_delay: float
    rand_delay: float = 0.0
    rank_to_fail: int | None = None

    def __post_init__(self) -> None:
        if self.fault_type not in ("random", *_SIGNALS):
            raise ValueError(
                f"fault_type must be random, rank_killed or rank_hung, not {self.fault_type!r}"
            )


def arm(params: SimulatedFaultParams, rank: int, world_size: int) -> None:
    """Start a timer for the fault, if it is this rank's."""
    # The same choices on all ranks without communication, and other choices in the next cycle.
    seed = f"{os.environ.get('TORCHELASTIC_RUN_ID')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}"
    choice = random.Random(seed)
    chosen, fault_type = choice.randrange(world_size), choice.choice(sorted(_SIGNALS))
    delay_s = params.base_delay + choice.random() * params.rand_delay
    if rank != (chosen if params.rank_to_fail is None else params.rank_to_fail):
        return
    signum = _SIGNALS[fault_type if params.fault_type == "random" else params.fault_type]
    timer = threading.Timer(delay_s, os.kill, (os.getpid(), signum))
    timer.daemon = True
    timer.start()
