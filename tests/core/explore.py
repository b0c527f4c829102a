"""All orders of messages, losses, deaths and time-outs in a job of a few nodes: the real cores, breadth first.

    python -m tests.core.explore --nodes 3 --active 2 --faults 2 --minutes 60

Time stands still while anything can happen: what is under way may arrive in any order, and any timer that is due may
fire next. Lateness is a fault: a cut holds up what a node sends or gets, until it heals. States that differ in nothing
that a core can tell are merged. From each state there has to be a way to the end of the job without another fault.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent, AgentState
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator import takeover
from nvrx_slurm.core.coordinator.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.election import election as el
from nvrx_slurm.core.election.quorum import peer_of
from nvrx_slurm.core.machine import Machine, Say, Tick

Move = tuple[Any, ...]
LEASE_S, GRID_S = 10.0, 2.0  # all short times are equal: fewer states
KEEPS_S, NOTICES_S = el.LEASE_SHARE * LEASE_S, el.MEMBER_SHARE * LEASE_S
HORIZON_S = 150.0  # of a job
END = "the other end has closed"
_SKIPPED = {"_handlers", "owners", "follower", "started", "out", "_out", "ledger", "_ledger", "suspects", "settings", "_s"}
_UNTOLD = {"reason", "why", "message", "text", "port", "faults", "master_port", "world_size", "counted", "node"}
_shared: dict[type, bool] = {}  # by class: no instance ever changes


class Broken(AssertionError):
    """A rule does not hold."""


@dataclass(frozen=True)
class Link:
    """The stream of one agent to one coordinator. `well`: when beats got through last; None = now."""

    agent: int
    to: int
    reign: int  # which of that node's coordinators
    open: bool = True  # at the agent
    accepted: bool = True  # open at the coordinator
    well: float | None = None


# --- copies and keys of cores ---------------------------------------------------------------------------------------


def shared(kind: type) -> bool:
    if kind not in _shared:
        frozen = "__dataclass_fields__" in vars(kind) and "__setattr__" in vars(kind)
        _shared[kind] = frozen or issubclass(kind, (int, float, str, type(None), Enum, frozenset)) or kind is type(len)
    return _shared[kind]


def inside(one: Any) -> Iterator[tuple[str, Any]]:
    for name in getattr(type(one), "__slots__", ()):
        yield name, getattr(one, name)
    yield from getattr(one, "__dict__", {}).items()


def clone(core: Any) -> Any:
    """A copy of a core; records are shared."""
    made: dict[int, Any] = {}

    def copy(one: Any) -> Any:
        kind = type(one)
        if shared(kind) or callable(one):
            return one
        if kind is tuple:
            return tuple(map(copy, one))
        if id(one) not in made:
            made[id(one)] = new = kind.__new__(kind)
            if isinstance(one, dict):
                new.update(zip(one, map(copy, one.values())))
            elif isinstance(one, set):
                new.update(one)
            elif isinstance(one, (list, deque)):
                new.extend(map(copy, one))
            for name, value in inside(one):
                setattr(new, name, {} if name == "_handlers" else copy(value))
        return made[id(one)]

    new = copy(core)
    new.bind(*new.owners)
    return new


def told(record: Any) -> Any:
    """What a record tells, as far as a core may decide by it."""
    kind = type(record)
    if kind is t.Plan:
        who = record.leader and record.leader.key, record.electors, record.dead, record.returned
        return record.term, record.cycle, record.group_rank, record.history.restarts_used, who, len(record.successors)
    if kind is tuple:
        return tuple(map(told, record))
    if "__dataclass_fields__" not in vars(kind) or not shared(kind):
        return record
    names = (name for name in record.__dataclass_fields__ if name not in _UNTOLD)
    return kind.__name__, *[told(getattr(record, name)) for name in names]


def key_of(core: Machine, now: float) -> int:
    """Equal for cores that decide alike. Times count from now; what is long past is all the same."""
    seen = set[int]()

    def key(one: Any) -> Any:
        kind = type(one)
        if kind is float:
            return round(min(max(one - now, -LEASE_S), 1e6), 2) if one else None
        if kind in (tuple, list, deque):
            return tuple(map(key, one))
        if shared(kind):
            return told(one)
        if kind is set:
            return frozenset(one)
        if id(one) in seen or callable(one):
            return None
        seen.add(id(one))
        found = tuple(map(key, one.values())) if isinstance(one, dict) else ()
        return found, *[key(value) for name, value in inside(one) if name not in _SKIPPED]

    return hash(key(core))


# --- one state of the job -------------------------------------------------------------------------------------------


class World:
    """`step`, and the methods for commands, stand for the programs around the cores."""

    def __init__(self, nodes: int, active: int) -> None:
        self.nodes, self.active, self.left = nodes, active, 0
        self.now = self.keyed_at = 1000.0
        self.cores: dict[str, Any] = {}  # "a0", "e0", "c0": agent, election and coordinator of node 0
        self.own: set[str] = set()  # those that no other state has
        self.keys: dict[str, int] = {}
        self.lives = [0] * nodes
        self.count = 0  # of links and coordinators
        self.links: dict[int, Link] = {}
        self.flight: list[Move] = []  # (channel, ...) under way, in order on each channel
        self.stream: dict[int, int] = {}  # agent -> its link
        self.joined: dict[tuple[int, int], int] = {}  # (reign, agent) -> the link on which it has registered
        self.led: set[int] = set()  # agents that have been told so on their stream
        self.ranks: dict[int, int] = {}  # node -> the rank that runs there
        self.lease: dict[int, float] = {}
        self.reigns: dict[int, int] = {}  # node -> number of its coordinator
        self.valid: dict[int, float] = {}  # until when it may act
        self.seeks: dict[int, tuple[t.Peer, int, float]] = {}
        self.probes: set[tuple[int, t.Peer]] = set()
        self.cut: set[int] = set()
        self.was_cut: set[int] = set()  # such a node may not have heard the end
        self.won = 0  # the last term in which one acted
        self.ends: set[int] = set()
        self.anew = False  # nodes that came back, and know nothing, have begun the job anew: no memory
        for node in range(nodes):
            self.boot(node)

    def copy(self) -> World:
        new = object.__new__(World)
        for name, value in self.__dict__.items():
            new.__dict__[name] = value.copy() if isinstance(value, (dict, list, set)) else value
        new.own = set()
        return new

    def key(self) -> int:
        now, links = self.now, sorted(self.links)
        for name, core in self.cores.items():
            if name in self.own or now != self.keyed_at:
                self.keys[name] = key_of(core, now)
        self.keyed_at = now
        place = {number: at for at, number in enumerate(links)}
        names = [(*told(self.links[n]), self.reigns.get(self.links[n].to) == self.links[n].reign) for n in links]
        wells = [None if (at := self.links[n].well) is None else at - now for n in links]
        joined = sorted((agent, place.get(n)) for (reign, agent), n in self.joined.items() if n in place)
        flight = sorted(repr((chan[0], place.get(chan[1], chan[1]), told(rest))) for chan, *rest in self.flight)
        seeks = [(node, peer.key, term, at - now) for node, (peer, term, at) in self.seeks.items()]
        times = [sorted((n, max(0.0, at - now)) for n, at in of.items()) for of in (self.lease, self.valid)]
        rest = self.lives, self.led, self.ranks, self.cut, self.won, self.ends, self.left, len(self.probes)
        cores = [(name, self.keys[name]) for name in sorted(self.cores)]
        streams = [(node, place[n]) for node, n in sorted(self.stream.items())]
        links_told = [(one[1], one[2], *one[4:]) for one in names]
        return hash(repr((cores, links_told, wells, joined, flight, sorted(seeks), times, streams, rest)))

    # --- programs -----------------------------------------------------------------------------------------------

    def boot(self, node: int) -> None:
        self.lives[node] += 1
        life, self.lease[node] = self.lives[node], 0.0
        me = t.Node(f"{node}.{life}", node, f"h{node}", f"10.0.0.{node}", 1, (), 100 * life + node)
        peers = tuple(t.Peer(str(i), f"h{i}", "", 0) for i in range(self.nodes))
        settings = ag.AgentSettings(elects=True, join_timeout_s=40.0, reconnect_timeout_s=30.0)
        self.begin(f"a{node}", Agent(me, settings, self.now))
        timing = el.ElectionSettings(LEASE_S, 2 * GRID_S, GRID_S, GRID_S)
        self.begin(f"e{node}", el.Election(peer_of(me), peers, timing, self.now))
        self.post(f"a{node}", ag.Prepared())
        self.step(f"e{node}", el.Begin())

    def begin(self, name: str, core: Any) -> None:
        core.owners = [*{id(method.__self__): method.__self__ for method in core._handlers.values()}.values()]
        self.cores[name] = core
        self.own.add(name)

    def post(self, name: str, event: Any) -> None:
        """It comes soon."""
        self.flight.append((("to", name), event))

    def step(self, name: str, event: Any) -> None:
        """One event for one core, and what its program does."""
        if name not in self.cores:
            return
        if name not in self.own:
            self.cores[name] = clone(self.cores[name])
            self.own.add(name)
        core = self.cores[name]
        commands = core.step(event, self.now)
        core.validate()
        for command in commands:
            do = getattr(self, f"do_{type(command).__name__}", None)
            if do is not None and self.cores.get(name) is core:
                do(int(name[1:]), command)

    def reach(self, one: int, other: int) -> bool:
        return one == other or not self.cut & {one, other}

    # --- links ----------------------------------------------------------------------------------------------------

    def put(self, number: int, **changes: Any) -> None:
        link = replace(self.links[number], **changes)
        works = link.open and link.accepted and self.reach(link.agent, link.to)
        well = None if works else self.now if link.well is None else link.well
        self.links[number] = replace(link, well=well)
        if not link.open and not link.accepted:
            del self.links[number]
            self.flight = [item for item in self.flight if item[0][1] != number]

    def close(self, number: int, up: bool) -> None:
        """One end closes. What has been sent to it is lost, and the other end hears of it after all else."""
        there, back = (("up", number), ("down", number)) if up else (("down", number), ("up", number))
        self.flight = [item for item in self.flight if item[0] != back]
        self.flight.append((there, END))
        self.put(number, **{"open" if up else "accepted": False})

    def connect(self, node: int, to: int) -> None:
        self.count += 1
        self.stream[node] = self.count
        self.links[self.count] = Link(node, to, self.reigns[to])
        self.step(f"a{node}", ag.Connected())

    def leave(self, node: int, how: el.StreamEnd | None = None) -> None:
        """An agent's stream is over. `how`: it did not end it itself."""
        self.seeks.pop(node, None)
        number = self.stream.pop(node, None)
        if number is not None:
            self.close(number, up=True)
            self.led.discard(node)
            self.step(f"a{node}", ag.Disconnected("lost"))
            if how is not None:
                self.step(f"e{node}", el.StreamEnded(how))

    def lose(self, number: int, silent: bool) -> None:
        """A coordinator's end is over."""
        link = self.links[number]
        silent_s = LEASE_S if silent else 0.0 if link.well is None else self.now - link.well
        self.close(number, up=False)
        if self.joined.get((link.reign, link.agent)) == number:
            del self.joined[link.reign, link.agent]
            self.tell(link, ev.Lost(f"{link.agent}.{self.lives[link.agent]}", "lost", silent_s))

    def tell(self, link: Link, event: Any) -> None:
        if self.reigns.get(link.to) == link.reign:
            self.step(f"c{link.to}", event)

    # --- what arrives ---------------------------------------------------------------------------------------------

    def on_up(self, number: int, message: Any) -> None:
        link = self.links[number]
        here = link.reign, link.agent
        if message == END:
            self.lose(number, False)
        elif isinstance(message, t.Register):
            if self.joined.get(here, 0) < number:
                self.joined[here] = number
                self.tell(link, ev.Joined(message))
        elif self.joined.get(here) == number:
            self.tell(link, ev.FromAgent(f"{link.agent}.{self.lives[link.agent]}", message))

    def on_down(self, number: int, message: Any) -> None:
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

    def on_to(self, name: str, event: Any) -> None:
        self.step(name, event)

    # --- elections ------------------------------------------------------------------------------------------------

    def do_Seek(self, node: int, command: el.Seek) -> None:
        self.leave(node)
        self.seeks[node] = command.peer, command.term, self.now

    def on_seek(self, node: int) -> None:
        peer, term, _ = self.seeks.pop(node)
        if f"e{peer.key}" in self.cores:
            self.step(f"e{peer.key}", el.Visited(f"{node}.{self.lives[node]}", term))
        else:
            self.step(f"e{node}", el.StreamEnded(el.StreamEnd.REFUSED))

    def do_AnswerVisitor(self, node: int, command: el.AnswerVisitor) -> None:
        visitor = int(command.visitor.split(".")[0])
        if command.elsewhere is None:
            self.connect(visitor, node)
        else:
            self.post(f"e{visitor}", command.elsewhere)

    def do_AskWhoLeads(self, node: int, command: el.AskWhoLeads) -> None:
        other, reign = f"e{command.peer.key}", self.reigns.get(node)
        if other in self.cores and self.reach(node, int(command.peer.key)) and reign is not None:
            self.step(f"e{node}", el.Answered(command.peer, self.cores[other].where()))

    def do_Stand(self, node: int, command: el.Stand) -> None:
        self.leave(node)
        election, self.valid[node] = self.cores[f"e{node}"], 0.0
        self.count += 1
        self.reigns[node] = self.count
        settings = CoordinatorSettings(
            command.term, self.active, self.nodes, 2, join_timeout_s=20.0, last_call_s=GRID_S, stop_timeout_s=20.0,
            peer=election.me, electors=self.nodes, last_leader=election.leader.key if election.leader else "",
            lease_s=LEASE_S, quorum_timeout_s=24.0, known=election.others,
        )  # fmt: skip
        self.begin(f"c{node}", Coordinator(settings, self.now))
        self.connect(node, node)

    def do_Raise(self, node: int, command: el.Raise) -> None:
        self.step(f"c{node}", ev.Raised(command.term))

    def do_Retire(self, node: int, command: Any) -> None:
        if self.cores.pop(f"c{node}", None) is not None:
            reign = self.reigns.pop(node)
            del self.valid[node]
            self.probes = {one for one in self.probes if one[0] != node}
            for number, link in [*self.links.items()]:
                if link.reign == reign and link.accepted:
                    self.close(number, up=False)

    do_JobOver = do_Retire

    # --- a coordinator --------------------------------------------------------------------------------------------

    def do_Won(self, node: int, command: ev.Won) -> None:
        self.renew()
        self.step(f"e{node}", el.Elected())
        if self.valid[node] <= self.now:
            return self.step(f"e{node}", el.Resigned())
        core = self.cores[f"c{node}"]
        self.anew = max(self.lives) > 1 and self.won > 0 and core.electing._led_at is None
        if core.job.term <= self.won and not self.anew:
            raise Broken(f"node {node} acts in term {core.job.term} after {self.won}")
        self.won = core.job.term

    def do_Lapsed(self, node: int, command: ev.Lapsed) -> None:
        self.step(f"e{node}", el.Resigned())

    def do_SendTo(self, node: int, command: ev.SendTo) -> None:
        number = self.joined.get((self.reigns[node], int(command.node_id.split(".")[0])))
        message = command.message
        if isinstance(message, t.Finish) and self.cores[f"c{node}"].roster.quorum.elected:
            self.ends |= {int(message.code)} if node not in self.was_cut or not self.ends else set()
            if len(self.ends) > 1:
                raise Broken(f"two ends: {self.ends}")
        if number is not None and self.links[number].accepted:
            self.flight.append((("down", number), message))

    def do_Drop(self, node: int, command: ev.Drop) -> None:
        number = self.joined.pop((self.reigns[node], int(command.node_id.split(".")[0])), None)
        if number is not None:
            self.close(number, up=False)

    def do_Probe(self, node: int, command: ev.Probe) -> None:
        self.probes.add((node, command.peer))

    def proves(self, node: int, peer: t.Peer) -> bool:
        other = int(peer.key)
        dead = f"a{other}" not in self.cores or peer.port not in (0, 100 * self.lives[other] + other)
        return dead and self.reach(node, other) and not self.cut & {other}

    def on_dead(self, node: int, peer: t.Peer) -> None:
        self.probes.remove((node, peer))
        self.step(f"c{node}", ev.ProvenDead(peer))

    # --- an agent -------------------------------------------------------------------------------------------------

    def do_Send(self, node: int, command: ag.Send) -> None:
        message, number = command.message, self.stream.get(node)
        if number is None:
            return
        if isinstance(message, t.Register):
            election = self.cores[f"e{node}"]
            message = replace(message, vote=election.term, led_s=election.led_s(self.now))
        self.flight.append((("up", number), message))

    def do_StartWorkers(self, node: int, command: ag.StartWorkers) -> None:
        rank = command.plan.rank_offset
        if self.now < self.lease[node]:
            if rank in self.ranks.values():
                raise Broken(f"rank {rank} runs twice: {self.ranks}, and on node {node}")
            self.ranks[node] = rank
        else:
            fault = t.RankFault(t.FaultKind.SPAWN, f"h{node}", node, rank, 0)
            self.post(f"a{node}", ag.WorkerExited(0, fault))

    def do_SignalWorkers(self, node: int, command: ag.SignalWorkers) -> None:
        self.exit(node, -command.signum)

    def exit(self, node: int, code: int) -> None:
        rank = self.ranks.pop(node, None)
        if rank is not None:
            fault = t.RankFault(t.FaultKind.EXIT, f"h{node}", node, rank, 0, 1, code) if code else None
            self.post(f"a{node}", ag.WorkerExited(0, fault))

    def do_Prepare(self, node: int, command: ag.Prepare) -> None:
        self.post(f"a{node}", ag.Prepared())

    def do_Exit(self, node: int, command: Any = None) -> None:
        """Its program is gone, and its rank is."""
        self.do_Retire(node, command)
        self.ranks.pop(node, None)
        self.seeks.pop(node, None)
        self.led.discard(node)
        for kind in "ae":
            del self.cores[f"{kind}{node}"]
        if (number := self.stream.pop(node, None)) is not None:
            self.close(number, up=True)
        self.flight = [item for item in self.flight if item[0] not in (("to", f"a{node}"), ("to", f"e{node}"))]

    # --- leases, timers and faults --------------------------------------------------------------------------------

    def renew(self) -> None:
        """Beats are answered where they get through."""
        for node in self.valid:
            quorum, heard, since = self.cores[f"c{node}"].roster.quorum, {str(node)}, self.now
            links = [link for link in self.links.values() if link.reign == self.reigns[node] and link.accepted]
            for at, key in sorted(((link.well or self.now, str(link.agent)) for link in links), reverse=True):
                if not quorum.enough(heard):
                    heard.add(key)
                    since = at
            if quorum.elected and quorum.enough(heard):
                self.valid[node] = max(self.valid[node], since + KEEPS_S)
        for node in self.led:
            link = self.links[self.stream[node]]
            if link.well is None:
                until = self.valid.get(node, 0.0) if link.to == node else self.now + KEEPS_S
                self.lease[node] = max(self.lease[node], until)

    def timers(self) -> Iterator[tuple[float, Move]]:
        for name, core in self.cores.items():
            yield core.deadline(), ("tick", name)
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

    def on_tick(self, name: str) -> None:
        self.step(name, Tick())

    def on_late(self, node: int) -> None:
        del self.seeks[node]
        self.step(f"e{node}", el.StreamEnded(el.StreamEnd.UNREACHED))

    def on_quiet(self, number: int) -> None:
        self.leave(self.links[number].agent, el.StreamEnd.SILENT)

    def on_silent(self, number: int) -> None:
        self.lose(number, True)

    def on_expire(self, node: int) -> None:
        self.exit(node, -9)
        self.step(f"a{node}", ag.LeaseOver())

    def on_lapse(self, node: int) -> None:
        self.step(f"e{node}", el.Resigned())

    def on_pass(self) -> None:
        self.now = min(at for at, _ in self.timers() if at is not None)

    def on_done(self) -> None:
        for node in [*self.ranks]:
            self.exit(node, 0)

    def on_fails(self, node: int) -> None:
        self.exit(node, 1)

    def on_reset(self, number: int) -> None:
        """Both ends break, the coordinator's perhaps later; what was under way is lost."""
        self.flight = [item for item in self.flight if item[0] not in (("up", number), ("down", number))]
        self.leave(self.links[number].agent, el.StreamEnd.CLOSED)

    def on_cut(self, node: int) -> None:
        self.cut ^= {node}
        self.was_cut.add(node)
        for number in [*self.links]:
            self.put(number)

    on_heal, on_kill, on_back = on_cut, do_Exit, boot

    # --- what may happen ------------------------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """What may happen next without a fault."""
        found = list[Move]()
        for at, (channel, *what) in enumerate(self.flight):
            kind, place = channel
            link = self.links.get(place)
            first = kind == "to" or channel not in [item[0] for item in self.flight[:at]]
            if first and (link is None or self.reach(link.agent, link.to)):
                found.append(("arrive", at))
        found += [("seek", node) for node, (peer, *_) in self.seeks.items() if self.reach(node, int(peer.key))]
        found += [("dead", *one) for one in self.probes if self.proves(*one)]
        found += [move for at, move in self.timers() if at is not None and at <= self.now]
        if found:
            return found
        plans = {told(core.plan)[:2] for name, core in self.cores.items() if core.state is AgentState.RUNNING}
        done = [("done",)] if len(self.ranks) == self.active and len(plans) == 1 else []
        return [*done, ("pass",), *[("heal", node) for node in self.cut]]

    def faults(self) -> list[Move]:
        agents = [int(name[1:]) for name in self.cores if name[0] == "a"]
        found: list[Move] = [("kill", node) for node in agents]
        found += [("cut", node) for node in agents if node not in self.cut]
        found += [("fails", node) for node in self.ranks]
        found += [("reset", n) for n, link in self.links.items() if link.open and link.accepted and link.agent != link.to]
        gone = [node for node in range(self.nodes) if node not in agents and node not in self.cut]
        return found + [("back", node) for node in gone if not self.ends]

    def play(self, move: Move) -> None:
        """Let one thing happen."""
        kind, *args = move
        self.renew()
        if kind == "arrive":
            (kind, place), *what = self.flight.pop(args[0])
            args = [place, *what]
        getattr(self, f"on_{kind}")(*args)
        self.renew()

    @property
    def over(self) -> bool:
        return self.anew or not any(name[0] == "a" for name in self.cores)


el._QUESTION_S = el._FIRST_QUESTION_S = takeover._PROBE_S = GRID_S


def running(nodes: int, active: int, faults: int) -> World:
    """A job whose first cycle runs."""
    world = World(nodes, active)
    while len(world.ranks) < active:
        world.play(world.moves()[0])
    while world.moves()[0][0] == "arrive":
        world.play(world.moves()[0])
    world.left = faults
    return world


def explore(first: World, seconds: float) -> tuple[int, int, int]:
    """How many states and moves there are, and how many states are left when the time is over. Raises Broken."""
    until = time.process_time() + seconds
    known, before, from_where = {first.key(): 0}, [(0, ())], [[]]
    queue, good, moves = deque([(0, first)]), list[int](), 0

    def story(number: int) -> str:
        steps = list[str]()
        while number:
            number, move = before[number]
            steps.append(str(move))
        return "\n".join(reversed(steps))

    while queue and time.process_time() < until:
        number, world = queue.popleft()
        if world.over or world.now > 1000.0 + HORIZON_S:
            good.append(number)
            continue
        free = world.moves()
        for move in [*free, *(world.faults() if world.left else ())]:
            after, moves = world.copy(), moves + 1
            after.left -= move not in free
            try:
                after.play(move)
            except Exception as error:
                raise Broken(f"{error!r}, after\n{story(number)}\n{move}") from error
            found = known.setdefault(after.key(), len(before))
            if found == len(before):
                before.append((number, (round(after.now - 1000, 1), *move)))
                from_where.append([])
                queue.append((found, after))
            if move in free:
                from_where[found].append(number)
    reached = good + [number for number, _ in queue]
    ends = set(reached)
    while reached:
        new = set(from_where[reached.pop()]) - ends
        ends |= new
        reached += new
    if len(ends) < len(before):
        raise Broken(f"no way to the end, after\n{story(min(set(range(len(before))) - ends))}")
    return len(before), moves, len(queue)


def main() -> int:
    """Returns 1 where a rule breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("nodes", 3), ("active", 2), ("faults", 1), ("minutes", 1)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--boot", action="store_true", help="from the start of the agents on")
    args = parser.parse_args()
    world = World(args.nodes, args.active) if args.boot else running(args.nodes, args.active, args.faults)
    world.left = args.faults
    try:
        print("{} states, {} moves, {} states left".format(*explore(world, 60.0 * args.minutes)))
    except Broken as broken:
        print(broken)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
