"""Scenarios of the agent as text, as in `stories`: one node, infra rank 1, with two workers.

    # a fault stops the other worker
    agent running in_step=1            how far it is (see BEGIN), and settings
    exits 0 1     -> STOPPING failed:0(exit:0) signal:15
    exits 1 -15   -> PREPARING prepare:1
    prepared      -> IDLE stopped:1/0

`plan 4 as - term 2`: the plan of cycle 4, as a spare, in term 2; `stop 4`: of cycle 4; `end 143 15`: code and signal.
"""

from nvrx_slurm import types as t
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.machine import Tick

from .samples import a_fault, a_node, a_plan, agent_settings
from .stories import ACTIONS, Story

_RUNNING = ("connects", "prepared", "plan 0")
BEGIN = {
    "new": (),
    "preparing": ("connects",),
    "idle": ("connects", "prepared"),
    "spare": ("connects", "prepared", "plan 0 as -"),
    "running": _RUNNING,
    "stopping": (*_RUNNING, "exits 0 1"),
    "succeeded": (*_RUNNING, "exits 0", "exits 1"),
    "leaving": (*_RUNNING, "signal 15"),
    "ended": ("connects", "lead 1", "prepared", "end 0"),
}
_NAMES = {action: name for name, action in ACTIONS.items()}


class AgentStory(Story):
    """One scenario of an agent."""

    starts = ("agent",)

    def begin(self, word, rest):
        """A fresh agent, brought to where BEGIN says."""
        where, *more = rest.split()
        values = dict(item.split("=") for item in more)
        for name, value in values.items():
            values[name] = t.RestartPolicy(value) if name == "policy" else float(value)
        if where == "ended":
            values["elects"] = True
        self.now, self.said = 0.0, []
        self.core = Agent(a_node(1), agent_settings(**values), 0.0)
        for line in BEGIN[where]:
            event, _, about = line.partition(" ")
            self.tell(event, about)

    def event(self, word, rest):
        """The event that a line means. "woken": a Tick that is too early."""
        number = int(rest[0]) if rest and rest[0].lstrip("-").isdigit() else 0
        second = int(rest[1]) if len(rest) > 1 and rest[1].lstrip("-").isdigit() else 0
        named = dict(zip(rest[1::2], rest[2::2], strict=False))
        group_rank, term = named.get("as", "0"), int(named.get("term", 1))
        everybody, early = "everybody" in rest, "early" in rest
        fault = a_fault(1, code=second, local_rank=number) if second else None
        events = {
            "waits": Tick,
            "woken": Tick,
            "connects": ag.Connected,
            "breaks": lambda: ag.Disconnected("reset"),
            "plan": lambda: a_plan(number, -1 if group_rank == "-" else int(group_rank), term),
            "stop": lambda: t.Stop(term, number, "rank 5 failed", 3.0 if "wait" in rest else 0.0),
            "check": lambda: t.CheckNode(term, number),
            "end": lambda: t.Finish(number, "so it ends", second),
            "lead": lambda: t.Lead(number),
            "counted": lambda: t.Counted(number, t.Account(1.0, 0.0, ())),
            "leave": t.Leave,
            "lease-over": ag.LeaseOver,
            "refuse": lambda: t.Refused(number, "replaced"),
            "gone": lambda: t.RanksGone(number, (5, 6), "lost"),
            "warn": lambda: t.Warn(number, "soon"),
            "idle": ag.Idle,
            "exits": lambda: ag.WorkerExited(number, fault, early, t.Spent(1, term) if "last" in rest else None),
            "hangs": lambda: ag.HangSeen(a_fault(1, t.FaultKind.HANG, -9, number)),
            "collect": lambda: t.Collect(term, number),
            "examine": lambda: t.Examine(term, number),
            "looked": lambda: ag.Inspected(number, (t.RankEvidence(0, 1, "h1"),)),
            "asks": lambda: ag.RankAsked(0, ACTIONS[rest[0]], "too \x1b[31m hot\n"),
            "signal": lambda: ag.Signalled(number, everybody),
            "user": lambda: ag.Warned(number, everybody),
            "prepared": lambda: ag.Prepared(" ".join(rest)),
            "sick": lambda: ag.Sick("GPU 3 needs a reset"),
        }
        return events[word]()

    def effects(self, commands):
        """One word for each command, except `Say`."""
        words = {
            ag.Send: lambda c: _message(c.message),
            ag.StartWorkers: lambda c: f"start:{c.plan.cycle}",
            ag.SignalWorkers: lambda c: f"signal:{c.signum}",
            ag.PassOn: lambda c: f"pass-on:{c.signum}",
            t.Examine: lambda c: f"examine:{c.cycle}",
            ag.InspectRanks: lambda c: f"look:{c.cycle}",
            ag.WarnRanks: lambda c: "warn-ranks",
            ag.PostGone: lambda c: f"post-gone:{c.cycle}({c.ranks[0]})",
            ag.Prepare: lambda c: f"prepare:{c.cycle}" + ("" if c.used else "(unused)"),
            ag.EndHeld: lambda c: "end-held",
            ag.Exit: lambda c: f"exit:{int(c.code)}",
        }
        self.said += [command.reason for command in commands if isinstance(command, ag.Exit)]
        yield from (words[type(command)](command) for command in commands if type(command) in words)


def _message(message):
    if isinstance(message, t.Register):
        plan = f"/{message.plan.cycle}" if message.plan is not None else ""
        faults = "".join(f"!{fault.local_rank}" for fault in message.faults)
        return (
            f"register:{message.doing.value}{plan}{faults}"
            + "(early)" * message.early
            + "(counted)" * bool(message.counted)
        )
    at = f"{message.term}/{message.cycle}" if hasattr(message, "cycle") else ""
    if isinstance(message, t.RanksFailed):
        [fault] = message.faults
        return f"failed:{at}({fault.kind.value}:{fault.local_rank})"
    if isinstance(message, t.Asked):
        return f"asked:{at}({_NAMES[message.action]}:{message.rank})"
    words = {
        t.EndKnown: lambda: "ended",
        t.Hung: lambda: f"hung:{at}({message.fault.local_rank})",
        t.Evidence: lambda: f"evidence:{at}({len(message.ranks_seen)})",
        t.Succeeded: lambda: f"succeeded:{at}" + "(early)" * message.early,
        t.Ready: lambda: f"stopped:{at}",
        t.NodeUnfit: lambda: f"unfit:{at}",
        t.WarnJob: lambda: f"warn-job:{message.signum}",
        t.EndJob: lambda: f"end-job:{message.code}({message.signum})",
    }
    return words[type(message)]()
