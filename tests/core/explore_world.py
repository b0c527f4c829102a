"""A job of a few nodes as `explore` sees it: the real cores, and the programs around them.

Time stands still while anything can happen: what is under way may arrive in any order, and any timer that is due may
fire next. Lateness is a fault: a cut holds up what a node sends or gets, until it heals.
"""

from contextlib import contextmanager

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent, AgentState
from nvrx_slurm.core.coordinator import electing
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.election import election
from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.errors import ExitCode

from .explore_cores import LEASE_S, told
from .explore_streams import END, NOTICES_S, NOW, Broken, Streams
from .samples import agent_settings, coordinator_settings

GRID_S = 2.0  # all short times are equal: fewer states
GRACE_S = 3 * GRID_S  # as long as three questions, as in a job
FINDS_S = 2 * GRID_S  # a node that can be reached pauses once and asks once
TELLS_S = agent_settings().end_timeout_s - FINDS_S  # agents that know the end stay so long
HORIZON_S = 150.0  # of a job


@contextmanager
def coarse_times():
    """Meanwhile the cores' short times are all GRID_S."""
    before = election._QUESTION_S, election._FIRST_QUESTION_S, electing._PROBE_S
    election._QUESTION_S = election._FIRST_QUESTION_S = electing._PROBE_S = GRID_S
    try:
        yield
    finally:
        election._QUESTION_S, election._FIRST_QUESTION_S, electing._PROBE_S = before


class World(Streams):
    """The methods for commands stand for the programs around the cores. `late`: see `Streams`."""

    def __init__(self, nodes, active, late=False):
        super().__init__(nodes, active, late)
        for node in range(1 if late else nodes):
            self.boot(node)

    # --- programs -----------------------------------------------------------------------------------------------

    def boot(self, node):
        self.lives[node] += 1
        life, self.lease[node] = self.lives[node], 0.0
        me = t.Node(f"{node}.{life}", node, f"h{node}", f"10.0.0.{node}", 1, (), 100 * life + node)
        peers = tuple(t.Peer(str(i), f"h{i}", "", 0) for i in range(self.nodes))
        settings = agent_settings(elects=True, join_timeout_s=40.0, reconnect_timeout_s=30.0)
        self.begin(f"a{node}", Agent(me, settings, self.now))
        timing = el.ElectionSettings(LEASE_S, 2 * GRID_S, GRID_S, GRID_S)
        self.begin(f"e{node}", Election(peer_of(me), peers, timing, self.now))
        self.post(f"a{node}", ag.Prepared())
        self.step(f"e{node}", el.Begin())

    # --- what arrives ---------------------------------------------------------------------------------------------

    def on_up(self, number, message):
        link = self.links[number]
        here = link.reign, link.agent
        if message == END:
            self.lose(number, False)
        elif isinstance(message, t.Register):
            if self.joined.get(here, 0) < number:
                self.joined[here] = number
                self.tell(link, ev.Joined(message))
        elif self.joined.get(here) == number:
            self.tell(link, ev.FromAgent(f"{link.agent}.{link.life}", message))

    def on_down(self, number, message):
        link, node = self.links[number], self.links[number].agent
        if self.stream.get(node) != number:
            return None
        if message == END:
            return self.leave(node, el.StreamEnd.CLOSED)
        election, leader = f"e{node}", t.Peer(str(link.to), "", "", 100 * self.lives[link.to] + link.to)
        if isinstance(message, t.Elsewhere):
            self.leave(node)
            return self.step(election, message)
        if isinstance(message, t.Lead):
            self.led.add(node)
            self.renew()
            if link.to != node:
                self.step(election, el.Led(message.term, leader))
        elif isinstance(message, t.Plan):
            self.step(election, el.Led(message.term, leader, message.successors))
        self.step(f"a{node}", message)

    def on_to(self, name, event):
        self.step(name, event)

    # --- elections ------------------------------------------------------------------------------------------------

    def do_Seek(self, node, command):
        self.leave(node)
        self.seeks[node] = command.peer, command.term, self.now

    def on_seek(self, node):
        peer, term, _ = self.seeks.pop(node)
        if f"e{peer.key}" in self.cores:
            self.step(f"e{peer.key}", el.Visited(f"{node}.{self.lives[node]}", term))
        else:
            self.step(f"e{node}", el.StreamEnded(el.StreamEnd.REFUSED))

    def do_AnswerVisitor(self, node, command):
        visitor = int(command.visitor.split(".")[0])
        if command.elsewhere is None:
            self.connect(visitor, node)
        else:
            self.post(f"e{visitor}", command.elsewhere)

    def do_AskWhoLeads(self, node, command):
        other = f"e{command.peer.key}"
        if other in self.cores and self.reach(node, int(command.peer.key)):
            self.step(f"e{node}", el.Answered(command.peer, self.cores[other].where()))

    def do_Stand(self, node, command):
        self.leave(node)
        election, self.valid[node] = self.cores[f"e{node}"], 0.0
        self.count += 1
        self.reigns[node] = self.count
        settings = coordinator_settings(
            term=command.term, min_nodes=self.active, max_nodes=self.nodes, max_restarts=2,
            join_timeout_s=20.0, last_call_s=GRID_S, stop_timeout_s=20.0,
            peer=election.me, electors=self.nodes, last_leader=election.leader.key if election.leader else "",
            lease_s=LEASE_S, quorum_timeout_s=24.0, return_grace_s=GRACE_S, known=election.others, one_life=self.late,
        )  # fmt: skip
        self.begin(f"c{node}", Coordinator(settings, self.now))
        self.connect(node, node)

    def do_Raise(self, node, command):
        self.step(f"c{node}", ev.Raised(command.term))

    def do_Retire(self, node, command):
        if self.cores.pop(f"c{node}", None) is not None:
            reign = self.reigns.pop(node)
            del self.valid[node]
            self.probes = {one for one in self.probes if one[0] != node}
            for number, link in [*self.links.items()]:
                if link.reign == reign and link.accepted:
                    self.close(number, up=False)
            if f"a{node}" not in self.cores:
                self.on_kill(node)

    do_JobOver = do_Retire

    # --- a coordinator --------------------------------------------------------------------------------------------

    def do_Won(self, node, command):
        self.renew()
        self.step(f"e{node}", el.Elected())
        if self.valid[node] <= self.now or el.may_have_left(self.heard(node), self.now, LEASE_S):
            return self.step(f"e{node}", el.Resigned())
        core = self.cores[f"c{node}"]
        self.anew = max(self.lives) > 1 and self.won > 0 and core.electing._led_at is None
        others = [other.term for name, other in self.cores.items() if name[0] == "a" and name != f"a{node}"]
        if core.job.term <= max(others, default=0) and not self.anew:
            raise Broken(f"node {node} acts in term {core.job.term}, others have followed {others}")
        self.won = core.job.term

    def do_Lapsed(self, node, command):
        self.step(f"e{node}", el.Resigned())

    def do_SendTo(self, node, command):
        number = self.joined_as(node, command.node_id)
        if isinstance(command.message, t.Finish) and self.tell_until is None:
            self.decided(node)
        if number is not None and self.links[number].accepted:
            self.flight.append((("down", number), command.message))

    def decided(self, node):
        """Until when a node that can be reached hears the end. One that was missed earlier is waited for less long.

        A coordinator whose majority has left it unnoticed tells its end to those that are with it; the others go on.
        """
        core = self.cores[f"c{node}"]
        quorum = core.roster.quorum
        self.tell_until, self.untold = self.now + TELLS_S, quorum.elected and self.heard(node) != NOW
        if quorum.elected and quorum.missing(core.roster.members.keys_of_nodes):
            self.tell_until = quorum.missed_at + GRACE_S - FINDS_S
            self.untold |= self.tell_until <= self.now

    def tell(self, link, event):
        super().tell(link, event)
        if self.tell_until is not None and isinstance(event, ev.Lost):
            self.tell_until = min(self.tell_until, self.now + GRACE_S - FINDS_S)

    def joined_as(self, node, node_id):
        """The link by which this life of an agent has joined; None: it is gone."""
        agent, life = map(int, node_id.split("."))
        number = self.joined.get((self.reigns[node], agent))
        return number if number is not None and self.links[number].life == life else None

    def do_Drop(self, node, command):
        number = self.joined_as(node, command.node_id)
        if number is not None:
            del self.joined[self.reigns[node], self.links[number].agent]
            self.close(number, up=False)

    def do_Probe(self, node, command):
        self.probes.add((node, command.peer))

    def proves(self, node, peer):
        other = int(peer.key)
        dead = f"e{other}" not in self.cores or peer.port not in (0, 100 * self.lives[other] + other)
        return dead and self.reach(node, other) and not self.cut & {other}

    def on_dead(self, node, peer):
        self.probes.remove((node, peer))
        unheard = [link for link in self.links.values() if link.to == node and link.accepted and link.well is not None]
        keys = tuple(str(link.agent) for link in unheard if self.now >= link.well + NOTICES_S)
        self.step(f"c{node}", ev.ProvenDead(peer, keys))

    # --- an agent -------------------------------------------------------------------------------------------------

    def do_Send(self, node, command):
        message, number = command.message, self.stream.get(node)
        if number is None:
            return
        if isinstance(message, t.Register):
            election = self.cores[f"e{node}"]
            message = election.signed(message, self.now)
        self.flight.append((("up", number), message))

    def do_StartWorkers(self, node, command):
        rank, cycle = command.plan.rank_offset, command.plan.cycle
        if self.ends and not self.untold:
            raise Broken(f"cycle {cycle} begins after agents have ended with {self.ends}")
        if self.now < self.lease[node]:
            for where, (other, of) in self.ranks.items():
                if other == rank or of != cycle:
                    raise Broken(f"rank {rank} of cycle {cycle} begins beside {other} of {of} on node {where}")
            self.ranks[node] = rank, cycle
        else:
            fault = t.RankFault(t.FaultKind.SPAWN, f"h{node}", node, rank, 0)
            self.post(f"a{node}", ag.WorkerExited(0, fault))

    def do_SignalWorkers(self, node, command):
        self.exit(node, -command.signum)

    def exit(self, node, code):
        if node in self.ranks:
            rank, _ = self.ranks.pop(node)
            fault = t.RankFault(t.FaultKind.EXIT, f"h{node}", node, rank, 0, 1, code) if code else None
            self.post(f"a{node}", ag.WorkerExited(0, fault))

    def do_Prepare(self, node, command):
        self.post(f"a{node}", ag.Prepared())

    def do_Exit(self, node, command):
        """The agent has ended. Its program waits for the coordinator that is here, and goes on listening.

        An agent that no majority or no coordinator has told anything may end with another code than those that know.
        """
        alone = command.code == ExitCode.COORDINATOR_LOST or "no majority" in command.reason
        alone = alone and (node in self.cut or not self.ends)
        refused = command.code == ExitCode.NODE_REFUSED
        self.ends |= set() if alone or refused else {int(command.code)}
        if len(self.ends) > 1 and not self.untold:
            raise Broken(f"two ends: {self.ends}")
        peer = peer_of(self.cores[f"a{node}"].node)
        self.part(node)
        if f"c{node}" not in self.cores:
            self.on_kill(node)
        elif refused:
            self.step(f"c{node}", ev.ProvenDead(peer))

    def part(self, node):
        """The agent is gone, and its rank is."""
        self.ranks.pop(node, None)
        self.seeks.pop(node, None)
        self.led.discard(node)
        self.cores.pop(f"a{node}", None)
        if (number := self.stream.pop(node, None)) is not None:
            self.close(number, up=True)

    def on_kill(self, node):
        """The program is gone."""
        self.part(node)
        self.do_Retire(node, None)
        self.cores.pop(f"e{node}", None)
        self.flight = [item for item in self.flight if item[0] not in (("to", f"a{node}"), ("to", f"e{node}"))]

    # --- leases, timers and faults --------------------------------------------------------------------------------

    def timers(self):
        for name, core in self.cores.items():
            yield self.steps.deadline(core), ("tick", name)
        for node, (peer, _, at) in self.seeks.items():
            if not self.reach(node, int(peer.key)):
                yield at + GRID_S, ("late", node)
        for number, link in self.links.items():
            if link.well is not None and link.agent != link.to:
                yield link.well + NOTICES_S if link.open else None, ("quiet", number)
                yield link.well + LEASE_S if link.accepted else None, ("silent", number)
        for node in self.ranks:
            yield self.lease[node], ("expire", node)
        for node, until in self.valid.items():
            core = self.cores[f"c{node}"]
            yield until if core.roster.quorum.elected and core.ending.end is None else None, ("lapse", node)

    def on_tick(self, name):
        self.step(name, Tick())

    def on_late(self, node):
        del self.seeks[node]
        self.step(f"e{node}", el.StreamEnded(el.StreamEnd.UNREACHED))

    def on_quiet(self, number):
        self.leave(self.links[number].agent, el.StreamEnd.SILENT)

    def on_silent(self, number):
        self.lose(number, True)

    def on_expire(self, node):
        self.exit(node, -9)
        self.step(f"a{node}", ag.LeaseOver())

    def on_lapse(self, node):
        self.step(f"e{node}", el.Resigned())

    def on_pass(self):
        self.now = min(at for at, _ in self.timers() if at is not None)
        if self.cut and self.tell_until is not None and self.now >= self.tell_until:
            self.untold = True

    def on_done(self):
        for node in [*self.ranks]:
            self.exit(node, 0)

    def on_fails(self, node):
        self.exit(node, 1)

    def on_reset(self, number):
        """Both ends break, the coordinator's perhaps later; what was under way is lost."""
        self.flight = [item for item in self.flight if item[0] not in (("up", number), ("down", number))]
        self.leave(self.links[number].agent, el.StreamEnd.CLOSED)

    def on_cut(self, node):
        self.cut ^= {node}
        for number in [*self.links]:
            self.put(number)

    on_heal, on_back, on_begins = on_cut, boot, boot

    # --- what may happen ------------------------------------------------------------------------------------------

    def enabled(self):
        """What happens before time goes by."""
        found, channels = [], set()
        for at, (channel, _) in enumerate(self.flight):
            kind, place = channel
            link = self.links.get(place)
            first = kind == "to" or channel not in channels
            channels.add(channel)
            if first and (link is None or self.reach(link.agent, link.to)):
                found.append(("arrive", at))
        found += [("seek", node) for node, (peer, *_) in self.seeks.items() if self.reach(node, int(peer.key))]
        found += sorted([("dead", *one) for one in self.probes if self.proves(*one)], key=str)
        found += [move for at, move in self.timers() if at is not None and at <= self.now]
        return found + self.begin_one() if found else found

    def begin_one(self):
        return [("begins", node) for node in range(self.nodes) if not self.lives[node]][:1]

    def idle(self):
        """What may happen where nothing is under way."""
        plans = {told(core.plan)[1][:2] for core in self.cores.values() if core.state is AgentState.RUNNING}
        done = [("done",)] if len(self.ranks) == self.active and len(plans) == 1 else []
        return [*self.begin_one(), *done, ("pass",), *[("heal", node) for node in sorted(self.cut)]]

    def moves(self):
        """What may happen next without a fault."""
        return self.enabled() or self.idle()

    def settle(self, until_s=0.0):
        """Play what comes first until this time, and until nothing more is under way."""
        while self.enabled() or self.now < 1000.0 + until_s:
            self.play((*self.enabled(), ("pass",))[0])

    def faults(self):
        agents = [int(name[1:]) for name in self.cores if name[0] == "e"]
        found = [("kill", node) for node in agents]
        found += [("cut", node) for node in agents if node not in self.cut]
        found += [("fails", node) for node in self.ranks]
        whole = [(n, link) for n, link in self.links.items() if link.open and link.accepted]
        found += [("reset", n) for n, link in whole if link.agent != link.to]
        gone = [node for node in range(self.nodes) if node not in agents and node not in self.cut]
        return found + [("back", node) for node in gone if not self.late and self.tell_until is None]

    def play(self, move):
        """Let one thing happen."""
        kind, *args = move
        self.renew()
        if kind == "arrive":
            (kind, place), *what = self.flight.pop(args[0])
            args = [place, *what]
        getattr(self, f"on_{kind}")(*args)
        self.renew()

    @property
    def over(self):
        return self.anew or not any(name[0] == "a" for name in self.cores)
