"""Which node an agent registers with: the coordinator, or the candidate of a term. Pure; see `core.machine`.

    SEEKING -> FOLLOWING -> SEEKING ...        SEEKING -> STANDING -> LEADING -> SEEKING ...

A registration is a vote for one term, and a candidate takes votes for its own term only. The agents of a job know the
same successors in the same order, so they come to the same candidate for the same term. A candidate leads once its
registered members are a quorum (`core.election.quorum`).
An agent has one registration at a time. Where that ends without a word from the other node, that node may lead and
count on it: the agent votes for no other node before it has been out of reach for a part of the lease, or is dead.
"""

from __future__ import annotations

from nvrx_slurm.core.election import events as ev
from nvrx_slurm.core.election.events import MEMBER_SHARE, Place, StreamEnd
from nvrx_slurm.core.machine import Machine, Say, Tick, rows
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Elsewhere, Peer, Register

_FIRST_QUESTION_S, _QUESTION_S = 0.1, 1.0
_MAX_TRIES = 8  # of one candidate that is alive
_HERE = (Place.STANDING, Place.LEADING)


class Election(Machine):
    """The election's core on one node: `step(event, now)` -> commands; `deadline()` says when it wants a Tick.

    `me`: this node. `candidates`: the nodes that may lead before the first plan, in order, with this node among them
    if it is one. After that the successors of the last plan are the candidates.
    """

    made_of = ("me", "candidates", "settings")
    commands = (ev.Seek, ev.Stand, ev.Raise, ev.Retire, ev.AskWhoLeads, ev.AnswerVisitor)
    table = rows(
        (
            Place.SEEKING,
            ev.Begin,
            "on_begin",
            (Place.STANDING,),
            "the first candidate, which may be this node",
        ),
        (
            Place.SEEKING,
            ev.StreamEnded,
            "on_ended_seeking",
            (Place.STANDING,),
            "the next candidate",
        ),
        (Place.SEEKING, Elsewhere, "on_elsewhere", (Place.STANDING,), "follow the hint"),
        (Place.SEEKING, ev.Led, "on_led", (Place.FOLLOWING,), "the candidate leads"),
        (
            Place.SEEKING,
            Tick,
            "on_tick_seeking",
            (Place.STANDING,),
            "the next candidate, or the next round",
        ),
        (
            Place.FOLLOWING,
            ev.StreamEnded,
            "on_ended_following",
            (Place.SEEKING, Place.STANDING),
            "elect another one",
        ),
        (Place.FOLLOWING, ev.Led, "on_led", (), "a plan with new successors"),
        (
            Place.FOLLOWING,
            Elsewhere,
            "on_elsewhere",
            (Place.SEEKING, Place.STANDING),
            "it does not lead any more",
        ),
        (
            Place.STANDING,
            ev.Elected,
            "on_elected",
            (Place.LEADING,),
            "a quorum has registered here",
        ),
        (
            Place.STANDING,
            ev.Answered,
            "on_answered_standing",
            (Place.SEEKING,),
            "a later candidate, or a leader",
        ),
        (_HERE, Tick, "on_tick_standing", (), "ask the others; stand for a later term"),
        (Place.LEADING, ev.Led, "on_led", (), "our own plan with new successors"),
        (
            Place.LEADING,
            ev.Answered,
            "on_answered_leading",
            (Place.SEEKING,),
            "before the first plan: another leads",
        ),
        (Place.SEEKING, ev.Answered, "on_answered_seeking", (), "a leader that was silent"),
        (Place.FOLLOWING, ev.Answered, "ignore", (), "this node does not stand any more"),
        (
            _HERE,
            ev.Resigned,
            "on_resigned",
            (Place.SEEKING, Place.STANDING),
            "too few members: seek again",
        ),
        (tuple(Place), ev.Visited, "on_visited", (), "take its registration, or send it on"),
        (tuple(Place), ev.Located, "on_located", (), "others will find this node there"),
        (Place.FOLLOWING, Tick, "ignore", (), "no timer runs"),
        (_HERE, (ev.StreamEnded, Elsewhere), "ignore", (), "of a node sought before"),
    )

    def __init__(
        self, me: Peer, candidates: tuple[Peer, ...], settings: ev.ElectionSettings, now: float
    ) -> None:
        super().__init__(Place.SEEKING, now)
        self.me = me
        self.settings = settings
        self.candidates = candidates
        self.term = 0  # highest that this node has voted for, or followed
        self.leader: Peer | None = None  # the last one
        self._led_term = 0  # in which it led
        self._candidates = candidates
        self.fresh = True  # no leader has been followed yet
        # until then hints to that leader are ignored: other nodes may still believe in it
        self._doubt_until = 0.0
        self._target: Peer | None = None  # the node that is sought or followed
        self._once_more = False  # the candidate of this term is tried again
        self._hinted = False  # the target is a hint of another node, not the candidate of the term
        # until then no other node is sought, unless the target is dead or says so
        self._hold_until = 0.0
        # until then a node that this one has left may have counted on it
        self._led_at: float | None = None
        self._wanted = 0  # the latest term for which a visitor has voted
        self._failures = 0  # in a row
        self._pauses = 0  # since the last leader was lost
        self._tries = 0  # of the candidate of this term
        self._first_try_until: float | None = None
        self._next_at: float | None = None

    def deadline(self) -> float | None:
        """When the next Tick is due (monotonic seconds), or None."""
        return self._next_at

    @property
    def others(self) -> tuple[Peer, ...]:
        """The candidates and the last leader, without this node."""
        last = () if self.leader is None else (self.leader,)
        others = {peer.key: peer for peer in (*last, *self._candidates) if peer.key != self.me.key}
        return tuple(others.values())

    def signed(self, message: Register, now: float) -> Register:
        """A registration with the vote of this node, and how long ago it was led last, at least; -1 = never."""
        led_s = -1.0 if self._led_at is None else max(0.0, now - self._led_at)
        return replace(message, vote=self.term, led_s=led_s, led_term=self._led_term)

    def on_located(self, event: ev.Located, now: float) -> None:
        """Only where the node does not know its address."""
        if not self.me.addr:
            self.me = replace(self.me, addr=event.addr)

    def validate(self) -> None:
        """What holds after each step."""
        super().validate()
        assert self.term >= self._led_term, "a term went down"
        target = None if self._target is None else self._target.key
        leader = None if self.leader is None else self.leader.key
        if self.state is Place.STANDING:
            assert target == self.me.key, "it stands for another node"
        if self.state is Place.FOLLOWING:
            assert leader is not None and not self._once_more, "it follows nobody"
        if self.state is Place.LEADING:
            assert leader == self.me.key, "it leads, but not for itself"

    # --- candidates in turn ---------------------------------------------------------------------------------------

    def on_begin(self, event: ev.Begin, now: float) -> Place:
        """The first candidate is the coordinator, as a rule. It may start a little later than this node."""
        self._first_try_until = now + self.settings.first_try_s
        return self._try_next(now)

    def on_ended_seeking(self, event: ev.StreamEnded, now: float) -> Place:
        """This candidate is not there, or does not lead and is gone."""
        if event.how in (StreamEnd.SILENT, StreamEnd.CLOSED):
            return self._left(event.how, now)
        if event.how is StreamEnd.REFUSED and self._hold_until:
            return self._try_next(now)
        self._failures += 1
        waits = now < max(self._hold_until, self._first_try_until or 0.0)
        if waits or self._hinted:
            return self._again(now, waits)
        self._once_more = False
        all_failed = self._failures % len(self._candidates) == 0
        return self._pause(now) if all_failed else self._try_next(now)

    def _left(self, how: StreamEnd, now: float) -> Place:
        """A node where this one was registered says nothing more. If it has won, it leads until its lease is over."""
        share_s = MEMBER_SHARE * self.settings.lease_s
        if how is StreamEnd.SILENT:
            self._led_at = now - share_s
            return self._try_next(now)
        self._led_at, self._hold_until = now, now + share_s
        self.term += 1  # its vote for the last one may have been counted
        self._once_more, self._hinted = True, False
        assert self._target is not None
        return self._seek(self._target)

    def _again(self, now: float, always: bool = False) -> Place:
        """After a pause the candidate of this term once more; not too often, unless `always`."""
        self._tries += 1
        self._once_more = always or self._tries <= _MAX_TRIES
        return self._pause(now)

    def _pause(self, now: float) -> Place:
        pause_s = self.settings.first_pause_s * float(1 << min(self._pauses, 10))
        self._pauses += 1
        self._next_at = now + min(pause_s, self.settings.last_pause_s)
        return Place.SEEKING

    def on_tick_seeking(self, event: Tick, now: float) -> Place | None:
        """The pause is over."""
        if self._next_at is None or now < self._next_at:
            return None
        if now < self._hold_until and self._target is not None:
            return self._seek(self._target)
        return self._try_next(now)

    def _try_next(self, now: float) -> Place:
        """The candidate of the next term, or of this one once more."""
        if not self._once_more:
            self.term += 1
            self._tries = 0
        self._hinted = self._once_more = False
        self._hold_until = 0.0
        candidate = self._candidate_of(self.term)
        return self._stand(now) if candidate.key == self.me.key else self._seek(candidate)

    def _seek(self, peer: Peer) -> Place:
        self._next_at, self._target = None, peer
        self.emit(ev.Seek(peer, self.term))
        return Place.SEEKING

    def _candidate_of(self, term: int) -> Peer:
        """The terms after that of the last leader go round the candidates."""
        return self._candidates[(term - self._led_term - 1) % len(self._candidates)]

    def _stand(self, now: float) -> Place:
        self._target = self.me
        if not self.fresh:
            self.emit(Say(f"term {self.term}: this node stands for coordinator"))
        self.emit(ev.Stand(self.term))
        self._next_at = now + _FIRST_QUESTION_S
        return Place.STANDING

    # --- hints ----------------------------------------------------------------------------------------------------

    def on_elsewhere(self, event: Elsewhere, now: float) -> Place:
        """A hint to a leader, or to a candidate of a later term, is followed at once."""
        self._first_try_until, self._hold_until = None, 0.0
        if event.peer.key == self.me.key and event.term > self.term and not event.leads:
            self.term = event.term  # the others wait for this node
            return self._stand(now)
        if not self._is_better(event, now):
            if event.leads and event.peer.key != self.me.key:
                self.emit(ev.AskWhoLeads(event.peer))  # it was silent, but may be there again
            return self._again(now)  # that node will learn what this one knows
        self._once_more, self._hinted = False, True
        self.term = max(self.term, event.term)
        return self._seek(event.peer)

    def on_answered_seeking(self, event: ev.Answered, now: float) -> Place | None:
        """A leader that says so itself is silent no more. It is sought at once, unless another node is being sought."""
        if not event.where.leads or event.where.peer.key != event.peer.key:
            return None
        self._doubt_until = 0.0
        pauses = self._next_at is not None and now >= self._hold_until
        return self.on_elsewhere(event.where, now) if pauses else None

    def on_answered_standing(self, event: ev.Answered, now: float) -> Place | None:
        """Of two candidates the one with the later term goes on; none goes on beside a leader."""
        if event.where.peer.key == event.peer.key:
            self._doubt_until = 0.0  # as above
        if not self._is_better(event.where, now):
            return None
        self.emit(ev.Retire())
        return self.on_elsewhere(event.where, now)

    def _is_better(self, event: Elsewhere, now: float) -> bool:
        """Whether to register where this hint says."""
        if event.peer.key == self.me.key:
            return False
        doubted = event.term <= self._led_term and now < self._doubt_until
        return (event.leads and not doubted) or self._is_later(event)

    def _is_later(self, event: Elsewhere) -> bool:
        """Two candidates can stand for one term where agents know different successors; their keys decide."""
        mine = self._target.key if self._target is not None else ""
        return (event.term, event.peer.key) > (self.term, mine)

    def on_answered_leading(self, event: ev.Answered, now: float) -> Place | None:
        """A node that has just started, as all of its members, may have missed that the job runs."""
        where = event.where
        if not self.fresh or not where.leads or where.peer.key == self.me.key:
            return None
        self.emit(ev.Retire())
        self.term += 1  # it has led in the last one
        return self.on_elsewhere(where, now)

    def on_tick_standing(self, event: Tick, now: float) -> None:
        """Ask the other candidates whether they know better. Until then a later vote waits: this node may win."""
        if self._next_at is None or now < self._next_at:
            return
        if self.state is Place.STANDING and self._wanted > self.term:
            self.term = self._wanted
            self.emit(ev.Raise(self.term))
        self._next_at = now + _QUESTION_S
        for peer in self.others:
            self.emit(ev.AskWhoLeads(peer))

    # --- a leader -------------------------------------------------------------------------------------------------

    def on_led(self, event: ev.Led, now: float) -> Place | None:
        """Follow it. Its last plan names the candidates for the time after it."""
        self.term = max(self.term, event.term)
        self.leader, self._led_term = event.leader, event.term
        self.fresh = self._once_more = False
        self._failures = self._pauses = self._tries = 0
        self._next_at = self._first_try_until = None
        self._hold_until = 0.0
        if event.successors:
            self._candidates = event.successors
        return None if self.state is Place.LEADING else Place.FOLLOWING

    def on_elected(self, event: ev.Elected, now: float) -> Place:
        """This node leads. Before its first plan it goes on asking the others."""
        self.leader, self._led_term = self.me, self.term
        if not self.fresh:
            self._next_at = None
        return Place.LEADING

    def on_ended_following(self, event: ev.StreamEnded, now: float) -> Place:
        """A leader whose stream broke may be there still: it is sought again. A silent one is not waited for."""
        self._doubt_until = now + self.settings.lease_s if event.how is StreamEnd.SILENT else 0.0
        return self._left(event.how, now)

    def on_resigned(self, event: ev.Resigned, now: float) -> Place:
        """This node does not lead any more; the others may have a quorum."""
        self.emit(ev.Retire())
        self._led_at = now
        return self._try_next(now)

    # --- other agents ---------------------------------------------------------------------------------------------

    def on_visited(self, event: ev.Visited, now: float) -> None:
        """A leader takes all agents, a candidate those that vote for its term."""
        takes = self.state is Place.LEADING or (
            self.state is Place.STANDING and event.term == self.term
        )
        self._wanted = max(self._wanted, event.term)
        self.emit(ev.AnswerVisitor(event.visitor, None if takes else self.where()))

    def where(self) -> Elsewhere:
        """The answer to an agent that asks for the coordinator."""
        leads = self.state is Place.FOLLOWING or self.state is Place.LEADING
        target = self._target if self._target is not None else self.me
        return Elsewhere(self.term, target, leads)
