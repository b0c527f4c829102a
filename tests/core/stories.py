"""Scenarios of the coordinator as text: what happens, and after `->` the state and all that the coordinator does.

    # a failed rank stops all; the next cycle starts when all have stopped
    running 2 of 3                     two active nodes and a spare; `nodes 2 of 3`: nobody has joined yet
    fails 1       -> STOPPING stop(0,1)
    stops 1                            nothing but the bookkeeping: the state stays, no command
    stops 0       -> RUNNING plan:1/1(0=0 1=1 2=-)
    says restart 1 of 3                the coordinator has said this
    nodes 4 of 6 segment=2 domains=aabbbb    nodes 0 and 1 are in domain a

`joins 1 led=6 term=3 voteless`: its last coordinator, that of term 3, was heard 6 s ago, at least, and told it that it
has no vote.
`loses 1 4`: nothing had been heard from it for 4 s.
Nodes are numbers (infra rank; `1'` is a second life of the agent on node 1); `stops 0,1` is one step for each.
`plan:1/1@2(0=0 2=-)`: the plan of cycle 1 after 1 restart in term 2 for node 0 as group rank 0, for node 2 as a spare.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.attribution.rules import named
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.core.coordinator.status import snapshot, status
from nvrx_slurm.core.machine import Say, Tick
from nvrx_slurm.core.straggler.detector import Slowness, Where
from nvrx_slurm.declared import replace

from .samples import a_fault, a_node, a_plan, coordinator_settings

_WORK = {"computes": (0, 0, 0, 9999, 0, 0)}
ACTIONS = dict(zip(("continue", "exclude", "shutdown"), t.WorkloadAction, strict=True))
_AS = re.compile(r"(\w+) as (-|\d+) of (\d+) in (\d+)(?: used (\d+))?(?: excluded (\S+))?( early)?( fault)?")


def stories(path):
    """Title and lines of each scenario in a file."""
    for block in path.read_text().split("\n# ")[1:]:
        title, *lines = block.splitlines()
        yield title, [line for line in lines if line.strip()]


def scenarios(folder):
    """The scenarios of all files in `folder`: "FILE: TITLE" and lines."""
    return [(f"{path.stem}: {title}", lines) for path in sorted(folder.glob("*.txt")) for title, lines in stories(path)]


SCENARIOS = Path(__file__).parent / "scenarios"


class Story:
    """One scenario that is being played."""

    starts: tuple[str, ...] = ("nodes", "running", "electing")  # words of the lines that make a fresh core

    def __init__(self):
        self.now = 0.0
        self.said = []
        self.domains = ""  # of node 0, 1, ...
        self.checks_by_hand = False
        self.core: Any

    def play(self, lines):
        """Play all lines; raises AssertionError with what is different."""
        for line in lines:
            told, _, expected = (part.strip() for part in line.partition("->"))
            word, _, rest = told.partition(" ")
            if word == "says":
                assert any(rest in text for text in self.said), f"{rest!r} is not said, but {self.said}"
            elif word == "resumes":
                assert self.core.job.assignment.shared.history.resume_from == rest
            elif word in self.starts:
                self.begin(word, rest)
            else:
                before = self.core.state
                nodes, space, more = rest.partition(" ")
                done = [self.tell(word, node + space + more) for node in nodes.split(",")]
                did = " ".join([self.core.state.name, *(what for one in done for what in one)])
                assert did == (expected or before.name), f"{told}: {did}"

    def begin(self, word, rest):
        """A fresh coordinator; with "running" all nodes have joined. `rest`: "2 of 3" and settings as NAME=VALUE."""
        running = word == "running"
        least, _, most, *more = rest.split()
        settings = coordinator_settings(
            min_nodes=int(least), max_nodes=int(most), max_restarts=3, expected=tuple(f"h{i}" for i in range(int(most)))
        )
        limits = set(RestartLimits.__struct_fields__)
        for name, _, value in (item.partition("=") for item in more):
            if name == "domains":
                self.domains = value
                continue
            if name == "checks":  # by-hand: the story tells of preflights of spares; else they pass at once
                self.checks_by_hand = True
                continue
            kind = {"policy": t.RestartPolicy, "last_leader": str}.get(name, float if name.endswith("_s") else int)
            typed = kind(value)
            if name in limits:
                settings = replace(settings, limits=replace(settings.limits, **{name: typed}))
            else:
                settings = replace(settings, **{name: typed})
        if word == "electing":
            known = tuple(map(peer, range(int(most))))
            if settings.one_life:  # nobody has met them
                known = tuple(replace(one, port=0) for one in known)
            settings = replace(settings, peer=peer(0), electors=settings.max_nodes, known=known)
        self.core = Coordinator(settings, 0.0)
        for rank in range(int(most) if running else 0):
            self.tell("joins", str(rank))
        assert self.core.state.name == {"running": "RUNNING", "electing": "ELECTING"}.get(word, "JOINING")

    def tell(self, word, rest):
        """Let one thing happen; returns what was done."""
        if (word, rest) == ("waits", "never"):
            assert self.core.deadline() is None
            return []
        if word == "waits":
            deadline = self.core.deadline()
            assert deadline is not None, "the core waits for nothing"
            self.now = max(self.now, deadline)
            assert f"{self.now:g}" == rest, f"waits until {self.now:g}"
        elif word == "tick":
            self.now = max(self.now, self.core.deadline() or 0.0)
        elif word == "sleeps":
            self.now += float(rest)
            return []
        commands = self.core.step(self.event(word, rest.split()), self.now)
        if not self.checks_by_hand:
            commands = self._with_checks(commands)
        self.core.validate()
        if isinstance(self.core, Coordinator):  # whatever happens, it can be told
            told = status(self.core, self.now, self.now, 1e9) | snapshot(self.core)()
            assert len(json.dumps(told)) < 1 << 18
        self.said += [command.text for command in commands if isinstance(command, Say)]
        return list(self.effects(commands))

    def _with_checks(self, commands):
        """Spares that are told to check their nodes are ready at once; the story does not see it."""
        checks = [one for one in commands if isinstance(one, ev.SendTo) and isinstance(one.message, t.CheckNode)]
        seen = [one for one in commands if one not in checks]
        for check in checks:
            port = 2000 + int(check.node_id[1:].partition(".")[0])
            ready = t.Ready(check.message.term, check.message.cycle, port)
            seen += self._with_checks(self.core.step(ev.FromAgent(check.node_id, ready), self.now))
        return seen

    def event(self, word, rest):
        """The event that a line means."""
        if word in ("waits", "tick"):
            return Tick()
        if word == "slow":  # ranks as 2+3, cycle, what is slow, windows so far
            return self._slow([int(one) for one in rest[0].split("+") if one != "-"], int(rest[1]), *rest[2:])
        return self._answered(word, rest) or self._of_node(word, rest)

    def _answered(self, word, rest):
        """What the shell has read, or been told; None: the line means something else."""
        if word == "time":
            return ev.TimeLeftRead(None if rest[0] == "?" else float(rest[0]))
        if word == "progress":
            return ev.ProgressRead(int(rest[0]), None if rest[1] == "?" else int(rest[1]))
        if word == "finds":
            found = (int(one) for one in rest if one != "?")
            return ev.CheckpointsFound(tuple(ev.Resumable(one, f"/iter_{one}", 5.0) for one in found))
        if word == "reached":
            return ev.ReachedRead(int(rest[0]), -1 if rest[1] == "?" else int(rest[1]))
        if word == "advises":
            return ev.Advised(int(rest[0]), rest[1] == "stop", " ".join(rest[1:]))
        if word == "counted":
            costs = (t.CycleCost(int(rest[0]), 0.0, float(rest[1])),) if rest else ()  # a cycle, seconds recomputed
            return t.Counted(0, t.Account(1.0, 0.0, ()), costs)
        if word == "raised":
            return ev.Raised(int(rest[0]))
        return None

    def _of_node(self, word, rest):
        rank, life = int(rest[0].rstrip("'")), rest[0].count("'")
        if word == "dead":
            return ev.ProvenDead(self.core.roster.quorum.probed.get(str(rank), peer(rank)), tuple(rest[2:]))
        node_id = f"h{rank}.{life}"
        if word == "joins":
            words = [word for word in rest[1:] if word != "voteless" and not word.startswith(("led=", "term="))]
            message = _register(rank, life, " ".join(words), self.domains[rank : rank + 1])
            led_s = max((float(word[4:]) for word in rest if word.startswith("led=")), default=-1.0)
            term = max((int(word[5:]) for word in rest if word.startswith("term=")), default=0)
            return ev.Joined(replace(message, votes="voteless" not in rest, led_s=led_s, led_term=term))
        if word == "loses":
            return ev.Lost(node_id, "connection reset", float(rest[1]) if len(rest) > 1 else 0.0)
        cycle = int(rest[1]) if len(rest) > 1 and rest[1].isdigit() else 0
        messages = {
            "fails": lambda: t.RanksFailed(1, cycle, _faults(rank, rest)),
            "hung": lambda: t.Hung(1, cycle, a_fault(rank, t.FaultKind.HANG)),
            "doubts": lambda: t.Hung(1, cycle, a_fault(rank, t.FaultKind.HANG), doubted=True),
            "sees": lambda: t.Evidence(1, cycle, _evidence(rank, rest[1:])),
            "examined": lambda: t.Examined(1, cycle, "GPU 3 is held down"),
            "spent": lambda: t.Spent(1, cycle, 0.25, 1.0, 0.5, saved_s=1.0, reached=7),
            "succeeds": lambda: t.Succeeded(1, cycle, "early" in rest),
            "stops": lambda: t.Ready(1, cycle, 2000 + rank),
            "cold": lambda: t.Warmth((), "its template still imports"),
            "loaded": lambda: t.Loaded(cycle, int(rest[2]), "memory", 0.5, "iteration 4 is loaded from memory"),
            "warm": lambda: t.Warmth(("torch",)),
            "offers": lambda: t.Ready(0, 0, 2000 + rank),
            "knows": lambda: t.EndKnown(),
            "ends": lambda: t.EndJob(143, "got signal 15"),
            "warns": lambda: t.WarnJob(cycle, "soon"),
            "asks": lambda: t.Asked(1, 0, ACTIONS[rest[1]], 2 * rank, "too hot"),
            "unfit": lambda: t.NodeUnfit(0, 0, "GPU 3 is lost"),
        }
        message = messages[word]()
        return ev.FromAgent(node_id, message)

    def _slow(self, ranks, cycle, where="rank", windows="1"):
        places = {rank: self.core.job.assignment.node_of(rank).partition(".")[0] for rank in ranks}
        hosts = tuple(dict.fromkeys(places.values()))
        found = Slowness(Where(where), tuple(ranks), hosts, 0.2, 0.15) if ranks or where == "all" else None
        return ev.SlowSeen(cycle, found, int(windows))

    def effects(self, commands):
        """What was done, one word each; what is said and the closing of streams are left out."""
        return effects(commands)


def peer(rank):
    """Where the agent on a node listens."""
    return t.Peer(str(rank), f"h{rank}", f"10.0.0.{rank}", 7000)


def _faults(rank, rest):
    """Of its first rank, unless "local=1" says otherwise. "rule=NAME": what its output says, equal for equal names.
    "node=NAME": of which node its line tells."""
    told = dict(word.split("=") for word in rest if "=" in word)
    kind = t.FaultKind(told.get("kind", "hang" if "hang" in rest else "exit"))
    fault = a_fault(rank, kind, int(told.get("code", 1)), int(told.get("local", 0)))
    if name := told.get("rule"):
        s = named(name) or named("not-finite")
        sure = t.Confidence(told.get("sure", s.confidence))
        finding = t.Finding(name, s.role, s.blame, sure, s.remedy, name, node=told.get("node", ""))
        fault = replace(fault, finding=finding)
    if "raised" in rest:
        fault = replace(fault, traceback="Traceback (most recent call last):")
    return () if "empty" in rest else (fault,)


def _evidence(rank, doing):
    """Of the two ranks of a node: "waits", "loads" or "computes" for each; none: it has none."""
    frames = {"waits": "/x/site-packages/torch/distributed/c10d.py:1 in barrier", "loads": "/w/train.py:9 in load"}
    frames["computes"] = "/w/train.py:8 in evaluate"
    return tuple(
        t.RankEvidence(2 * rank + local, rank, f"h{rank}", "S", frames=(frames[what],), work=_WORK.get(what, (0,) * 6))
        for local, what in enumerate(what for what in doing if what in frames)
    )


def _register(rank, life, rest, domain):
    """`rest`: "", "preparing", or what the agent does with which plan ("running as 1 of 2 in 4 used 1")."""
    node, port = a_node(rank, life, domain=domain), 1000 + rank
    if rest == "ended":
        return t.Register(node, port, None, t.Activity.ENDED, end=t.Finish(1, "so it ends"))
    if rest in ("", "preparing"):
        return t.Register(node, port, None, t.Activity(rest or "idle"))
    rest, peers = rest.removesuffix(" peers"), rest.endswith(" peers")  # the plan of a job of three nodes, led by 0
    match = _AS.fullmatch(rest)
    assert match is not None, rest
    doing, group_rank, active, cycle, used, excluded, early, fault = match.groups()
    plan = a_plan(int(cycle), -1 if group_rank == "-" else int(group_rank), 1, int(active), int(used) if used else None)
    if peers:
        plan = replace(plan, leader=peer(0), successors=(peer(1), peer(2)), electors=3)
    if excluded:
        plan = replace(plan, history=replace(plan.history, excluded=tuple(excluded.split(","))))
    return t.Register(node, port, plan, t.Activity(doing), (a_fault(rank),) if fault else (), bool(early))


def effects(commands):
    """What was done, one word each; what is said and the closing of streams are left out."""
    sent = {}
    for command in commands:
        if isinstance(command, ev.SendTo):
            host, _, life = command.node_id.removeprefix("h").partition(".")
            what, own = _message(command.message)
            sent.setdefault(what, []).append(host + "'" * int(life) + own)
    yield from (f"{what}({' '.join(sorted(to))})" for what, to in sent.items())
    yield from (_WORDS[type(command)](command) for command in commands if type(command) in _WORDS)


def _caused(command):
    return f"({command.cause.kind.value})" if command.cause else ""


_WORDS = {
    ev.AskTimeLeft: lambda command: "ask-time",
    ev.Probe: lambda command: f"probe:{command.peer.key}",
    ev.Won: lambda command: "won",
    ev.Lapsed: lambda command: "lapsed",
    ev.CycleBegan: lambda command: f"began:{command.cycle}",
    ev.CycleOver: lambda command: f"over:{command.cycle}{_caused(command)}",
    ev.HangFound: lambda command: f"hang:{','.join(str(culprit.rank) for culprit in command.culprits)}",
    ev.Strike: lambda command: f"strike:{command.host}",
    ev.ReadProgress: lambda command: f"read-progress:{command.cycle}",
    ev.JobOver: lambda command: f"done:{int(command.code)}{_caused(command)}",
}


def _message(message):
    """A message as a word for all receivers, and what is the receiver's own."""
    if isinstance(message, t.Plan):
        group_rank = str(message.group_rank) if message.active else "-"
        term = f"@{message.term}" if message.term > 1 else ""
        term += "" if message.forked else "!"
        before = f"<{message.history.resume_before}" if message.history.resume_before >= 0 else ""
        return f"plan:{message.cycle}/{message.history.restarts_used}{before}{term}", f"={group_rank}"
    kinds = {
        t.Stop: lambda: "stop",
        t.CheckNode: lambda: "check",
        t.Collect: lambda: "collect",
        t.Examine: lambda: "examine",
        t.Lead: lambda: f"lead:{message.term}" + "-" * (not message.votes),
        t.Elsewhere: lambda: f"again:{message.term}",
        t.Leave: lambda: "leave",
        t.Finish: lambda: f"end:{int(message.code)}",
        t.Refused: lambda: "refuse",
        t.Warn: lambda: f"warn:{message.signum}",
        t.RanksGone: lambda: "gone:" + ",".join(map(str, message.ranks)),
    }
    return kinds[type(message)](), ""


# how each state is reached
REACHED = {
    "ELECTING": ["electing 1 of 3", "joins 0"],
    "JOINING": ["nodes 2 of 2", "joins 0"],
    "LAST_CALL": ["nodes 1 of 2", "joins 0"],
    "TAKEOVER": ["nodes 2 of 2 term=2", "joins 0 running as 0 of 2 in 4"],
    "PAUSED": ["running 1 of 1", "fails 0", "stops 0", "fails 0 1", "stops 0 1"],
    "RUNNING": ["running 1 of 2"],
    "LAST_RANKS": ["running 1 of 2 policy=min-healthy", "fails 1", "succeeds 0"],
    "STOPPING": ["running 1 of 2 tracks_progress=1", "fails 0"],
    "SCORING": ["running 1 of 1 tracks_progress=1", "fails 0", "stops 0"],
    "FINISHED": ["running 1 of 1", "ends 0"],
    "RETURNING": ["running 1 of 1 max_restarts=0", "loses 0"],
    "CLOSED": ["nodes 1 of 1", "ends 0"],
}
ANYTHING = (
    *("joins 0", "joins 0'", "joins 1", "joins 1 running as 0 of 1 in 9 excluded 0@h0", "loses 0", "loses 1"),
    *("fails 0", "fails 1", "succeeds 0", "stops 0", "stops 0 9", "stops 1", "asks 0 continue", "asks 0 exclude"),
    *("asks 0 shutdown", "warns 0 10", "ends 0", "time 100", "time ?", "progress 0 5", "progress -1 5", "tick"),
    *("unfit 0", "unfit 1", "joins 1 ended", "dead 1", "raised 9", "knows 0", "advises 0 stop", "hung 0", "sees 0"),
    *("spent 0", "finds 300 200", "counted", "slow 0 0", "slow - 0", "examined 0", "warm 0", "loaded 0 0 4"),
)


def come_to(state, settings=""):
    """A coordinator in that state."""
    story = Story()
    for line in REACHED[state]:
        word, _, rest = line.partition(" ")
        if word in story.starts:
            story.begin(word, rest + settings)
        else:
            story.tell(word, rest)
    assert story.core.state.name == state
    return story


def out_of_time(state):
    """The allocation ends in that state: by what Slurm says, and by the clock."""
    for left_s, then in (("1", ()), ("2.1", ("tick",))):
        story = come_to(state, " time_limited=1 stop_before_end_s=2")
        for word, rest in (("time", left_s), *((word, "") for word in then)):
            story.tell(word, rest)
        assert story.core.ending.end is not None


def anything_in(state):
    """Each event, each on a fresh coordinator in that state."""
    for line in ANYTHING:
        word, _, rest = line.partition(" ")
        come_to(state).tell(word, rest)
