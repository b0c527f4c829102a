"""The states of an election, what it is told (events) and what it asks for (commands)."""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.declared import Record
from nvrx_slurm.types import Elsewhere, Peer


class Place(Enum):
    """States of an election on one node."""

    SEEKING = "no coordinator: this node tries the candidates in turn"
    FOLLOWING = "registered with another node, which leads"
    STANDING = "this node is the candidate of a term: agents register here"
    LEADING = "this node is the coordinator"


class StreamEnd(Enum):
    """How an attempt to register, or a registration, ended."""

    REFUSED = "the host answered that nothing listens there: the agent is dead"
    UNREACHED = "this node did not come to register there"
    SILENT = "it was registered there: no answer in time"
    CLOSED = "it was registered there: the other end closed the stream, or it broke"


# --- events (and `types.Elsewhere`) --------------------------------------------------------------------------------


class Begin(Record):
    """Look for the coordinator."""


class StreamEnded(Record):
    """The attempt or the stream to the node that was last sought has ended."""

    how: StreamEnd


class Led(Record):
    """The node that was sought leads in `term`. `successors`: those of its last plan, () before the first one."""

    term: int
    leader: Peer
    successors: tuple[Peer, ...] = ()


class Visited(Record):
    """Another agent wants to register here with a vote for `term`; it waits for the `AnswerVisitor` to `visitor`."""

    visitor: str
    term: int


class Located(Record):
    """This node's address, as the other end of a stream sees it; the node itself did not know it."""

    addr: str


class Answered(Record):
    """What `peer` has answered to `AskWhoLeads`."""

    peer: Peer
    where: Elsewhere


class Elected(Record):
    """The coordinator of this node has a quorum."""


class Resigned(Record):
    """The coordinator of this node has lost its quorum."""


# --- commands -------------------------------------------------------------------------------------------------


class Seek(Record):
    """Leave the present registration and register with `peer`; the vote is for `term`."""

    peer: Peer
    term: int


class Stand(Record):
    """Start a coordinator for `term` on this node; its own agent registers there."""

    term: int


class Raise(Record):
    """The coordinator that stands here gets a later term; all vote again."""

    term: int


class Retire(Record):
    """End the coordinator that stands or leads here."""


class AskWhoLeads(Record):
    """Ask `peer` where the coordinator is; `Answered` follows, or nothing."""

    peer: Peer


class AnswerVisitor(Record):
    """Take the registration of `visitor`, or with `elsewhere` send it away."""

    visitor: str
    elsewhere: Elsewhere | None


class ElectionSettings(Record):
    """What an election is told once. All times in seconds."""

    lease_s: float = (
        10.0  # silence after which the coordinator gives a member up: keepalive interval + timeout
    )
    first_try_s: float = 5.0  # before the first plan: how long to try one candidate again and again
    first_pause_s: float = 0.02  # between two rounds through all candidates; doubles
    last_pause_s: float = 1.0


# After lost contact, in this order: at this share of the lease a member looks for another coordinator, ...
MEMBER_SHARE = 0.6
LEADER_SHARE = 0.7  # ... at this share a coordinator resigns, and its own ranks are killed, ...
LEASE_SHARE = 0.9  # ... at this share a member's ranks are killed, ...
FENCE_MARGIN_S = 0.5  # ... and so long after the whole lease, when they are gone, the coordinator may use its slot.


def may_have_left(heard_s: float, now: float, lease_s: float) -> bool:
    """Whether a member that was here at `heard_s`, at least, may have voted for another node by `now` (seconds)."""
    return now - heard_s >= MEMBER_SHARE * lease_s
