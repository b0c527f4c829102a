"""Signals to this process become events: of the agent while it runs, then of the coordinator on the same node."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, ClassVar

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.errors import signal_exit_code
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.system.signals import SignalReader, sent_by_slurm

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """Role. Signals that are ignored at the start (nohup, a shell's background job) stay ignored.

    Make it before threads and child processes exist. `agent` is set before `start`.
    """

    commands: ClassVar[tuple[type, ...]] = ()
    agent: Shell

    def __init__(self, node_id: str, in_step: bool, warning_signum: int) -> None:
        """`in_step`: Slurm may signal all processes of the step. `warning_signum`: 0 = none warns."""
        wanted = [s for s in (*ENDING, *_PASSED_ON) if signal.getsignal(s) is not signal.SIG_IGN]
        self._reader = SignalReader(wanted)
        self._node_id = node_id
        self._in_step = in_step
        self._warning_signum = warning_signum
        self.coordinator: Shell | None = None  # takes the signals once the agent has ended

    async def start(self) -> None:
        """Begin to read."""
        asyncio.get_running_loop().add_reader(self._reader.fd, self._read)

    def handle(self, command: Any) -> None:
        """There are no commands."""

    async def close(self) -> None:
        """Stop reading; the signals stay blocked."""
        asyncio.get_running_loop().remove_reader(self._reader.fd)

    def _read(self) -> None:
        for received in self._reader.read():
            everybody = self._in_step and sent_by_slurm(received)
            ends = received.signum in ENDING
            if not self.agent.result.done():
                self.agent.post((ag.Signalled if ends else ag.Warned)(received.signum, everybody))
            elif self.coordinator is not None:
                self._tell_coordinator(self.coordinator, received.signum, ends)

    def _tell_coordinator(self, coordinator: Shell, signum: int, ends: bool) -> None:
        why = f"the coordinator's node got signal {signum}"
        if ends:
            end = t.EndJob(signal_exit_code(signum), why, signum)
            coordinator.post(ev.FromAgent(self._node_id, end))
        elif signum == self._warning_signum:
            coordinator.post(ev.FromAgent(self._node_id, t.WarnJob(signum, why)))
