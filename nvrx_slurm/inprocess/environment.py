"""What `init_process_group` reads and changes in this process, right for every iteration and as it was afterwards."""

from __future__ import annotations

import os
import socket
import sys

from nvrx_slurm.inprocess.meeting.store import is_loopback
from nvrx_slurm.inprocess.state import State
from nvrx_slurm.system.ports import PortReservation

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class Environment:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of this process, from the start to the end of one call."""

    def __init__(self) -> None:
        self.original = {name: os.environ.get(name) for name in _NAMES}
        self._excepthook = sys.excepthook
        self._reserved: PortReservation | None = None

    def restore(self) -> None:
        """As it was."""
        self.release()
        self.restore_variables()
        self._restore_excepthook()

    def _restore_excepthook(self) -> None:
        """`init_process_group` wraps it each time, so that it would grow, and say "[rank0]: " once for each."""
        if getattr(sys.excepthook, "__module__", "").startswith("torch.distributed."):
            sys.excepthook = self._excepthook

    def restore_variables(self) -> None:
        """The variables only."""
        for name, value in self.original.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def release(self) -> None:
        """Give the port back that was reserved for the last iteration."""
        if self._reserved is not None:
            self._reserved.release()
            self._reserved = None

    def reserve(self, initial_rank: int) -> tuple[str, int]:
        """Address of this host and a fresh port: where the process group shall meet. The port is ours until
        `release`, but torch's server can listen on it all the same."""
        self.release()
        self._reserved = PortReservation()
        return self._address(initial_rank), self._reserved.port

    def _address(self, initial_rank: int) -> str:
        """How other hosts reach this one: the way we would take to the first master, who was reachable for all."""
        master, port = self.original["MASTER_ADDR"], self.original["MASTER_PORT"] or ""
        if master and initial_rank == 0:
            return master
        if master and port.isdecimal() and len(port) < 6:
            try:
                family, *_, address = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, socket.SOCK_DGRAM) as probe:
                    probe.connect(address)  # sends nothing
                    mine = str(probe.getsockname()[0])
                    return master if is_loopback(mine) and not is_loopback(master) else mine
            except OSError:
                return socket.gethostname()
        return socket.gethostname()

    def meet_at(self, state: State, address: str, port: int) -> None:
        """For the iteration that begins."""
        self._restore_excepthook()
        state.set_distributed_vars()
        os.environ["MASTER_ADDR"] = address
        os.environ["MASTER_PORT"] = str(port)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # nobody serves there yet: rank 0 shall
