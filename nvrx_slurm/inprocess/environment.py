"""What `init_process_group` reads and changes in this process: set for each iteration, and restored afterwards."""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass

from nvrx_slurm.inprocess.arguments import Arguments
from nvrx_slurm.inprocess.guard.call_page import CallPage
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.inprocess.store.stores import is_loopback
from nvrx_slurm.system.ports import PortReservation

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class Environment:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this process, from the start to the end of one call."""

    def __init__(self) -> None:
        self.original = {name: os.environ.get(name) for name in _NAMES}
        self._excepthook = sys.excepthook
        self._reserved: PortReservation | None = None

    def restore(self) -> None:
        """Restore everything."""
        self.release()
        self.restore_variables()
        self._restore_excepthook()

    def _restore_excepthook(self) -> None:
        """`init_process_group` wraps it each time: tracebacks would begin with one "[rank0]: " per iteration."""
        if getattr(sys.excepthook, "__module__", "").startswith("torch.distributed."):
            sys.excepthook = self._excepthook

    def restore_variables(self) -> None:
        """Restore the variables only."""
        for name, value in self.original.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def release(self) -> None:
        """Release the port that was reserved for the last iteration."""
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None

    def reserve(self, initial_rank: int) -> tuple[str, int]:
        """Address of this host and a fresh port, where the process group shall meet.

        The port stays reserved until `release`; torch's server can listen on it all the same.
        """
        self.release()
        self._reserved = PortReservation()
        return self._address(initial_rank), self._reserved.port

    def _address(self, initial_rank: int) -> str:
        """How other hosts reach this one: its address on the route to the first master, which all ranks could reach."""
        master = self.original["MASTER_ADDR"]
        if initial_rank == 0 or not master:
            return master or socket.gethostname()
        try:
            family, *_, address = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing, to any port
                mine = str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()
        return master if is_loopback(mine) and not is_loopback(master) else mine

    def meet_at(self, state: State, address: str, port: int) -> None:
        """Set the variables for the iteration that begins."""
        self._restore_excepthook()
        state.set_distributed_vars()
        os.environ["MASTER_ADDR"] = address
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # rank 0 shall serve there


@dataclass(frozen=True)
class CallFacts:
    """What all that serve one rank in one call of a wrapped function know: which rank and which call it is, ..."""

    arguments: Arguments
    page: CallPage
    rank: int  # initial
    world_size: int  # initial
    prefix: str  # prefix of the call's keys, without the slash
    # as it was when the function was called; the store's constructor reads it
    environment: Environment

    @property
    def leads(self) -> bool:
        """Whether the monitor process of this rank serves the barriers, and the store if it can."""
        return self.rank == 0
