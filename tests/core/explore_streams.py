"""The cores of a few nodes and the streams between them, as `explore_world` needs them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.election import events as el
from nvrx_slurm.declared import replace

from .explore_cores import LEASE_S, Steps, told

Move = tuple[Any, ...]
Same = TypeVar("Same", bound="Streams")
KEEPS_S, NOTICES_S = el.LEASE_SHARE * LEASE_S, el.MEMBER_SHARE * LEASE_S
END = "the other end has closed"
NOW = 1e9
_CHANGE = {dict, list, set}


class Broken(AssertionError):
    """A rule does not hold."""


@dataclass(frozen=True)
class Link:
    """The stream of one agent to one coordinator. `well`: when beats got through last; None = now."""

    agent: int
    to: int
    reign: int  # which of that node's coordinators
    life: int  # which of that node's agents
    open: bool = True  # at the agent
    accepted: bool = True  # open at the coordinator
    well: float | None = None


class Streams:
    """The cores of all nodes, and the streams between them: what is under way, which end is open, who can beat."""

    def __init__(self, nodes, active, late):
        self.nodes, self.active, self.left = nodes, active, 0  # `left`: faults
        self.late = late  # agents begin one after the other, as in a step of Slurm; none comes back
        self.now = 1000.0
        self.steps = Steps()
        self.cores = {}  # "a0", "e0", "c0": agent, election and coordinator of node 0
        self.lives = [0] * nodes
        self.count = 0  # of links and coordinators
        self.links = {}
        self.flight = []  # (channel, ...) under way, in order on each channel
        self.stream = {}  # agent -> its link
        self.joined = {}  # (reign, agent) -> the link on which it has registered
        self.led = set()  # agents that have been told so on their stream
        self.ranks = {}  # node -> the rank that runs there, and its cycle
        self.lease = {}
        self.reigns = {}  # node -> number of its coordinator
        self.valid = {}  # until when it may act
        self.seeks = {}
        self.probes = set()
        self.cut = set()
        self.won = 0  # the last term in which one acted
        self.ends = set()  # codes with which agents have ended that were told so
        self.tell_until = None  # a node that can be reached again before that hears the end
        self.untold = False  # a node was cut off for longer, and cannot know the end
        self.anew = False  # nodes that came back, and know nothing, have begun the job anew: no memory

    def copy(self):
        """Another state that changes on its own."""
        new = object.__new__(type(self))
        for name, value in self.__dict__.items():
            new.__dict__[name] = value.copy() if type(value) in _CHANGE else value
        return new

    def key(self):
        """Equal for states that differ in nothing that a core can tell, or in what may happen yet."""
        now, links, steps = self.now, sorted(self.links), self.steps
        for name, core in self.cores.items():
            self.cores[name] = steps.later(name, core, now)
        place = {number: at for at, number in enumerate(links)}
        flight = [(kind, place.get(on, on), told(what)) for (kind, on), what in self.flight]
        flight.sort(key=lambda item: str(item[:2]))  # by channel
        streams = [(node, place[n]) for node, n in sorted(self.stream.items())]
        seeks = [(node, peer.key, term, at - now) for node, (peer, term, at) in sorted(self.seeks.items())]
        times = [(n, max(0.0, at - now)) for of in (self.lease, self.valid) for n, at in sorted(of.items())]
        tells_s = None if self.tell_until is None else max(0.0, self.tell_until - now)
        return hash((
            tuple([(name, steps.keys[id(core), now]) for name, core in sorted(self.cores.items())]),
            tuple([self._told(self.links[n]) for n in links]),
            tuple(sorted([(agent, place[n]) for (_, agent), n in self.joined.items() if n in place])),
            *map(tuple, (flight, streams, seeks, times, self.lives, sorted(self.ranks.items()))),
            *map(frozenset, (self.probes, self.led, self.cut, self.ends)),
            self.won, tells_s, self.untold,
        ))  # fmt: skip

    def _told(self, link):
        well = None if link.well is None else self.now - link.well
        of_now = self.reigns.get(link.to) == link.reign
        return link.agent, link.life, link.to, link.open, link.accepted, well, of_now

    def begin(self, name, core):
        self.cores[name] = self.steps.begin(name, core, self.now)

    def post(self, name, event):
        """It comes soon."""
        self.flight.append((("to", name), event))

    def step(self, name, event):
        """One event for one core, and what its program does."""
        if name not in self.cores:
            return
        self.cores[name], commands = self.steps.step(name, self.cores[name], event, self.now)
        node, reign = int(name[1:]), self.reigns.get(int(name[1:]))
        for command in commands:
            do = getattr(self, f"do_{type(command).__name__}", None)
            over = name not in self.cores or (name[0] == "c" and self.reigns.get(node) != reign)
            if do is not None and not over:
                do(node, command)

    def reach(self, one, other):
        return one == other or not self.cut & {one, other}

    # --- links ----------------------------------------------------------------------------------------------------

    def put(self, number, **changes):
        link = replace(self.links[number], **changes)
        works = link.open and link.accepted and self.reach(link.agent, link.to)
        well = None if works else self.now if link.well is None else link.well
        self.links[number] = replace(link, well=well)
        if not link.open and not link.accepted:
            del self.links[number]
            self.flight = [item for item in self.flight if item[0][1] != number]

    def close(self, number, up):
        """One end closes. What has been sent to it is lost, and the other end hears of it after all else."""
        there, back = (("up", number), ("down", number)) if up else (("down", number), ("up", number))
        self.flight = [item for item in self.flight if item[0] != back]
        self.flight.append((there, END))
        self.put(number, **{"open" if up else "accepted": False})

    def connect(self, node, to):
        self.count += 1
        self.stream[node] = self.count
        self.links[self.count] = Link(node, to, self.reigns[to], self.lives[node])
        self.step(f"a{node}", ag.Connected())

    def leave(self, node, how=None):
        """An agent's stream is over. `how`: it did not end it itself."""
        self.seeks.pop(node, None)
        number = self.stream.pop(node, None)
        if number is not None:
            self.close(number, up=True)
            self.led.discard(node)
            self.step(f"a{node}", ag.Disconnected("lost"))
            if how is not None:
                self.step(f"e{node}", el.StreamEnded(how))

    def lose(self, number, silent):
        """A coordinator's end is over."""
        link = self.links[number]
        silent_s = LEASE_S if silent else 0.0 if link.well is None else self.now - link.well
        self.close(number, up=False)
        if self.joined.get((link.reign, link.agent)) == number:
            del self.joined[link.reign, link.agent]
            self.tell(link, ev.Lost(f"{link.agent}.{link.life}", "lost", silent_s))

    def tell(self, link, event):
        if self.reigns.get(link.to) == link.reign:
            self.step(f"c{link.to}", event)

    def heard(self, node):
        """When beats of a quorum got through to this coordinator last; NOW: they do. None: it has no quorum."""
        quorum, heard, since = self.cores[f"c{node}"].roster.quorum, {str(node)}, NOW
        links = [link for link in self.links.values() if link.reign == self.reigns[node] and link.accepted]
        for at, key in sorted(((link.well or NOW, str(link.agent)) for link in links), reverse=True):
            if not quorum.enough(heard):
                heard.add(key)
                since = at
        return since if quorum.elected and quorum.enough(heard) else None

    def renew(self):
        """Beats are answered where they get through. A quorum that is with one coordinator is with no other."""
        at = {node: self.heard(node) for node in self.valid}
        for node, since in at.items():
            if since is not None:
                self.valid[node] = max(self.valid[node], min(since, self.now) + KEEPS_S)
        hold = [node for node in at if at[node] == NOW and self.cores[f"c{node}"].ending.end is None]
        if len(hold) > 1:
            raise Broken(f"nodes {hold} have a quorum at one time")
        for node in self.led:
            link = self.links[self.stream[node]]
            if link.well is None:
                until = self.valid.get(node, 0.0) if link.to == node else self.now + KEEPS_S
                self.lease[node] = max(self.lease[node], until)
