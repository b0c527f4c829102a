"""What the coordinator is told (events) and what it asks for (commands). `Tick` and `Say` are in `core.machine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from nvrx_slurm import types as t

Message = TypeVar("Message", bound=t.AgentMessage, covariant=True)


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent registered on a fresh stream."""

    message: t.Register


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream of an agent broke or went silent."""

    node_id: str
    why: str
    silent: bool = False  # nothing was heard from it for the length of a lease, so its ranks are gone


@dataclass(frozen=True, slots=True)
class ProvenDead:
    """The agent that a `Probe` asked for is dead: its host answered that nothing listens there, or that another
    agent does; or Slurm says that the node is down."""

    peer: t.Peer


@dataclass(frozen=True, slots=True)
class Raised:
    """Before the election is won: stand for this later term."""

    term: int


@dataclass(frozen=True, slots=True)
class FromAgent(Generic[Message]):
    """A later message from `node_id`. The coordinator's table knows it by the type of the message."""

    node_id: str
    message: Message


# --- events: answers of our own program -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TimeLeftRead:
    """Answer to `AskTimeLeft`: seconds until the allocation ends; None = unknown."""

    left_s: float | None


@dataclass(frozen=True, slots=True)
class ProgressRead:
    """Answer to `ReadProgress`: the iteration of the last checkpoint; None = the file could not be read."""

    cycle: int
    iteration: int | None


@dataclass(frozen=True, slots=True)
class Advised:
    """An attribution service has answered about a cycle. Its text is not trusted, but printable and on one line."""

    cycle: int
    stop: bool  # another try would end the same way
    text: str  # action, reason and source, at most 600 characters


# --- inner events: what one handler leaves to the next -------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Known:
    """An agent has registered and is a member; nothing can be planned with it yet."""

    message: t.Register


@dataclass(frozen=True, slots=True)
class Arrived:
    """This member may be planned with, if it runs nothing."""

    message: t.Register


@dataclass(frozen=True, slots=True)
class Left:
    """A member is gone and removed; `fault` says why."""

    node: t.Node
    fault: t.RankFault


@dataclass(frozen=True, slots=True)
class Available:
    """A member has become ready: no worker is left on its node, which has passed its preflight."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """Ranks that may have run elsewhere are gone."""


@dataclass(frozen=True, slots=True)
class Review:
    """Something has changed: can the next cycle be planned, or is the one that runs done?"""


@dataclass(frozen=True, slots=True)
class Timer:
    """The deadline of the state itself has come."""


# --- commands ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Push a message down the stream of one agent."""

    node_id: str
    message: t.CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Probe:
    """Find out whether the agent that listened there is dead; if so, `ProvenDead` follows. Silence gets no answer."""

    peer: t.Peer


@dataclass(frozen=True, slots=True)
class Won:
    """This coordinator has a quorum."""


@dataclass(frozen=True, slots=True)
class Lapsed:
    """This coordinator has lost its quorum and must not act any more; it gets no further events."""

    why: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the stream of one agent (after what was sent before)."""

    node_id: str


@dataclass(frozen=True, slots=True)
class AskTimeLeft:
    """Find out how long the allocation lasts and post `TimeLeftRead`."""


@dataclass(frozen=True, slots=True)
class ReadProgress:
    """Read the checkpoint iteration file and post `ProgressRead` with the same cycle; -1 = before the first one."""

    cycle: int


@dataclass(frozen=True, slots=True)
class CycleBegan:
    """A cycle runs, or was taken over. For attribution and the files of cycles."""

    cycle: int


@dataclass(frozen=True, slots=True)
class CycleOver:
    """No worker of the cycle is left, or the end of the job is decided. `cause`: None = no fault."""

    cycle: int
    lasted_s: float
    cause: t.RankFault | None


@dataclass(frozen=True, slots=True)
class HangFound:
    """For the log tree: what all ranks of a cycle did when one of them hung, and what that says."""

    cycle: int
    why: str
    culprits: tuple[t.RankEvidence, ...]
    ranks: tuple[t.RankEvidence, ...]


@dataclass(frozen=True, slots=True)
class JobOver:
    """The job is over and no agent is left: print the first cause and exit with `code`."""

    code: int
    reason: str
    cause: t.RankFault | None
    report: t.JobReport = t.JobReport()
