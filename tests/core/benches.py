"""A coordinator and an agent on the bench: tests say what happens, in words, and look at what the core answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job.agent import Agent
from nvrx_slurm.core.job.agent_events import AgentSettings
from nvrx_slurm.core.machine import Machine, Say, Tick


class Bench:
    """A core, and the time, which only a test moves."""

    core: Machine

    def __init__(self) -> None:
        self.now = 0.0
        self.commands: list[Any] = []  # of the last event
        self.said: list[str] = []  # everything, ever

    def tell(self, event: Any) -> None:
        """Hand an event to the core."""
        self.commands = self.core.step(event, self.now)
        self.said += [command.text for command in self.commands if isinstance(command, Say)]

    def wait(self) -> None:
        """Until the core's next deadline, which comes."""
        deadline = self.core.deadline()
        assert deadline is not None, "the core waits for nothing"
        self.now = max(self.now, deadline)
        self.tell(Tick())

    def did(self, kind: type) -> list[Any]:
        """The commands of that kind, of the last event."""
        return [command for command in self.commands if isinstance(command, kind)]

    @property
    def state(self) -> str:
        """Its name."""
        return self.core.state.name


def a_node(rank: int, life: int = 0, nproc: int = 2) -> t.Node:
    """The agent's `life` on the host with that infra rank."""
    return t.Node(f"h{rank}.{life}", rank, f"h{rank}", f"10.0.0.{rank}", nproc)


def a_fault(rank: int, kind: t.FaultKind = t.FaultKind.EXIT, code: int = 1, local_rank: int = 0) -> t.RankFault:
    """Of a worker on the host with infra rank `rank`."""
    return t.RankFault(kind, f"h{rank}", rank, 2 * rank + local_rank, local_rank, 4711, code, "boom")


def a_plan(cycle: int = 0, group_rank: int = 0, term: int = 1, active: int = 2, used: int | None = None) -> t.Plan:
    """Nodes with two workers each; group_rank -1 = for a spare."""
    offset = 2 * group_rank if group_rank >= 0 else -1
    history = t.History(cycle if used is None else used)
    return t.Plan(term, cycle, history, 3, active, 2 * active, "10.0.0.0", 1000, group_rank, offset)


class AgentBench(Bench):
    """One agent with two workers, on infra rank 1."""

    core: Agent

    def __init__(self, has_preflight: bool = False, connected: bool = True, **settings: Any) -> None:
        """`connected`: it has a coordinator. Without `has_preflight` each preflight passes at once."""
        super().__init__()
        self.core = Agent(a_node(1), replace(AgentSettings(), **settings), 0.0)
        self._passes = not has_preflight
        if connected:
            self.tell(ag.Connected())
        if self._passes:
            self.tell(ag.Prepared())

    def tell(self, event: Any) -> None:
        """Hand an event to the core."""
        super().tell(event)
        if self._passes and self.did(ag.Prepare):
            before = self.commands
            super().tell(ag.Prepared())
            self.commands = [c for c in before if not isinstance(c, ag.Prepare)] + self.commands

    @classmethod
    def running(cls, **settings: Any) -> AgentBench:
        """It is connected and runs cycle 0 as group rank 0."""
        bench = cls(**settings)
        bench.tell(ag.Connected())
        bench.tell(a_plan())
        assert bench.state == "RUNNING"
        return bench

    @classmethod
    def stopping(cls, **settings: Any) -> AgentBench:
        """One worker has failed, the other one is being stopped."""
        bench = cls.running(**settings)
        bench.exits(0, code=1)
        assert bench.state == "STOPPING"
        return bench

    @classmethod
    def succeeded(cls) -> AgentBench:
        """Both workers have ended well."""
        bench = cls.running()
        bench.exits(0)
        bench.exits(1)
        assert bench.state == "SUCCEEDED"
        return bench

    @classmethod
    def leaving(cls) -> AgentBench:
        """It got SIGTERM and is stopping both workers."""
        bench = cls.running()
        bench.tell(ag.Signalled(15))
        assert bench.state == "LEAVING"
        return bench

    def exits(self, local_rank: int, code: int = 0) -> None:
        """A worker ends."""
        fault = a_fault(1, code=code, local_rank=local_rank) if code else None
        self.tell(ag.WorkerExited(local_rank, fault))

    def asks(self, action: t.WorkloadAction) -> None:
        """Its first worker asks for something."""
        self.tell(ag.RankAsked(0, action, "too hot"))

    def hangs(self, local_rank: int) -> None:
        """A monitor reports a hang."""
        self.tell(ag.HangSeen(a_fault(1, t.FaultKind.HANG, -9, local_rank)))

    # --- what the last event led to ------------------------------------------------------------------------

    def sent(self) -> list[t.AgentMessage]:
        """Messages to the coordinator."""
        return [command.message for command in self.did(ag.Send)]

    def started(self) -> list[int]:
        """Cycles that were started."""
        return [command.plan.cycle for command in self.did(ag.StartWorkers)]

    def signals(self) -> list[int]:
        """Signals to the workers."""
        return [command.signum for command in self.did(ag.SignalWorkers)]

    def exit(self) -> ag.Exit | None:
        """How it ended, if it did."""
        return next(iter(self.did(ag.Exit)), None)
