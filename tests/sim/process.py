"""One program of the simulation: a core, its timer and its event log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nvrx_slurm.core import record
from nvrx_slurm.core.machine import Machine, Tick

from .network import Host

if TYPE_CHECKING:
    from .world import World


class Process:
    """A core with its timer and, if wanted, its event log."""

    def __init__(self, world: World, core: Machine, host: Host) -> None:
        self.world, self.core, self.host = world, core, host
        self.alive = True
        self.log: list[str] = [record.header_line(core)] if world.settings.record else []
        self._armed: float | None = None
        self._arm()

    def step(self, event: Any) -> None:
        """Hand one event to the core and carry out its commands."""
        if not self.alive:
            return
        now = self.world.clock.now
        if self.host.frozen_until > now:
            self.world.clock.at(self.host.frozen_until, self.step, event)
            return
        commands = self.core.step(event, now)
        self.core.validate()
        if self.log:
            self.log.append(record.step_line(event, now, now, self.core, commands))
        self.world.stepped(self, event, commands)
        for command in commands:
            self.do(command)
        self._arm()

    def do(self, command: Any) -> None:
        """Carry out one command."""
        raise NotImplementedError

    def _arm(self) -> None:
        deadline = self.core.deadline() if self.alive else None
        if deadline != self._armed:
            self._armed = deadline
            if deadline is not None:
                self.world.clock.at(deadline, self._tick, deadline)

    def _tick(self, armed: float) -> None:
        if self.alive and self._armed == armed:
            self._armed = None
            self.step(Tick())
