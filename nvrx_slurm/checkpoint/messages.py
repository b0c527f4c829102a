"""What ranks and the keeper of their node say to each other: one message in a packet, and one answer to each.

Answers with memory carry its descriptor.
"""

from __future__ import annotations

from nvrx_slurm.codec import Wire
from nvrx_slurm.declared import AtMost8, Big, Count, Record, Sentence, Workers

MAX_PACKET_BYTES = 8192


class Join(Record):
    """Which rank the process is; the first message."""

    rank: Count
    world: Count  # how many ranks the job has
    local_world: Workers  # and this node
    launcher: Count  # process id of what starts the ranks; the keeper ends after it


class AskSpace(Record):
    """A save begins."""

    iteration: Big
    size: Big  # bytes


class SaveDone(Record):
    """All bytes of the save are in its memory."""

    serial: Big
    tree_at: Big  # where the description of the state is
    tree_size: Big


class AskHeld(Record):
    """Which iterations does the rank have?"""


class AskSaved(Record):
    """A load begins."""

    iteration: Big


class Space(Record):
    """Memory for a save, with its descriptor."""

    serial: Big


class Accepted(Record):
    """The message has had its effect."""


class HeldSaves(Record):
    """Whole states of the rank."""

    iterations: AtMost8[Big]  # newest first
    other: Sentence = ""  # what cannot be used, and why


class Saved(Record):
    """The memory of a save whose checksum fits, with its descriptor."""

    tree_at: Big
    tree_size: Big


class NotKept(Record):
    """The keeper cannot do it."""

    why: Sentence


Request = Join | AskSpace | SaveDone | AskHeld | AskSaved
Answer = Space | Accepted | HeldSaves | Saved | NotKept
requests: Wire[Request] = Wire(Request)
answers: Wire[Answer] = Wire(Answer)
