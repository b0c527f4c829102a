"""One allocation of a replayed job: the real cores on the clock and network of tests/sim, as slow as large jobs are.

Idle time costs nothing: no beat is simulated, only what follows when beats stay away. One simulated rank stands for
all ranks of `thin` nodes: its latencies are the slowest of theirs, and the coordinator needs the time of all their
messages, one after the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from nvrx_slurm.core.account.follower import JobAccount
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.declared import replace
from nvrx_slurm.types import FaultKind, JobReport, SectionTime, Spent, WorkloadAction
from tests.sim.invariants import Invariants
from tests.sim.network import COORDINATOR_KEEPALIVE_S
from tests.sim.processes import SimAgent, SimCoordinator
from tests.sim.training import SIGKILL, Run, Training, Worker
from tests.sim.world import World

KEEPALIVE_S = COORDINATOR_KEEPALIVE_S
_RETRY_S = 5.0  # a fault of a rank waits until one runs


@dataclass(frozen=True)
class Latencies:
    """Seconds; of two, a node draws between them. docs/explanation/replay-llama3.md has the sources."""

    message_s: float = 0.00015  # the coordinator, for each message that comes or goes
    start_s: tuple[float, float] = (0.02, 0.2)  # plan to user code, with standbys
    stop_s: tuple[float, float] = (0.02, 0.9)  # SIGTERM, or SIGKILL after --ft-stop-idle-timeout, to the end of a rank
    preflight_s: tuple[float, float] = (0.03, 0.3)  # health checks between two cycles
    error_s: float = 10.0  # from a device's error to the end of the first rank that dies of it
    hang_s: float = 120.0  # the timeout of a rank
    unseen_s: float = 600.0  # from a silent corruption to the user's own check that notices it
    init_s: float = 30.0  # NCCL
    load_s: float = 60.0  # checkpoint and first steps at less than full speed
    save_s: float = 1.0  # for which a checkpoint blocks
    requeue_s: float = 300.0  # from the end of an allocation to the first agent of the next
    disk_every_s: float = 0.0  # between saves to disk, where all others are in memory; 0 = all are on disk
    disk_save_s: float = 1.0  # as save_s and load_s, of these
    disk_load_s: float = 60.0


MEMORY = Latencies(save_s=0.05, load_s=10.0, disk_every_s=600.0)  # checkpoints in memory, with copies on other nodes
_LEAVE = ("device", "device_hang", "node", "corruption", "maintenance")  # the node is not in the next cycle


class _Unjudged(Invariants):
    """At 2,048 nodes the rules are not checked at each step; tests check them in a small replay."""

    def coordinator_stepped(self, coordinator, event, commands): ...

    def agent_stepped(self, agent, event, commands): ...

    def started(self, worker): ...

    def left(self, agent): ...

    def at_the_end(self): ...


@dataclass(frozen=True)
class Saves:
    """Of a run: `count` in all, `on_disk` besides. `last_s`: from the first step to the end of the one that is read."""

    count: int
    on_disk: int
    last_s: float  # -1 = there is none


class ReplayRun(Run):
    """One cycle of the training."""

    load_s = 0.0
    needs_disk = False  # what is in memory does not help after this fault
    saves = Saves(0, 0, -1.0)


class _Training(Training):
    """Steps, with a save every `every_s` seconds of work. `saved_s`: work that no fault can take away."""

    def __init__(self, world):
        super().__init__(world.clock, world.rng, 0.0, 0.0)
        self._world = world
        self.stalled_at = 0.0  # last
        self.reads_disk = world.latencies.disk_every_s > 0  # the next run does: memory ended with the last allocation

    def run_of(self, plan):
        """The run that workers of `plan` belong to."""
        return self.runs.setdefault((plan.term, plan.cycle), ReplayRun(plan.world_size))

    def up(self, worker):
        """The last rank begins the initialization, which all ranks end together."""
        run, one = worker.run, self._world.latencies
        run.workers.append(worker)
        if len(run.workers) == run.world_size and not run.broken:
            run.since = self._clock.now + one.init_s
            run.load_s = one.disk_load_s if self.reads_disk else one.load_s
            self.reads_disk = False

    def stall(self, run):
        """A rank is dead, or hangs."""
        if not run.broken:
            run.broken, run.saves, self.stalled_at = True, self._saves(run), self._clock.now

    def _saves(self, run):
        one, every_s = self._world.latencies, self._world.every_s
        trained_s = 0.0 if run.since is None else max(0.0, self._clock.now - run.since - run.load_s)
        turn_s = every_s + one.save_s
        if not one.disk_every_s:
            count = int(trained_s / turn_s)
            return Saves(count, 0, count * turn_s)
        turns = max(1, round(one.disk_every_s / turn_s))  # of a round, which a save to disk ends
        round_s = turns * turn_s + one.disk_save_s
        rounds = int(trained_s / round_s)
        rest = min(turns, int((trained_s - rounds * round_s) / turn_s))
        if run.needs_disk:
            return Saves(rounds * turns + rest, rounds, rounds * round_s if rounds else -1.0)
        return Saves(rounds * turns + rest, rounds, rounds * round_s + rest * turn_s)

    def spent(self, worker, term, cycle):
        """What the node's page would tell of a rank that ends now."""
        run, one, began_s = worker.run, self._world.latencies, getattr(worker, "began_s", None)
        if began_s is None:
            return Spent(term, cycle)
        start_s, up_s = began_s
        if run.since is None or run.since > self._clock.now:
            return Spent(term, cycle, up_s - start_s, 0.0)
        saves = run.saves if run.broken else self._saves(run)
        is_saved = saves.count > 0 and saves.last_s >= 0.0
        saved_s = self._clock.now - run.since - run.load_s - saves.last_s if is_saved else -1.0
        blocked_s = saves.count * one.save_s + saves.on_disk * one.disk_save_s
        sections = (SectionTime("checkpointing", blocked_s, saves.count),) if saves.count else ()
        return Spent(term, cycle, up_s - start_s, 0.0, run.since - up_s, run.load_s, 0.0, saved_s, 0.0, sections)

    def die_with(self, worker):
        """Peers block in a collective; nothing ends them but their agents."""


class _Worker(Worker):
    """All ranks of one node."""

    began_s: tuple[float, float] | None = None  # plan and user code

    def __init__(self, agent, plan):
        self.agent, self.local_rank, self.rank = agent, 0, plan.rank_offset
        self.run = agent.world.training.run_of(plan)
        self.alive, self.stubborn, self.stuck, self.hung, self.done, self.terms = True, False, False, False, False, 0
        self._plan, world = plan, agent.world
        assert isinstance(world, ReplayWorld)
        world.invariants.started(self)
        world.clock.after(world.draw(agent, world.latencies.start_s), self._up, world.clock.now)

    def _up(self, plan_s):
        self.began_s = plan_s, self.agent.world.clock.now
        if self.alive:
            self.agent.world.training.up(self)

    def signal(self, signum):
        """It ends within the measured time."""
        world = self.agent.world
        assert isinstance(world, ReplayWorld)
        self.terms += signum != SIGKILL
        world.clock.after(
            0.001 if signum == SIGKILL else world.draw(self.agent, world.latencies.stop_s), self.die, -signum, ""
        )

    def seem_hung(self):
        """Its monitor says so."""
        if self.alive and isinstance(self.agent.world, ReplayWorld):
            hang_s = self.agent.world.latencies.hang_s
            fault = self.fault(FaultKind.HANG, -SIGKILL, f"no heartbeat for {hang_s:g} s")
            self.agent.step(ag.HangSeen(replace(fault, silent_s=hang_s)))

    def evidence(self):
        """All ranks are silent since the first one is."""
        world = self.agent.world
        assert isinstance(world.training, _Training)
        return replace(super().evidence(), silent_s=world.clock.now - world.training.stalled_at)

    def fails(self, kind, code, silent_s, message):
        """It ends by itself, `silent_s` seconds after its last sign of life."""
        if self.alive:
            self.agent.world.training.stall(self.run)
            fault = self.fault(kind, code, message)
            self._end(replace(fault, silent_s=silent_s))

    def _end(self, fault):
        self.alive = False
        training = self.agent.world.training
        assert isinstance(training, _Training)
        spent = training.spent(self, self._plan.term, self._plan.cycle)
        event = ag.WorkerExited(self.local_rank, fault, spent=spent)
        self.agent.world.clock.after(0.001, self.agent.step, event)


class _Agent(SimAgent):
    def __init__(self, world, host, life, settings):
        super().__init__(world, host, life, settings)
        self.lease_until = float("inf")

    def _renew(self): ...

    def _beat(self): ...

    def _prepare(self):
        assert isinstance(self.world, ReplayWorld)
        self.world.clock.after(self.world.draw(self, self.world.latencies.preflight_s), self._prepared)

    def do(self, command):
        """As any agent, with workers of the replay."""
        if isinstance(command, ag.StartWorkers):
            self.workers = [_Worker(self, command.plan)]
        else:
            super().do(command)


class _Coordinator(SimCoordinator):
    """Each message takes its time. The account follows, and its agents get it after each plan."""

    _free_s = 0.0

    def __init__(self, world, settings, agent):
        super().__init__(world, settings, agent)
        self._account = JobAccount(self.core)

    def step(self, event):
        """Hand one event to the core."""
        super().step(event)
        if self.alive and self._account.is_due:
            counted = self._account.count()
            for stream in self.streams.values():
                stream.down(counted)

    def renew(self):
        """Beats are not simulated."""
        self.valid_until = float("inf")

    def _in_turn(self, stream, do, *args):
        world = self.world
        assert isinstance(world, ReplayWorld)
        nodes = world.nodes_of(stream.agent) if stream is not None else 1
        self._free_s = max(self._free_s, world.clock.now) + nodes * world.latencies.message_s
        world.clock.at(self._free_s, do, *args)

    def receive(self, stream, message):
        """A message from an agent."""
        self._in_turn(stream, super().receive, stream, message)

    def lost(self, stream, why, silent_s):
        """A stream broke."""
        self._in_turn(stream, super().lost, stream, why, silent_s)

    def do(self, command):
        """Carry out one command."""
        if isinstance(command, (ev.SendTo, ev.Drop)):
            self._in_turn(self.streams.get(command.node_id), super().do, command)
        elif isinstance(command, ev.ReadReached):
            self.step(ev.ReachedRead(command.cycle, -1))
        else:
            if isinstance(command, ev.JobOver):
                self._tell(command)
            super().do(command)

    def die(self, why, silently=False):
        """The last one that has decided the end tells what the job was."""
        super().die(why, silently)
        core, now, end = self.core, self.world.clock.now, self.core.ending.end
        assert isinstance(self.world, ReplayWorld)
        if end is not None and self.world.report.account is None:
            self._account.close(now)
            report = core.ledger.build(core.budget.history, core.job.cycle, now)
            self._tell(ev.JobOver(end.code, end.reason, None, report))

    def _tell(self, done):
        assert isinstance(self.world, ReplayWorld)
        self.world.code, self.world.report = done.code, self._account.complete(done).report


class ReplayWorld(World):
    """One allocation. `fates`: (when, kind of fault) in seconds of this allocation; `ends_s`: then the job is told to
    end. After `run`, `code` and `report` tell how it ended; `left_over`: the fates that did not come true."""

    agent_class, coordinator_class = _Agent, _Coordinator

    def __init__(
        self, settings, latencies, every_s, fates,
        ends_s, thin = 1, judged = False,
    ):  # fmt: skip
        self.latencies, self.every_s, self.thin = latencies, every_s, thin
        self.code, self.report, self.left_over = -1, JobReport(), Counter(fates := [*fates])
        self.validates = judged
        self.judge_class = Invariants if judged else _Unjudged
        super().__init__(settings)
        for fate in fates:
            self.clock.at(fate[0], self._strike, fate)
        self.clock.at(ends_s, self._end)
        self.busy_until(ends_s)

    @property
    def over(self):
        """What agents do after the last coordinator has closed the job is of no interest."""
        return (self.report.account is not None and not self.validates) or super().over

    def make_training(self):
        """Work without an end."""
        return _Training(self)

    def nodes_of(self, agent):
        """How many nodes a simulated one stands for: a spare for itself."""
        plan, first = agent.core.plan, agent.host.infra_rank < self.settings.min_nodes
        return self.thin if (first if plan is None else plan.active) else 1

    def draw(self, agent, span):
        """The slowest of these nodes."""
        fastest, slowest = span
        return fastest + (slowest - fastest) * self.rng.random() ** (1.0 / self.nodes_of(agent))

    def _end(self):
        self.living_agents()[-1].step(ag.Signalled(15))

    # --- faults: what a launcher can see of them ----------------------------------------------------------------

    def _strike(self, fate):
        if any(c.core.ending.end is not None for c in self.coordinators):
            return
        workers = [agent.workers[0] for agent in self.living_agents() if agent.living()]
        if not workers or workers[0].run.since is None or workers[0].run.broken:
            self.clock.after(_RETRY_S, self._strike, fate)
            return
        worker = self.rng.choice(workers)
        self.left_over[fate] -= 1
        self._lose_memory(fate[1], worker.run)
        self.fired["coordinator-dies"] += 1  # as far as the judge is told: it may have been the leader's node
        assert isinstance(worker, _Worker)
        getattr(self, f"_{fate[1]}")(worker)

    def _lose_memory(self, kind, run):
        """What is silently wrong is in memory, too; and with the last spare, the job ends with all its memory."""
        spares = [one for one in self.living_agents() if not one.living() and not one.host.sick]
        if self.latencies.disk_every_s and (kind == "corruption" or (kind in _LEAVE and not spares)):
            run.needs_disk = self.training.reads_disk = True

    def _device(self, worker):
        """Its rank dies of it, and the next health check finds it."""
        worker.agent.host.sick = "a device of the node has failed"
        self._error(worker)

    def _error(self, worker):
        """A rank dies; its node is as good as before."""
        self.training.stall(worker.run)
        error_s = self.latencies.error_s
        self.clock.after(error_s, worker.fails, FaultKind.EXIT, 1, error_s, "RuntimeError")

    def _corruption(self, worker):
        """The user's own check finds it, asks for another node, and begins with a checkpoint from before it."""
        self.training.stall(worker.run)
        self.clock.after(self.latencies.unseen_s, self._asks, worker)

    def _asks(self, worker):
        worker.agent.step(ag.RankAsked(0, WorkloadAction.ExcludeThisNode, "the loss differs between replicas"))

    def _hang(self, worker):
        """Nothing is heard of a rank; its node is as good as before."""
        self.training.stall(worker.run)
        worker.hung = True
        hang_s, look_s = self.latencies.hang_s, 2 * self.settings.agent.hang_collect_s
        self.clock.after(hang_s, worker.seem_hung)
        message = f"no heartbeat for {hang_s:g} s"
        self.clock.after(hang_s + look_s, worker.fails, FaultKind.HANG, -9, hang_s + look_s, message)

    def _device_hang(self, worker):
        """The same, and a health check finds the device."""
        worker.agent.host.sick = "a device of the node does not answer"
        self._hang(worker)

    def _node(self, worker):
        """Silence."""
        worker.agent.vanish()

    def _maintenance(self, worker):
        """The node is drained, which its agent sees."""
        worker.agent.step(ag.Sick("Slurm drains this node"))
