"""The programs of the simulation: shells around the real cores that obey commands as the real shells do."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nvrx_slurm.core import record
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.agent import Agent
from nvrx_slurm.core.job.agent_events import AgentSettings
from nvrx_slurm.core.job.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.machine import Machine, Say, Tick
from nvrx_slurm.types import FaultKind, Node, Plan, RankFault, Register, Stopped

from .network import Connection, Host

if TYPE_CHECKING:
    from .world import World

_SIGTERM, _SIGKILL = 15, 9
_FIRST_RETRY_S, _LAST_RETRY_S, _RETRY_GROWTH = 0.01, 1.0, 1.6  # as control/client.py


class Process:
    """A core with its timer and, if wanted, its event log."""

    def __init__(self, world: World, core: Machine) -> None:
        self.world, self.core = world, core
        self.alive = True
        self.log: list[str] = [record.header_line(core)] if world.settings.record else []
        self._armed: float | None = None
        self._arm()

    def step(self, event: Any) -> None:
        """Hand one event to the core and carry out its commands."""
        if not self.alive:
            return
        now = self.world.clock.now
        commands = self.core.step(event, now)
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


class SimCoordinator(Process):
    """One reign."""

    core: Coordinator

    def __init__(self, world: World, settings: CoordinatorSettings) -> None:
        super().__init__(world, Coordinator(settings, world.clock.now))
        self.streams: dict[str, Connection] = {}  # by node_id: what comes on others is of the past
        self.accepted: list[Connection] = []

    def receive(self, stream: Connection, message: Any) -> None:
        """A message from an agent."""
        node_id = stream.agent.core.node.node_id
        if isinstance(message, Register):
            self.streams[node_id] = stream
            self.step(ev.Joined(message))
        elif self.streams.get(node_id) is stream:
            self.step(ev.FromAgent(node_id, message))

    def lost(self, stream: Connection, why: str) -> None:
        """A stream broke."""
        node_id = stream.agent.core.node.node_id
        if self.streams.get(node_id) is stream:
            del self.streams[node_id]
            self.step(ev.Lost(node_id, why))

    def do(self, command: Any) -> None:
        """Carry out one command."""
        if isinstance(command, ev.SendTo):
            stream = self.streams.get(command.node_id)
            if stream is not None and stream.open_at_coordinator:
                stream.down(command.message)
        elif isinstance(command, ev.Drop):
            stream = self.streams.pop(command.node_id, None)
            if stream is not None and stream.open_at_coordinator:
                stream.close_at_coordinator("the coordinator closed the stream")
        elif isinstance(command, ev.Done):
            self.die("the coordinator closed the stream")
        elif isinstance(command, ev.ReadProgress):
            self._read_progress(command)
        elif isinstance(command, ev.AskTimeLeft):
            left_s = self.world.settings.time_limit_s - self.world.clock.now
            answer = ev.TimeLeft(left_s if self.world.rng.random() < 0.8 else None)
            if self.world.rng.random() < 0.9:  # otherwise Slurm never answers
                self.world.clock.after(self.world.rng.uniform(0.0, 1.0), self.step, answer)
        else:
            assert isinstance(command, Say), command

    def _read_progress(self, command: ev.ReadProgress) -> None:
        """The file system answers in its own time, or not at all."""
        saved = int(self.world.training.saved_s)
        iteration = saved if self.world.rng.random() < 0.9 else None
        answer = ev.ProgressRead(command.cycle, iteration)
        self.world.clock.after(self.world.rng.uniform(0.0, 2.0), self.step, answer)

    def die(self, why: str, silently: bool = False) -> None:
        """Its process is gone, and so are its ends of the streams; with its whole machine, nobody is told."""
        self.alive = False
        for stream in self.accepted:
            if stream.open_at_coordinator and not silently:
                stream.close_at_coordinator(why)
            elif stream.open_at_coordinator:
                stream.open_at_coordinator = False
                stream.fall_silent(float("inf"))


class Worker:
    """One user process."""

    def __init__(self, agent: SimAgent, plan: Plan, local_rank: int) -> None:
        self.agent, self.local_rank = agent, local_rank
        self.rank = plan.rank_offset + local_rank
        self.run = agent.world.training.run_of(plan)
        self.alive = True
        self.stubborn = agent.stubborn  # ignores SIGTERM
        self.stuck = False  # uninterruptible: survives SIGKILL
        self.done = False  # it ended with 0
        self.terms = 0  # how often it got SIGTERM
        world = agent.world
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
        self.terms += signum == _SIGTERM
        if self.stuck or (self.stubborn and signum != _SIGKILL):
            return
        slowest_s = 0.02 if signum == _SIGKILL else 1.0
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
        self.agent.step(ag.HangSeen(self.fault(FaultKind.HANG, -_SIGKILL, "no heartbeat for 30 s")))

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

    def _end(self, fault: RankFault | None) -> None:
        self.alive = False
        world = self.agent.world
        world.clock.after(world.rng.uniform(0.0, 0.005), self.agent.step, ag.WorkerExited(self.local_rank, fault))


class SimAgent(Process):
    """One life of one agent, with its workers."""

    core: Agent

    def __init__(self, world: World, host: Host, life: int, settings: AgentSettings) -> None:
        self.host = host
        self.workers: list[Worker] = []
        self.stubborn = False
        self.stream: Connection | None = None
        self.exit: ag.Exit | None = None
        self.unprepared = True  # nobody has looked at the node since it ran workers
        self.told_sick = False
        node = Node(f"{host.name}.{life}", host.infra_rank, host.name, f"10.0.0.{host.infra_rank}", host.nproc)
        super().__init__(world, Agent(node, settings, world.clock.now))
        self._prepare()
        self._connect(_FIRST_RETRY_S)

    @property
    def done(self) -> bool:
        """Whether all workers of its last cycle ended well."""
        return bool(self.workers) and all(worker.done for worker in self.workers)

    @property
    def connected(self) -> bool:
        """Whether it believes that it has a stream."""
        return self.stream is not None and self.stream.open_at_agent

    def living(self) -> list[Worker]:
        """Its workers that are alive."""
        return [worker for worker in self.workers if worker.alive]

    def _connect(self, retry_s: float) -> None:
        """Look for the coordinator, again and again, more and more patiently."""
        if not self.alive:
            return
        world = self.world
        coordinator = world.coordinator
        if coordinator is not None and coordinator.alive and self.host.cut_until <= world.clock.now:
            self.stream = Connection(world, self, coordinator)
            self.step(ag.Connected())
            return
        retry_s = min(retry_s * _RETRY_GROWTH, _LAST_RETRY_S)
        world.clock.after(retry_s * world.rng.uniform(0.7, 1.3), self._connect, retry_s)

    def disconnected(self, stream: Connection, why: str) -> None:
        """Its stream is gone."""
        if stream is self.stream:
            self.stream = None
            self.step(ag.Disconnected(why))
            self.world.clock.after(self.world.rng.uniform(0.005, 0.05), self._connect, _FIRST_RETRY_S)

    def do(self, command: Any) -> None:
        """Carry out one command."""
        if isinstance(command, ag.Send):
            self._send(command.message)
        elif isinstance(command, ag.StartWorkers):
            self.workers = [Worker(self, command.plan, r) for r in range(self.host.nproc)]
        elif isinstance(command, ag.SignalWorkers):
            for worker in self.living():
                worker.signal(command.signum)
        elif isinstance(command, ag.PostGone):
            if self.core.plan is not None:
                self.world.training.stall(self.world.training.run_of(self.core.plan))
        elif isinstance(command, ag.Prepare):
            self._prepare()
        elif isinstance(command, ag.Exit):
            self.exit = command
            self._end("its agent left", in_flight=True)
        else:
            assert isinstance(command, (Say, ag.PassOn, ag.WarnRanks, ag.EndHeld)), command

    def _prepare(self) -> None:
        """Checks take their time; what they find is how the host is then."""
        world = self.world
        longest_s = 5.0 if world.rng.random() < 0.1 else 0.05
        world.clock.after(world.rng.uniform(0.0, longest_s), self._prepared)

    def _prepared(self) -> None:
        self.step(ag.Prepared(self.host.sick))

    def _send(self, message: Any) -> None:
        """Without a stream it is dropped: the next Register tells what matters."""
        if self.stream is None or not self.stream.open_at_agent:
            return
        if isinstance(message, (Register, Stopped)):
            message = replace(message, port=next(self.world.ports))
        self.stream.up(message)

    def slurm_signals_workers(self, signum: int) -> None:
        """They get it past the agent."""
        for worker in self.living():
            worker.signal(signum)

    def crash(self, in_flight: bool) -> None:
        """SIGKILL to the agent; its workers die with it."""
        self._end("connection reset", in_flight)

    def vanish(self) -> None:
        """The machine is gone without a word."""
        stream = self.stream
        self._die()
        if stream is not None:
            stream.open_at_agent = False
            stream.fall_silent(float("inf"))

    def _end(self, why: str, in_flight: bool) -> None:
        stream = self.stream
        self._die()
        if stream is None or not stream.open_at_agent:
            return
        if in_flight:
            stream.close_at_agent(why)
        else:
            stream.open_at_agent = False
            self.world.clock.after(0.001, stream.break_at_coordinator, why)

    def _die(self) -> None:
        self.alive = False
        self.stream = None
        for worker in self.living():
            self.world.training.stall(worker.run)
            worker.alive = worker.stuck
        self.world.left(self)
