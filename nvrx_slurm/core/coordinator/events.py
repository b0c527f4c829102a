"""What the coordinator is told (events) and what it asks for (commands). `Tick` and `Say` are in `core.machine`."""

from __future__ import annotations

from typing import Generic, TypeVar

from nvrx_slurm import types as t
from nvrx_slurm.core.straggler.detector import Slowness
from nvrx_slurm.declared import Record

Message = TypeVar("Message", bound=t.AgentMessage, covariant=True)


class Joined(Record):
    """An agent registered on a fresh stream."""

    message: t.Register


class Lost(Record):
    """The stream of an agent broke or went silent."""

    node_id: str
    why: str
    # how long ago it was heard last; for the length of a lease: its ranks are gone
    silent_s: float = 0.0


class ProvenDead(Record):
    """The agent that a `Probe` asked for is dead: its host answered that nothing listens there, or that another
    agent does; or Slurm says that the node is down."""

    peer: t.Peer
    # keys of members that have not been heard for MEMBER_SHARE of a lease: they may have voted for another node
    unheard: tuple[str, ...] = ()


class Raised(Record):
    """Before the election is won: stand for this later term."""

    term: int


class FromAgent(Record, Generic[Message]):
    """A later message from `node_id`. The coordinator's table knows it by the type of the message."""

    node_id: str
    message: Message


# --- events: answers of our own program -----------------------------------------------------------------


class TimeLeftRead(Record):
    """Answer to `AskTimeLeft`: seconds until the allocation ends; None = unknown."""

    left_s: float | None


class ProgressRead(Record):
    """Answer to `ReadProgress`: the iteration of the last checkpoint; None = the file could not be read."""

    cycle: int
    iteration: int | None


class Resumable(Record):
    """A complete checkpoint."""

    iteration: int
    path: str
    age_s: float  # since its last file was written, by the file system's clock


class CheckpointsFound(Record):
    """What --ft-checkpoint-dir holds has changed, or is known for the first time; newest first, at most 4."""

    saved: tuple[Resumable, ...]


class ReachedRead(Record):
    """Answer to `ReadReached`: the last iteration that the output of the cycle's ranks tells; -1 = none."""

    cycle: int
    iteration: int


class Advised(Record):
    """An attribution service has answered about a cycle. Its text is not trusted, but printable and on one line."""

    cycle: int
    stop: bool  # another try would end the same way
    text: str  # action, reason and source, at most 600 characters


class SlowSeen(Record):
    """What is slow in a window of this cycle; None: nothing is. `windows`: how many have ended in the cycle."""

    cycle: int
    found: Slowness | None
    windows: int


ANSWERS = (TimeLeftRead, ProgressRead, CheckpointsFound, ReachedRead, Advised)


# --- inner events: what one handler leaves to the next -------------------------------------------------------------


class Known(Record):
    """An agent has registered and is a member; nothing can be planned with it yet."""

    message: t.Register


class Arrived(Record):
    """This member may be planned with, if it runs nothing."""

    message: t.Register


class Left(Record):
    """A member is gone and removed; `fault` says why."""

    node: t.Node
    fault: t.RankFault

    @property
    def node_id(self) -> str:
        """Which life of its agent."""
        return self.node.node_id


class Available(Record):
    """A member has become ready: no worker is left on its node, which has passed its preflight."""

    node_id: str


class Cleared(Record):
    """Ranks that may have run elsewhere are gone."""


class Review(Record):
    """Something has changed: can the next cycle be planned, or is the one that runs done?"""


class Timer(Record):
    """The deadline of the state itself has come."""


# --- commands ------------------------------------------------------------------------------------------


class SendTo(Record):
    """Push a message down the stream of one agent."""

    node_id: str
    message: t.CoordinatorMessage


class Probe(Record):
    """Find out whether the agent that listened there is dead; if so, `ProvenDead` follows. Silence gets no answer."""

    peer: t.Peer


class Won(Record):
    """This coordinator has a quorum."""


class Lapsed(Record):
    """This coordinator has lost its quorum and must not act any more; it gets no further events."""

    why: str


class Drop(Record):
    """Close the stream of one agent (after what was sent before)."""

    node_id: str


class AskTimeLeft(Record):
    """Find out how long the allocation lasts and post `TimeLeftRead`."""


class ReadProgress(Record):
    """Read the checkpoint iteration file and post `ProgressRead` with the same cycle; -1 = before the first one.

    Where checkpoints are watched, `CheckpointsFound` comes before that."""

    cycle: int


class ReadReached(Record):
    """Read in the logs of the first and the last rank how far a cycle got, and post `ReachedRead`."""

    cycle: int


class Strike(Record):
    """For the file of strikes: a failure stayed away since this host does not run its ranks."""

    host: str
    why: str


class CycleBegan(Record):
    """A cycle runs, or was taken over. For attribution and the files of cycles."""

    cycle: int


class CycleOver(Record):
    """No worker of the cycle is left, or the end of the job is decided. `cause`: None = no fault."""

    cycle: int
    lasted_s: float
    cause: t.RankFault | None


class HangFound(Record):
    """For the log tree: what all ranks of a cycle did when one of them hung, and what that says."""

    cycle: int
    why: str
    culprits: tuple[t.RankEvidence, ...]
    ranks: tuple[t.RankEvidence, ...]


class JobOver(Record):
    """The job is over and no agent is left: print the first cause and exit with `code`."""

    code: int
    reason: str
    cause: t.RankFault | None
    report: t.JobReport = t.JobReport()
