"""Signals to this process become events: of the agent while it runs, then of the coordinator on the same node."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from nvrx_slurm import types as t
from nvrx_slurm.child import descendants
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.errors import signal_exit_code
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.shell import Shell
from nvrx_slurm.system.signals import BY_KERNEL, Received, SignalReader

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


def block_signals() -> SignalReader:
    """Block the signals before threads and child processes exist. Signals that are ignored at the start (nohup, a
    shell's background job) stay ignored."""
    return SignalReader(s for s in (*ENDING, *_PASSED_ON) if signal.getsignal(s) is not signal.SIG_IGN)


class Signals:
    """Reads them from now on. `coordinator()` takes them once the agent has ended; None: there is none on this node.

    `interrupt(signum)` ends this program: there is no agent yet, or the second SIGINT finds that it has ended.
    """

    def __init__(
        self,
        reader: SignalReader,
        job: NodeJob,
        coordinator: Callable[[], Shell | None],
        interrupt: Callable[[int], None],
    ) -> None:
        self._reader = reader
        self._node_id = job.node.node_id
        self._in_step = job.agent.in_step
        self._warning_signum = job.agent.warning_signum
        self._coordinator = coordinator
        self._interrupt = interrupt
        self._agent: Shell | None = None
        self._warnings = list[Received]()  # warnings that came before the agent's program ran
        self._has_interrupt = False
        asyncio.get_running_loop().add_reader(reader.fd, self._read)

    def begin(self, agent: Shell) -> None:
        """Hand signals to this agent from now on."""
        self._agent = agent
        for received in self._warnings:
            self._take(received, agent)

    def _read(self) -> None:
        for received in self._reader.read():
            agent = self._agent
            again = self._has_interrupt
            self._has_interrupt = again or received.signum == signal.SIGINT
            if agent is None and received.signum in _PASSED_ON:
                self._warnings.append(received)
            elif agent is None or (again and received.signum == signal.SIGINT and agent.result.done()):
                self._interrupt(received.signum)
            else:
                self._take(received, agent)

    def _take(self, received: Received, agent: Shell) -> None:
        everybody = self._in_step and _sent_by_slurm(received)
        ends = received.signum in ENDING
        if not agent.result.done():
            agent.post((ag.Signalled if ends else ag.Warned)(received.signum, everybody))
        elif (coordinator := self._coordinator()) is not None:
            self._tell_coordinator(coordinator, received.signum, ends)

    def _tell_coordinator(self, coordinator: Shell, signum: int, ends: bool) -> None:
        why = f"the coordinator's node got signal {signum}"
        if ends:
            end = t.EndJob(signal_exit_code(signum), why, signum)
            coordinator.post(ev.FromAgent(self._node_id, end))
        elif signum == self._warning_signum:
            coordinator.post(ev.FromAgent(self._node_id, t.WarnJob(signum, why)))


def _sent_by_slurm(received: Received) -> bool:
    """Whether slurmstepd sent it, which signals every process of the step and not only this one.

    In a container slurmstepd is outside the PID namespace; the kernel reports 0 for it. So it does for Ctrl-C in
    `srun --pty`, which only this process gets: each rank has a session of its own.
    """
    outside = received.pid == 0 and received.code != BY_KERNEL
    return outside or descendants.name(received.pid) == b"slurmstepd"
