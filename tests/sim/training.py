"""The user's training job, as far as restarts can tell: work that is done only while all ranks run together.

`Worker` is one of its processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.types import FaultKind, RankEvidence, RankFault

SIGTERM, SIGKILL = 15, 9
_FIRST_BEAT_S = 60.0  # of a monitor, for the first heartbeat


@dataclass
class Run:
    """The workers of one cycle."""

    world_size: int
    workers: list[Worker] = field(default_factory=list)
    since: float | None = None  # all ranks run together since then
    broken: bool = False  # a rank died or hangs: no more progress in this cycle, or until the others go on without it
    finished: bool = False
    tries: int = 0  # of the in-process wrapper
    succeeded: int = 0


class Training:
    """`work_s` seconds of work, saved every `checkpoint_s`; a cycle goes on from the last checkpoint."""

    def __init__(self, clock, rng, work_s, checkpoint_s, wrapped=False):
        self._clock, self._rng = clock, rng
        self._wrapped = wrapped  # by an in-process wrapper: ranks that are left go on by themselves
        self._work_s, self._checkpoint_s = work_s, checkpoint_s
        self.saved_s = 0.0
        self.false_alarm = False  # a monitor is about to take a finishing rank for hung
        self.runs = {}  # by (term, cycle) of the plan that started them

    @property
    def succeeded(self):
        """Whether all ranks of one cycle have ended with 0."""
        return any(run.succeeded == run.world_size for run in self.runs.values())

    def run_of(self, plan):
        """The run that workers of `plan` belong to."""
        return self.runs.setdefault((plan.term, plan.cycle), Run(plan.world_size))

    def up(self, worker):
        """A rank has reached user code; the last one starts the training."""
        run = worker.run
        if not run.workers:
            self._clock.after(_FIRST_BEAT_S, self._hangs_at_the_start, run)
        run.workers.append(worker)
        if run.finished:
            self._clock.after(0.1, worker.succeed)
        if len(run.workers) == run.world_size and not run.broken:
            self._go(run)

    def _hangs_at_the_start(self, run):
        """A rank that never came up is waited for until a monitor's timeout."""
        waiting = [worker for worker in run.workers if worker.alive]
        if waiting and run.since is None and not run.finished:
            waiting[0].seem_hung()
            waiting[0].die(-9, "no heartbeat for 60 s", FaultKind.HANG)

    def _go(self, run):
        run.since = self._clock.now
        run.broken = False
        self._clock.after(self._work_s - self.saved_s, self._finish, run, run.tries)

    def _go_on(self, run, tries):
        if run.tries == tries and any(worker.alive for worker in run.workers):
            self._go(run)

    prints = True  # the iteration, which its output tells

    def examined(self, fault):
        """With what an agent finds in the output of its rank. Here the coordinator has to do without."""
        return fault

    def stall(self, run):
        """A rank does not take part any more: what was not saved is lost."""
        run.broken = True
        if run.since is not None:
            reached = self.saved_s + self._clock.now - run.since
            self.saved_s = max(self.saved_s, reached - reached % self._checkpoint_s)
            run.since = None
        run.tries += 1
        if self._wrapped:
            self._clock.after(self._rng.uniform(0.2, 2.0), self._go_on, run, run.tries)

    def die_with(self, worker):
        """Some peers of a dead rank die of it before anybody stops them: connection errors. A wrapper catches them."""
        if self._wrapped:
            return
        for peer in self._rng.sample(worker.run.workers, min(2, len(worker.run.workers))):
            self._clock.after(self._rng.uniform(0.0, 1.0), peer.die, 1, "connection reset by peer")

    def _finish(self, run, tries):
        if run.broken or run.tries != tries:
            return
        self.saved_s = self._work_s
        run.finished = True
        run.since = None
        if self.false_alarm:
            self.false_alarm = False
            run.workers[0].seem_hung()
        for worker in run.workers:
            self._clock.after(self._rng.uniform(0.0, 0.5), worker.succeed)


class Worker:
    """One user process."""

    def __init__(self, agent, plan, local_rank):
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
    def name(self):
        return f"rank {self.rank} on {self.agent.host.name}"

    def _reach_user_code(self):
        if self.alive:
            self.agent.world.training.up(self)

    def signal(self, signum):
        self.terms += signum == SIGTERM
        if self.hung and signum == SIGTERM:  # its monitor ends it, also where it would ignore the signal
            signum = SIGKILL
        if self.stuck or (self.stubborn and signum != SIGKILL):
            return
        slowest_s = 0.02 if signum == SIGKILL else 1.0
        rng = self.agent.world.rng
        self.agent.world.clock.after(rng.uniform(0.001, slowest_s), self.die, -signum, "")

    def succeed(self):
        if self.alive and not self.stuck:
            self.run.succeeded += 1
            self.done = True
            self._end(None)

    def seem_hung(self):
        """Its monitor reports a hang; the shell knows by the pid when that is of a worker that has been replaced."""
        if self not in self.agent.workers:
            return
        self.agent.step(ag.HangSeen(self.fault(FaultKind.HANG, -SIGKILL, "no heartbeat for 30 s")))

    def die(self, code, message, kind=None):
        """It ends with `code` (negative: by that signal)."""
        if not self.alive or self.stuck:
            return
        self.agent.world.training.stall(self.run)
        kind = kind or (FaultKind.SIGNAL if code < 0 else FaultKind.EXIT)
        self._end(self.agent.world.training.examined(self.fault(kind, code, message)))

    def fault(self, kind, code, message):
        host = self.agent.host
        return RankFault(kind, host.name, host.infra_rank, self.rank, self.local_rank, 4711, code, message)

    def evidence(self):
        """What its monitor sees."""
        host = self.agent.host
        frame = "/w/train.py:9 in load" if self.hung else "/x/torch/distributed/c10d.py:1 in barrier"
        return RankEvidence(self.rank, host.infra_rank, host.name, "S", frames=(frame,))

    def _end(self, fault):
        self.alive = False
        world = self.agent.world
        world.clock.after(world.rng.uniform(0.0, 0.005), self.agent.step, ag.WorkerExited(self.local_rank, fault))
