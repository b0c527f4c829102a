"""The user's processes in the simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.types import FaultKind, Plan, RankEvidence, RankFault

if TYPE_CHECKING:
    from .processes import SimAgent


SIGTERM, SIGKILL = 15, 9


class Worker:
    """One user process."""

    def __init__(self, agent: SimAgent, plan: Plan, local_rank: int) -> None:
        self.agent, self.local_rank = agent, local_rank
        self.rank = plan.rank_offset + local_rank
        self.run = agent.world.training.run_of(plan)
        self.alive = True
        self.stubborn = agent.stubborn  # ignores SIGTERM
        self.stuck = False  # uninterruptible: survives SIGKILL
        self.hung = False
        self.done = False  # it ended with 0
        self.terms = 0  # how often it got SIGTERM
        world = agent.world
        world.invariants.started(self)
        world.clock.after(world.rng.uniform(0.05, 0.3), self._reach_user_code)

    @property
    def name(self) -> str:
        """For the story."""
        return f"rank {self.rank} on {self.agent.host.name}"

    def _reach_user_code(self) -> None:
        if self.alive:
            self.agent.world.training.up(self)

    def signal(self, signum: int) -> None:
        """It gets a signal from its agent."""
        self.terms += signum == SIGTERM
        if self.hung and signum == SIGTERM:  # its monitor ends it, also where it would ignore the signal
            signum = SIGKILL
        if self.stuck or (self.stubborn and signum != SIGKILL):
            return
        slowest_s = 0.02 if signum == SIGKILL else 1.0
        rng = self.agent.world.rng
        self.agent.world.clock.after(rng.uniform(0.001, slowest_s), self.die, -signum, "")

    def succeed(self) -> None:
        """It is done."""
        if self.alive and not self.stuck:
            self.run.succeeded += 1
            self.done = True
            self._end(None)

    def seem_hung(self) -> None:
        """Its monitor reports a hang; the shell knows by the pid when that is of a worker that has been replaced."""
        if self not in self.agent.workers:
            return
        self.agent.step(ag.HangSeen(self.fault(FaultKind.HANG, -SIGKILL, "no heartbeat for 30 s")))

    def die(self, code: int, message: str, kind: FaultKind | None = None) -> None:
        """It ends with `code` (negative: by that signal)."""
        if not self.alive or self.stuck:
            return
        self.agent.world.training.stall(self.run)
        kind = kind or (FaultKind.SIGNAL if code < 0 else FaultKind.EXIT)
        self._end(self.fault(kind, code, message))

    def fault(self, kind: FaultKind, code: int, message: str) -> RankFault:
        """How it is reported."""
        host = self.agent.host
        return RankFault(kind, host.name, host.infra_rank, self.rank, self.local_rank, 4711, code, message)

    def evidence(self) -> RankEvidence:
        """What its monitor sees."""
        host = self.agent.host
        frame = "/w/train.py:9 in load" if self.hung else "/x/torch/distributed/c10d.py:1 in barrier"
        return RankEvidence(self.rank, host.infra_rank, host.name, "S", frames=(frame,))

    def _end(self, fault: RankFault | None) -> None:
        self.alive = False
        world = self.agent.world
        world.clock.after(world.rng.uniform(0.0, 0.005), self.agent.step, ag.WorkerExited(self.local_rank, fault))
