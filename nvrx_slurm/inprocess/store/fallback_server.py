"""A server at the address where the process group of an interrupted iteration was to meet, instead of rank 0's.

`init_process_group` on the other ranks connects to rank 0's store. torch repeats that until its own timeout (10 to 30
minutes), and only a server that accepts the connection ends it. If rank 0 fails, dies, hangs or is stopped before it
has made its store, its monitor process serves there instead. A rank whose connection succeeds returns to Python, where
it is stopped. Without this all other ranks would be killed after the hard timeout.
"""

from __future__ import annotations

import logging
import math
import time

import torch.distributed as dist

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.store.barriers import Iteration
from nvrx_slurm.inprocess.store.stores import serve

logger = logging.getLogger(__name__)

_GRACE_S = 0.4  # a restart that is over by then needs no server, and torch pauses for longer


class FallbackServer:
    """For an iteration whose rank 0 is this one: serves from `wait_s` seconds after its end, unless another process
    does. Rank 0 itself may do so until its abort. The server lasts as long as this object.
    """

    def __init__(self, this: Iteration, address: str, port: int, wait_s: float) -> None:
        self.number = this.number
        self._this, self._address, self._port = this, address, port
        self._wait_s = wait_s + _GRACE_S
        self._from_s = 0.0  # 0.0: the iteration goes on
        self._server: dist.Store | None = None

    def check(self) -> None:
        """To be called about once per second."""
        if not self._from_s and self._this.is_interrupted():
            self._from_s = time.monotonic() + self._wait_s
        if self._server is not None or not self._from_s or time.monotonic() < self._from_s:
            return
        try:
            self._server = serve(self._address, self._port)
        except (RuntimeError, OSError, UsageError) as error:
            logger.warning("iteration %d: no server at port %d: %s", self.number, self._port, error)
            self._from_s = math.inf
        if self._server is not None:
            logger.info("iteration %d: a fallback server listens at port %d", self.number, self._port)
