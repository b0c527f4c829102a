"""Signals to this process become events: of the agent while it runs, then of the coordinator on the same node."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.errors import signal_exit_code
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.system.signals import SignalReader, sent_by_slurm

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def block_signals() -> SignalReader:
    """Before threads and child processes exist. Signals that are ignored at the start (nohup, a shell's background job)
    stay ignored."""
    return SignalReader(s for s in (*ENDING, *_PASSED_ON) if signal.getsignal(s) is not signal.SIG_IGN)


class Signals:
    """Role. `coordinator()` takes the signals once the agent has ended; None: there is none on this node."""

    def __init__(
        self, reader: SignalReader, job: NodeJob, agent: Shell, coordinator: Callable[[], Shell | None]
    ) -> None:
        self._reader, self._node_id = reader, job.node.node_id
        self._in_step, self._warning_signum = job.agent.in_step, job.agent.warning_signum
        self._agent, self._coordinator = agent, coordinator

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """There are no commands."""
        return {}

    async def start(self) -> None:
        """Begin to read."""
        asyncio.get_running_loop().add_reader(self._reader.fd, self._read)

    async def close(self) -> None:
        """Stop reading; the signals stay blocked."""
        asyncio.get_running_loop().remove_reader(self._reader.fd)

    def _read(self) -> None:
        for received in self._reader.read():
            everybody = self._in_step and sent_by_slurm(received)
            ends = received.signum in ENDING
            if not self._agent.result.done():
                self._agent.post((ag.Signalled if ends else ag.Warned)(received.signum, everybody))
            elif (coordinator := self._coordinator()) is not None:
                self._tell_coordinator(coordinator, received.signum, ends)

    def _tell_coordinator(self, coordinator: Shell, signum: int, ends: bool) -> None:
        why = f"the coordinator's node got signal {signum}"
        if ends:
            end = t.EndJob(signal_exit_code(signum), why, signum)
            coordinator.post(ev.FromAgent(self._node_id, end))
        elif signum == self._warning_signum:
            coordinator.post(ev.FromAgent(self._node_id, t.WarnJob(signum, why)))
