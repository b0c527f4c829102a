"""The programs of the simulation: shells around the real cores that obey commands as the real shells do."""

from __future__ import annotations

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.quorum import peer_key, peer_of
from nvrx_slurm.core.machine import Say
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Elsewhere, FaultKind, Lead, Node, Plan, RankFault, Ready, Register

from .network import LEADS_S, LEASE_S, Connection
from .process import Process, SimElection
from .training import SIGKILL, Worker

_REACH_S = 1.0  # how long an attempt to connect may take
_BEAT_S = 0.5


class SimCoordinator(Process):
    """The coordinator that stands, or leads, on one node."""

    core: Coordinator

    def __init__(self, world, settings, agent):
        super().__init__(world, Coordinator(settings, world.clock.now), agent.host)
        self.agent = agent
        self.valid_until = 0.0 if world.elects else float("inf")  # its own lease
        self.streams = {}  # by node_id: what comes on others is of the past
        self.accepted = []
        self.numbers = {}

    def step(self, event):
        """A coordinator that was stopped resigns before it decides anything."""
        over = self.core.roster.quorum.needed and self.leads and self.world.clock.now > self.valid_until
        if over and self.host.frozen_until <= self.world.clock.now and self.core.ending.end is None:
            self.agent.elect.step(el.Resigned())
        else:
            super().step(event)

    def receive(self, stream, message):
        node_id = stream.agent.core.node.node_id
        if isinstance(message, Register):
            if message.number < self.numbers.get(node_id, 0):
                return
            self.numbers[node_id] = message.number
            self.streams[node_id] = stream
            self.step(ev.Joined(message))
        elif self.streams.get(node_id) is stream:
            self.step(ev.FromAgent(node_id, message))

    @property
    def leads(self):
        return self.alive and self.core.roster.quorum.elected

    def lost(self, stream, why, silent_s):
        node_id = stream.agent.core.node.node_id
        if self.streams.get(node_id) is stream:
            del self.streams[node_id]
            self.step(ev.Lost(node_id, why, silent_s))

    def renew(self):
        """Its own lease goes on while it hears from a quorum."""
        heard = [peer_key(s.agent.core.node) for s in self.streams.values() if s.healthy]
        if self.leads and self.core.roster.quorum.enough(heard):
            self.valid_until = self.world.clock.now + LEADS_S

    def _probe(self, peer, until):
        """Connect to where an agent listened, until its host refuses."""
        host, clock = self.world.hosts[int(peer.key)], self.world.clock
        if not self.alive or clock.now > until:
            return
        agent = host.agent
        listens = agent is not None and agent.alive and peer.port in (0, agent.core.node.port)
        if listens or self._is_cut_off(host):
            clock.after(0.1, self._probe, peer, until)
        else:
            unheard = tuple(peer_key(s.agent.core.node) for s in self.streams.values() if s.is_unheard)
            self.step(ev.ProvenDead(peer, unheard))

    def _is_cut_off(self, host):
        now = self.world.clock.now
        silent = host.unreachable_until(now) > 0.0 or self.host.frozen_until > now
        return silent or not self.world.split.reach(self.host, host, now)

    def do(self, command):
        if isinstance(command, ev.SendTo):
            stream = self.streams.get(command.node_id)
            if stream is not None and stream.open_at_coordinator:
                stream.down(command.message)
        elif isinstance(command, ev.Drop):
            stream = self.streams.pop(command.node_id, None)
            if stream is not None and stream.open_at_coordinator:
                stream.close_at_coordinator("the coordinator closed the stream")
        elif isinstance(command, ev.JobOver):
            self.die("the coordinator closed the stream")
        elif isinstance(command, ev.Probe):
            self.world.clock.after(0.002, self._probe, command.peer, self.world.clock.now + 20.0)
        elif isinstance(command, ev.Won):
            self._won()
        elif isinstance(command, ev.Lapsed):
            self.agent.elect.step(el.Resigned())
        elif isinstance(command, (ev.ReadProgress, ev.ReadReached)):
            self._read_progress(command)
        elif isinstance(command, ev.AskTimeLeft):
            left_s = self.world.settings.time_limit_s - self.world.clock.now
            answer = ev.TimeLeftRead(left_s if self.world.rng.random() < 0.8 else None)
            if self.world.rng.random() < 0.9:  # otherwise Slurm never answers
                self.world.clock.after(self.world.rng.uniform(0.0, 1.0), self.step, answer)
        else:
            assert isinstance(command, (Say, ev.HangFound, ev.Strike)), command

    def _won(self):
        """It acts, unless the votes have come too late."""
        self.agent.elect.step(el.Elected())
        self.renew()
        if self.valid_until <= self.world.clock.now:
            self.agent.elect.step(el.Resigned())

    def _read_progress(self, command):
        """The file system answers in its own time, or not at all."""
        saved = int(self.world.training.saved_s)
        iteration = saved if self.world.rng.random() < 0.9 else None
        answer = ev.ProgressRead(command.cycle, iteration)
        if isinstance(command, ev.ReadReached):
            answer = ev.ReachedRead(command.cycle, saved if self.world.training.prints else -1)
        self.world.clock.after(self.world.rng.uniform(0.0, 2.0), self.step, answer)

    def die(self, why, silently=False):
        """Its process is gone, and so are its ends of the streams; with its whole machine, nobody is told."""
        self.alive = False
        for stream in self.accepted:
            if stream.open_at_coordinator and not silently:
                stream.close_at_coordinator(why)
            elif stream.open_at_coordinator:
                stream.open_at_coordinator = False
                stream.fall_silent(float("inf"))


class SimAgent(Process):
    """One life of one agent, with its workers."""

    core: Agent

    def __init__(self, world, host, life, settings):
        self.host = host
        self.workers = []
        self.stubborn = False
        self.stream = None
        self.exit = None
        self.unprepared = True  # nobody has looked at the node since it ran workers
        self.told_sick = False
        self.coordinator = None
        self.visitors = {}
        self.lease_until = 0.0 if world.elects else float("inf")
        self._attempt = 0
        self._renewed_by = None  # has said that it leads, on the present stream
        addr, domain = f"10.0.0.{host.infra_rank}", world.settings.domain_of(host.infra_rank)
        node = Node(f"{host.name}.{life}", host.infra_rank, host.name, addr, host.nproc, (), life, domain)
        super().__init__(world, Agent(node, replace(settings, elects=world.elects), world.clock.now), host)
        self.elect = SimElection(world, self)

    def start(self):
        self._prepare()
        self.elect.step(el.Begin())
        self._beat()

    @property
    def done(self):
        """Whether all workers of its last cycle ended well."""
        return bool(self.workers) and all(worker.done for worker in self.workers)

    @property
    def connected(self):
        return self.stream is not None and self.stream.open_at_agent

    def living(self):
        return [worker for worker in self.workers if worker.alive]

    # --- the way to the coordinator -------------------------------------------------------------------------

    def seek(self, peer, term):
        """Leave the present stream and register with another node."""
        self._leave("another candidate is sought")
        host = self.world.hosts[int(peer.key)]
        self.world.clock.after(self.world.rng.uniform(0.0005, 0.004), self._arrive, host, term, self._attempt)

    def _leave(self, why):
        self._attempt += 1
        stream, self.stream, self._renewed_by = self.stream, None, None
        if stream is not None:
            if stream.open_at_agent:
                stream.close_at_agent(why)
            self.step(ag.Disconnected(why))

    def _arrive(self, host, term, attempt):
        now = self.world.clock.now
        if not self.alive or attempt != self._attempt:
            return
        if host.unreachable_until(now) or not self.world.split.reach(self.host, host, now):
            self.world.clock.after(_REACH_S, self._failed, el.StreamEnd.UNREACHED, attempt)
        elif host.agent is None or not host.agent.alive:
            self.world.clock.after(0.001, self._failed, el.StreamEnd.REFUSED, attempt)
        else:
            node_id = self.core.node.node_id
            host.agent.visitors[node_id] = self, attempt
            host.agent.elect.step(el.Visited(node_id, term))

    def _failed(self, how, attempt):
        if self.alive and attempt == self._attempt:
            self.elect.step(el.StreamEnded(how))

    def answer(self, command):
        visitor, attempt = self.visitors.pop(command.visitor)
        if command.elsewhere is None:
            self.world.clock.after(0.0005, visitor.accepted, self.coordinator, attempt)
        else:
            self.world.clock.after(0.0005, visitor.sent_on, command.elsewhere, attempt)

    def sent_on(self, elsewhere, attempt):
        """The node that was sought knows better."""
        if self.alive and attempt == self._attempt:
            self.elect.step(elsewhere)

    def accepted(self, coordinator, attempt):
        """A coordinator, or a candidate, takes the registration."""
        if not self.alive or attempt != self._attempt:
            return
        if coordinator is None or not coordinator.alive:
            self.elect.step(el.StreamEnded(el.StreamEnd.UNREACHED))
            return
        self.stream = Connection(self.world, self, coordinator)
        split, now = self.world.split, self.world.clock.now
        cut = max(split.heals(self.host, coordinator.host), split.heals(coordinator.host, self.host))
        if (heals := max(coordinator.host.unreachable_until(now), cut)) > now:
            self.stream.fall_silent(heals)
        self.step(ag.Connected())

    def disconnected(self, stream, why, silent):
        if self.host.frozen_until > self.world.clock.now:
            self.world.clock.at(self.host.frozen_until, self.disconnected, stream, why, False)
        elif stream is self.stream and self.alive:
            self.stream, self._renewed_by = None, None
            self.step(ag.Disconnected(why))
            self.elect.step(el.StreamEnded(el.StreamEnd.SILENT if silent else el.StreamEnd.CLOSED))

    def receive(self, stream, message):
        if self.host.frozen_until > self.world.clock.now:
            self.world.clock.at(self.host.frozen_until, self.receive, stream, message)
            return
        if stream is not self.stream:
            return
        if isinstance(message, Elsewhere):
            self._leave("another term")
            self.elect.step(message)
            return
        leader = peer_of(stream.coordinator.agent.core.node)
        if isinstance(message, Lead):
            self._renewed_by = stream.coordinator
            self._renew()
            if not stream.local:
                self.elect.step(el.Led(message.term, leader))
        elif isinstance(message, Plan):
            self.elect.step(el.Led(message.term, leader, message.successors))
        self.step(message)

    # --- this node as the coordinator -----------------------------------------------------------------------

    def stand(self, command):
        """Start a coordinator here and register with it."""
        before = self.elect.core.leader
        self._leave("this node stands for coordinator")
        self.coordinator = self.world.new_coordinator(self, command, before)
        if self.coordinator.leads:
            self.elect.step(el.Elected())
        self.accepted(self.coordinator, self._attempt)

    def retire(self):
        coordinator, self.coordinator = self.coordinator, None
        if coordinator is not None:
            coordinator.die("the coordinator has retired")

    def ask_who_leads(self, peer):
        host, now = self.world.hosts[int(peer.key)], self.world.clock.now
        reachable = not host.unreachable_until(now) and self.world.split.reach(self.host, host, now)
        if reachable and host.agent is not None and host.agent.alive:
            self.world.clock.after(0.003, self._told, self.coordinator, peer, host.agent.elect.core.where())

    def _told(self, coordinator, peer, where):
        if coordinator is self.coordinator:
            self.elect.step(el.Answered(peer, where))

    # --- the lease ------------------------------------------------------------------------------------------

    def _renew(self):
        leader = self._renewed_by
        if leader is None or self.stream is None or not (self.stream.local or self.stream.healthy):
            return
        if leader.valid_until > self.world.clock.now:
            own = leader.valid_until if self.stream.local else self.world.clock.now + LEASE_S
            self.lease_until = own

    def _beat(self):
        """Renew the lease; where that fails for too long, the monitors kill the workers, also of a stopped agent."""
        if not self.alive:
            return
        now = self.world.clock.now
        if self.coordinator is not None and self.host.frozen_until <= now:
            self.coordinator.renew()
        if self.host.frozen_until <= now:
            self._renew()
        if now >= self.lease_until and self.living():
            self.step(ag.LeaseOver())
            for worker in self.living():
                worker.signal(SIGKILL)
        self.world.clock.after(_BEAT_S, self._beat)

    def do(self, command):
        if isinstance(command, ag.Send):
            self._send(command.message)
        elif isinstance(command, ag.StartWorkers):
            if self.world.clock.now >= self.lease_until:
                self.world.clock.after(0.0, self._start_nothing)
                return
            self.workers = [Worker(self, command.plan, r) for r in range(self.host.nproc)]
        elif isinstance(command, ag.SignalWorkers):
            for worker in self.living():
                worker.signal(command.signum)
        elif isinstance(command, ag.InspectRanks):
            seen = tuple(worker.evidence() for worker in self.living())
            self.world.clock.after(
                self.world.rng.uniform(0.3, command.within_s), self.step, ag.Inspected(command.cycle, seen)
            )
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

    def _start_nothing(self):
        """The program went on after a stop: its lease is over."""
        for local_rank in range(self.host.nproc):
            rank = self.core.plan.rank_offset + local_rank if self.core.plan is not None else -1
            why = "the lease is over"
            fault = RankFault(FaultKind.SPAWN, self.host.name, self.host.infra_rank, rank, local_rank, message=why)
            self.step(ag.WorkerExited(local_rank, fault))

    def _prepare(self):
        """Checks take their time; what they find is how the host is then."""
        world = self.world
        longest_s = 5.0 if world.rng.random() < 0.1 else 0.05
        world.clock.after(world.rng.uniform(0.0, longest_s), self._prepared)

    def _prepared(self):
        self.step(ag.Prepared(self.host.sick))

    def _send(self, message):
        """Without a stream it is dropped: the next Register tells what matters."""
        if self.stream is None or not self.stream.open_at_agent:
            return
        if isinstance(message, (Register, Ready)):
            message = replace(message, port=next(self.world.ports))
        if isinstance(message, Register):
            elect = self.elect.core
            message = elect.signed(replace(message, number=self._attempt), self.world.clock.now)
        self.stream.up(message)

    def slurm_signals_workers(self, signum):
        """They get it past the agent."""
        for worker in self.living():
            worker.signal(signum)

    def crash(self, in_flight):
        self._end("connection reset", in_flight)

    def vanish(self):
        self.host.off = True
        stream, coordinator = self.stream, self.coordinator
        self._die()
        if stream is not None:
            stream.open_at_agent = False
            stream.fall_silent(float("inf"))
        if coordinator is not None:
            coordinator.die("", silently=True)

    def _end(self, why, in_flight):
        stream, coordinator = self.stream, self.coordinator
        self._die()
        if coordinator is not None:
            coordinator.die(why)
        if stream is None or not stream.open_at_agent:
            return
        if in_flight:
            stream.close_at_agent(why)
        else:
            stream.open_at_agent = False
            self.world.clock.after(0.001, stream.break_at_coordinator, why)

    def _die(self):
        self.alive = self.elect.alive = False
        self.stream = None
        for worker in self.living():
            self.world.training.stall(worker.run)
            worker.alive = worker.stuck
        self.world.left(self)
