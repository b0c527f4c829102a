"""Scenarios of one node's elections as text, as in `stories`: node 1 of 0, 1 and 2, which are the candidates.

    # the candidates take turns, each in a later term
    follows                            it has begun (`seeks`), node 0 leads (`follows`), it `stands`, or it `leads`
    silent        -> STANDING stand:2
    resigned      -> SEEKING retire seek:2@3
    led 3 2 0 1                        node 2 leads in term 3; then node 0 may, then node 1

`silent`, `closed`, `refused`, `unreached`: how the stream to the node that is sought or leads has ended.
`told 1 0 leads`: the node that was reached names node 0 of term 1; `hears 2 1 0 leads`: so does node 2, which was
asked. "stands": it would elect that node.
`visited h2.0 4`: node 2 registers here, and knows term 4. `answer:h2.0` takes it; `answer:h2.0(1@2 stands)` sends it
on.
"""

from nvrx_slurm.core.election import events as el
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.machine import Tick
from nvrx_slurm.types import Elsewhere, Peer

from .stories import Story

PEERS = tuple(Peer(str(i), f"h{i}", f"10.0.0.{i}", 7000) for i in range(3))
_ENDS = {how.name.lower(): how for how in el.StreamEnd}
_BEGIN = {
    "seeks": (),
    "follows": ("led 1 0 1 2",),
    "stands": ("led 1 0 1 2", "silent"),
    "leads": ("led 1 0 1 2", "silent", "elected"),
}


def an_election(rank):
    return Election(PEERS[rank], PEERS, el.ElectionSettings(), 0.0)


def _elsewhere(term, node, what):
    return Elsewhere(int(term), PEERS[int(node)], what == "leads")


class ElectionStory(Story):
    """One scenario of an election."""

    starts = tuple(_BEGIN)

    def begin(self, word, rest):
        """A node that has begun, and what has happened to it since."""
        self.now, self.core = 0.0, an_election(1)
        self.core.step(el.Begin(), 0.0)
        for line in _BEGIN[word]:
            event, _, about = line.partition(" ")
            self.tell(event, about)

    def event(self, word, rest):
        """The event that a line means."""
        if word in _ENDS:
            return el.StreamEnded(_ENDS[word])
        events = {
            "waits": Tick,
            "tick": Tick,
            "elected": el.Elected,
            "resigned": el.Resigned,
            "led": lambda: el.Led(int(rest[0]), PEERS[int(rest[1])], tuple(PEERS[int(one)] for one in rest[2:])),
            "told": lambda: _elsewhere(*rest),
            "hears": lambda: el.Answered(PEERS[int(rest[0])], _elsewhere(*rest[1:])),
            "visited": lambda: el.Visited(rest[0], int(rest[1])),
        }
        return events[word]()

    def effects(self, commands):
        """One word for each command, except `Say`."""
        words = {
            el.Seek: lambda c: f"seek:{c.peer.key}@{c.term}",
            el.Stand: lambda c: f"stand:{c.term}",
            el.Retire: lambda c: "retire",
            el.Raise: lambda c: f"raise:{c.term}",
            el.AskWhoLeads: lambda c: f"ask:{c.peer.key}",
            el.AnswerVisitor: lambda c: f"answer:{c.visitor}{_sent_on(c.elsewhere)}",
        }
        yield from (words[type(command)](command) for command in commands if type(command) in words)


def _sent_on(elsewhere):
    if elsewhere is None:
        return ""
    return f"({elsewhere.peer.key}@{elsewhere.term} {'leads' if elsewhere.leads else 'stands'})"
