"""The records that programs exchange and cores decide on: plain, frozen, comparable, without behaviour.

Units are in the names; times are monotonic seconds of one host and never leave it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class FaultKind(str, Enum):
    """What happened to a rank or node, from the point of view of whoever noticed it."""

    EXIT = "exit"  # the worker ended by itself with a non-zero code
    SIGNAL = "signal"  # the worker was ended by a signal that was not ours
    HANG = "hang"  # its rank monitor killed it: no sign of life within a timeout
    SPAWN = "spawn"  # it could not be started at all
    UNKILLABLE = "unkillable"  # it did not end after SIGKILL (D state)
    NODE_LOST = "node-lost"  # its agent's stream broke or went silent


@dataclass(frozen=True, slots=True)
class Node:
    """One life of one agent. A node that comes back is a new `Node` with the same `infra_rank`."""

    node_id: str  # unique per agent life
    infra_rank: int  # the order Slurm gave us; -1 = nobody gave one
    host: str  # for people, logs and the first cause
    addr: str  # where the other nodes reach it (MASTER_ADDR); "" = as the coordinator sees it
    nproc: int  # workers it runs, >= 1
    order: tuple[int, ...] = ()  # position in the network topology, sorted before infra_rank


@dataclass(frozen=True, slots=True)
class RankFault:
    """Why one rank (or, with `rank` -1, one node) failed."""

    kind: FaultKind
    host: str
    infra_rank: int
    rank: int = -1  # global rank in the plan of that cycle
    local_rank: int = -1
    pid: int = 0
    exit_code: int = 0  # as subprocess reports it: negative = ended by that signal
    message: str = ""  # one sentence
    traceback: str = ""  # from torchelastic's error file, or the tail of its stderr
    log: str = ""  # path of the stderr file on that node


@dataclass(frozen=True, slots=True)
class Running:
    """What an agent that (re-)registers has going on, so that a new coordinator can carry on."""

    term: int
    cycle: int
    group_rank: int
    active_nodes: int
    succeeded: bool = False


# --- agent -> coordinator -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Register:
    """First message of an agent on every stream."""

    node: Node
    port: int  # a port bound by this agent, offered as MASTER_PORT should it become group rank 0
    running: Running | None = None
    last_cycle: int = -1  # highest cycle this agent has seen a plan of
    restarts_used: int = 0  # of that plan


@dataclass(frozen=True, slots=True)
class Failed:
    """Ranks of this node failed; the agent already stops the others."""

    term: int
    cycle: int
    faults: tuple[RankFault, ...]


@dataclass(frozen=True, slots=True)
class Succeeded:
    """All workers of this node ended with 0."""

    term: int
    cycle: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """No worker of that cycle is left on this node; it is ready for the next plan."""

    term: int
    cycle: int
    port: int


@dataclass(frozen=True, slots=True)
class EndJob:
    """This agent was told (by Slurm or a person) to end the job."""

    code: int
    reason: str


# --- coordinator -> agent -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """Who does what in a cycle, from the point of view of one member.

    The shared part is equal for all members; `group_rank` and `rank_offset` are the receiver's own, -1 for spares.
    """

    term: int
    cycle: int
    restarts_used: int
    max_restarts: int
    active_nodes: int
    world_size: int
    master_addr: str
    master_port: int
    group_rank: int = -1
    rank_offset: int = -1

    @property
    def active(self) -> bool:
        """Whether the receiver runs workers in this cycle (otherwise it is a hot spare)."""
        return self.group_rank >= 0


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the workers of (and before) this cycle and report `Stopped`."""

    term: int
    cycle: int
    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over: stop what runs and exit with `code`."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """This agent is not taken; it exits with `code`."""

    code: int
    reason: str


AgentMessage = Register | Failed | Succeeded | Stopped | EndJob
CoordinatorMessage = Plan | Stop | Finish | Refused
