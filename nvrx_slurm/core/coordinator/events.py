"""What the coordinator is told (events) and what it asks for (commands). `Tick` and `Say` are in `core.machine`."""

from __future__ import annotations

from typing import Generic, TypeVar

from nvrx_slurm import types as t
from nvrx_slurm.core.straggler.detector import Slowness
from nvrx_slurm.frozen import frozen

Message = TypeVar("Message", bound=t.AgentMessage, covariant=True)


@frozen
class Joined:
    """An agent registered on a fresh stream."""

    message: t.Register


@frozen
class Lost:
    """The stream of an agent broke or went silent."""

    node_id: str
    why: str
    silent_s: float = 0.0  # how long ago it was heard last; for the length of a lease: its ranks are gone


@frozen
class ProvenDead:
    """The agent that a `Probe` asked for is dead: its host answered that nothing listens there, or that another
    agent does; or Slurm says that the node is down."""

    peer: t.Peer


@frozen
class Raised:
    """Before the election is won: stand for this later term."""

    term: int


@frozen
class FromAgent(Generic[Message]):
    """A later message from `node_id`. The coordinator's table knows it by the type of the message."""

    node_id: str
    message: Message


# --- events: answers of our own program -----------------------------------------------------------------


@frozen
class TimeLeftRead:
    """Answer to `AskTimeLeft`: seconds until the allocation ends; None = unknown."""

    left_s: float | None


@frozen
class ProgressRead:
    """Answer to `ReadProgress`: the iteration of the last checkpoint; None = the file could not be read."""

    cycle: int
    iteration: int | None


@frozen
class Resumable:
    """A complete checkpoint."""

    iteration: int
    path: str
    age_s: float  # since its last file was written, by the file system's clock


@frozen
class CheckpointsFound:
    """What --ft-checkpoint-dir holds has changed, or is known for the first time; newest first, at most 4."""

    saved: tuple[Resumable, ...]


@frozen
class ReachedRead:
    """Answer to `ReadReached`: the last iteration that the output of the cycle's ranks tells; -1 = none."""

    cycle: int
    iteration: int


@frozen
class Advised:
    """An attribution service has answered about a cycle. Its text is not trusted, but printable and on one line."""

    cycle: int
    stop: bool  # another try would end the same way
    text: str  # action, reason and source, at most 600 characters


@frozen
class SlowSeen:
    """What is slow in a window of this cycle; None: nothing is. `windows`: how many have ended in the cycle."""

    cycle: int
    found: Slowness | None
    windows: int


ANSWERS = (TimeLeftRead, ProgressRead, CheckpointsFound, ReachedRead, Advised)


# --- inner events: what one handler leaves to the next -------------------------------------------------------------


@frozen
class Known:
    """An agent has registered and is a member; nothing can be planned with it yet."""

    message: t.Register


@frozen
class Arrived:
    """This member may be planned with, if it runs nothing."""

    message: t.Register


@frozen
class Left:
    """A member is gone and removed; `fault` says why."""

    node: t.Node
    fault: t.RankFault


@frozen
class Available:
    """A member has become ready: no worker is left on its node, which has passed its preflight."""

    node_id: str


@frozen
class Cleared:
    """Ranks that may have run elsewhere are gone."""


@frozen
class Review:
    """Something has changed: can the next cycle be planned, or is the one that runs done?"""


@frozen
class Timer:
    """The deadline of the state itself has come."""


# --- commands ------------------------------------------------------------------------------------------


@frozen
class SendTo:
    """Push a message down the stream of one agent."""

    node_id: str
    message: t.CoordinatorMessage


@frozen
class Probe:
    """Find out whether the agent that listened there is dead; if so, `ProvenDead` follows. Silence gets no answer."""

    peer: t.Peer


@frozen
class Won:
    """This coordinator has a quorum."""


@frozen
class Lapsed:
    """This coordinator has lost its quorum and must not act any more; it gets no further events."""

    why: str


@frozen
class Drop:
    """Close the stream of one agent (after what was sent before)."""

    node_id: str


@frozen
class AskTimeLeft:
    """Find out how long the allocation lasts and post `TimeLeftRead`."""


@frozen
class ReadProgress:
    """Read the checkpoint iteration file and post `ProgressRead` with the same cycle; -1 = before the first one.

    Where checkpoints are watched, `CheckpointsFound` comes before that."""

    cycle: int


@frozen
class ReadReached:
    """Read in the logs of the first and the last rank how far a cycle got, and post `ReachedRead`."""

    cycle: int


@frozen
class Strike:
    """For the file of strikes: a failure stayed away since this host does not run its ranks."""

    host: str
    why: str


@frozen
class CycleBegan:
    """A cycle runs, or was taken over. For attribution and the files of cycles."""

    cycle: int


@frozen
class CycleOver:
    """No worker of the cycle is left, or the end of the job is decided. `cause`: None = no fault."""

    cycle: int
    lasted_s: float
    cause: t.RankFault | None


@frozen
class HangFound:
    """For the log tree: what all ranks of a cycle did when one of them hung, and what that says."""

    cycle: int
    why: str
    culprits: tuple[t.RankEvidence, ...]
    ranks: tuple[t.RankEvidence, ...]


@frozen
class JobOver:
    """The job is over and no agent is left: print the first cause and exit with `code`."""

    code: int
    reason: str
    cause: t.RankFault | None
    report: t.JobReport = t.JobReport()
