"""What is said to a keeper: by the ranks and the agent of its node, one message in a packet, and by other keepers.

Each gets one answer. Answers with memory carry its descriptor.
"""

from __future__ import annotations

from nvrx_slurm.codec import Wire
from nvrx_slurm.declared import (
    AtMost8,
    AtMost256,
    Big,
    Count,
    Name,
    Path,
    Port,
    Record,
    Sentence,
    Workers,
)
from nvrx_slurm.records import Kept, MemoryPlan, Wanted

MAX_PACKET_BYTES = 64 << 10
Save = tuple[Count, Big]  # cycle and iteration


class Join(Record):
    """Which rank the process is; the first message."""

    rank: Count
    world: Count  # how many ranks the job has
    local_world: Workers  # and this node
    launcher: Count  # process id of what starts the ranks; the keeper ends after it
    cycle: Count = 0


class AskSpace(Record):
    """A save begins."""

    iteration: Big
    size: Big  # bytes


class SaveDone(Record):
    """All bytes of the save are in its memory."""


class AskHeld(Record):
    """Which iterations does the rank have?"""


class AskSaved(Record):
    """A load begins."""

    save: Save


class Serve(Record):
    """From the agent: keep copies of other nodes' ranks, and answer their keepers."""

    interface: Name
    port: Port  # 0 = any


class Follow(Record):
    """From the agent: the plan of a cycle. Until the next one, copies go where it says."""

    pem: Path  # the identity of the job
    plan: MemoryPlan


class AskKept(Record):
    """From the agent: what is in this memory?"""


class Offer(Record):
    """From another keeper: a whole state of a rank. Where there is space for it, its bytes follow."""

    rank: Count
    world: Count
    cycle: Count
    iteration: Big
    size: Big  # bytes
    checksum: Big
    source: Name  # the keeper of the rank's node


class Space(Record):
    """Memory for a save; to a rank with its descriptor."""


class Accepted(Record):
    """The message has had its effect."""


class HeldSaves(Record):
    """Whole states of the rank."""

    saves: AtMost8[Save]  # newest first
    other: Count = 0  # of how many ranks a state is that cannot be used; 0 = there is none


class Saved(Record):
    """The memory of a save whose checksum fits, with its descriptor."""

    size: Big  # bytes
    is_copy: bool  # it came from another node


class NotKept(Record):
    """The keeper cannot do it."""

    why: Sentence


class Serving(Record):
    """Where other keepers are answered; port 0: nowhere, and why."""

    address: Name
    port: Port
    why: Sentence = ""


class AllKept(Record):
    """Whole states, and copies of other nodes'."""

    kept: AtMost256[Kept]


class Remark(Record):
    """To the agent, unasked: a sentence for people."""

    text: Sentence


RankRequest = Join | AskSpace | SaveDone | AskHeld | AskSaved
AgentRequest = Serve | Follow | AskKept
Request = RankRequest | AgentRequest
Answer = Space | Accepted | HeldSaves | Saved | NotKept | Serving | AllKept | Remark
requests: Wire[Request] = Wire(Request)
answers: Wire[Answer] = Wire(Answer)
between: Wire[Offer | Wanted | Space | Accepted | NotKept] = Wire(
    Offer | Wanted | Space | Accepted | NotKept
)
