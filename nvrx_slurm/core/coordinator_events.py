"""What the coordinator is told (events) and what it asks for (commands). `Tick` and `Say` are in `core.machine`."""

from __future__ import annotations

from dataclasses import dataclass

from nvrx_slurm.types import (
    CoordinatorMessage,
    EndJob,
    Failed,
    RankFault,
    Register,
    Stopped,
    Succeeded,
)

# --- events: messages of agents with who sent them ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """An agent registered on a fresh stream."""

    message: Register


@dataclass(frozen=True, slots=True)
class Lost:
    """The stream of an agent broke or went silent."""

    node_id: str
    why: str


@dataclass(frozen=True, slots=True)
class GotFailed:
    """`Failed` from `node_id`."""

    node_id: str
    message: Failed


@dataclass(frozen=True, slots=True)
class GotSucceeded:
    """`Succeeded` from `node_id`."""

    node_id: str
    message: Succeeded


@dataclass(frozen=True, slots=True)
class GotStopped:
    """`Stopped` from `node_id`."""

    node_id: str
    message: Stopped


@dataclass(frozen=True, slots=True)
class GotEndJob:
    """`EndJob` from `node_id`."""

    node_id: str
    message: EndJob


FROM_AGENT: dict[type, type] = {Failed: GotFailed, Succeeded: GotSucceeded, Stopped: GotStopped, EndJob: GotEndJob}


# --- commands ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendTo:
    """Push a message down the stream of one agent."""

    node_id: str
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Drop:
    """Close the stream of one agent (after what was sent before)."""

    node_id: str


@dataclass(frozen=True, slots=True)
class Done:
    """The job is over and nobody is left: print the first cause, exit with `code`."""

    code: int
    reason: str
    cause: RankFault | None
