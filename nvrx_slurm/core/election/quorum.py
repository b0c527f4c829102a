"""May this coordinator act? It may while most of the job's nodes that can be alive are its members.

Two coordinators never have a quorum at the same time: a node is a member of one coordinator, and only a node that is
proven dead is not counted. Silence proves nothing. A node that comes back has no vote until all others know that it
gets it again: the plan of one cycle offers it, that of a later cycle gives it. Pure; docs/decisions/017-election.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set

from nvrx_slurm.types import Node, Peer, Plan


def peer_key(node: Node) -> str:
    """What a node is known by over all lives of its agent."""
    return str(node.infra_rank) if node.infra_rank >= 0 else node.node_id


def peer_of(node: Node) -> Peer:
    """Where the agent of this node listens."""
    return Peer(peer_key(node), node.host, node.addr, node.port)


class Quorum:
    """Counts the members against the job's nodes. `electors` 0: the job has one node, or needs no quorum.

    Each query is O(number of dead nodes).
    """

    def __init__(
        self,
        electors: int,
        one_life: bool = False,
        begin_until: float = 0.0,
    ) -> None:
        self.electors = electors  # nodes of the job, dead or alive
        self.one_life = one_life  # no second agent begins on a node
        self.begin_until = (
            begin_until  # until then a refusal may come from an agent that has not begun
        )
        self.elected = electors <= 1
        self.dead: set[str] = set()  # keys of nodes without a vote: proven dead, or back since then
        # those of them to which the last plan offers a vote
        self.returned: frozenset[str] = frozenset()
        self.knowing: set[str] = set()  # keys of the nodes that have that plan
        self.offer = (0, -1)  # (term, cycle) of that plan
        self.probed: dict[str, Peer] = {}  # which life of a node a proof of death is about
        self.leader = ""  # key of the last one, where it had not registered at the election
        self.fence_until = 0.0  # ranks of older terms may run on nodes that did not register
        self.unsure = False  # such ranks may run on a node that is proven dead: its next agent may have begun them
        # key of a lost node -> until when it votes for no other
        self.loyal_until: dict[str, float] = {}
        self.fences: dict[str, float] = {}  # key of a lost node -> until when its ranks may run
        self.absent: tuple[Peer, ...] = ()  # nodes that had not registered at the election
        self.missed_at = -1e9  # when a node was last lost, or was not there at the election
        self.resign_at: float | None = None  # without a quorum
        # keys of nodes that came back meanwhile, too late to be counted
        self.strays: set[str] = set()

    @property
    def needed(self) -> bool:
        """Whether this job elects its coordinators."""
        return self.electors > 0

    @property
    def proven(self) -> set[str]:
        """Keys of the nodes that are proven dead. One that is back has no vote, but may run ranks."""
        return self.dead - self.returned

    def enough(self, members: Collection[str]) -> bool:
        """Whether `members` (keys) are a majority in both electorates: without the returned nodes, and with them.

        Until each node knows that they vote again, either electorate may be in use. The elected coordinator keeps its
        office with exactly half.
        """
        rolls = [self.dead, self.proven] if self.returned else [self.dead]
        some_vote = False
        for dead in rolls:
            if len(dead) < self.electors:
                some_vote = True
                if not self._most(members, dead):
                    return False
        return some_vote or 2 * len(members) > self.electors

    def enough_without(self, proven: Collection[str], members: Collection[str]) -> bool:
        """Whether `members` are a majority also if those that were `proven` dead lived."""
        dead = self.dead.difference(proven)
        votes = sum(key not in dead for key in members)
        living = self.electors - len(dead)
        return 2 * votes > living

    def _most(self, members: Collection[str], dead: Set[str]) -> bool:
        uncounted = sum(key in members for key in dead)
        votes = 2 * (len(members) - uncounted)
        living = self.electors - len(dead)
        if self.elected:
            return votes >= living
        return votes > living

    def mind(
        self,
        members: Collection[str],
        now: float,
        prove_s: float,
    ) -> None:
        """Whether to resign, and when: nodes may be proven dead or come back within `prove_s` seconds, and while that
        counts."""
        counted = [key for key in members if key not in self.strays]
        if self.enough(counted):
            self.resign_at = None
            self.strays.clear()
            return
        if self.resign_at is None:
            in_vain_at = max(self.loyal_until.values(), default=now)
            until = min(now + prove_s, in_vain_at)
            self.resign_at = max(now, until)

    def resigns(self, now: float) -> bool:
        """Whether it is time to resign; told once."""
        if self.resign_at is None or now < self.resign_at:
            return False
        self.resign_at = None
        return True

    def strayed(self, key: str, now: float) -> bool:
        """Whether a quorum is missing, and this lost node may have voted for another one: it proves nothing more."""
        return self.resign_at is not None and self._may_have_voted(key, now)

    def is_late(
        self,
        key: str,
        members: Collection[str],
        unheard: Collection[str],
        now: float,
    ) -> bool:
        """Whether this lost node may have voted for another one before it died, and others with it.

        Where a quorum is here, members that are `unheard` may have left it unnoticed.
        """
        heard = set(members).difference(unheard)
        needs_unheard = not self.enough(heard)
        return needs_unheard and self._may_have_voted(key, now) or self.strayed(key, now)

    def _may_have_voted(self, key: str, now: float) -> bool:
        """Whether a lost node has been out of reach for so long that it may have voted for another one."""
        return now >= self.loyal_until.get(key, 0.0)

    def returns(self, key: str, now: float) -> bool:
        """A node has registered. Whether it may count where a quorum is missing."""
        if self.strayed(key, now):
            self.strays.add(key)
            return False
        return self.resign_at is not None

    def missing(self, members: Collection[str], but: str | None = None) -> int:
        """How many nodes, without the node `but`, are neither members nor proven dead."""
        gone = len(members)
        if but is not None and but not in members:
            gone += 1
        gone += sum(key not in members and key != but for key in self.proven)
        return max(0, self.electors - gone)

    def probe(self, peer: Peer) -> None:
        """The death of this life of a node is asked for."""
        self.probed[peer.key] = peer

    def is_proof(self, peer: Peer, now: float) -> bool:
        """True if we probed exactly this address: a refusal at an older one does not prove that a later agent is dead.

        Nothing listens either where an agent has not begun yet. Nobody has met it, so nobody knows its port.
        """
        begins = not peer.port and now < self.begin_until
        return self.probed.get(peer.key) == peer and not begins

    def died(self, key: str, members: Collection[str]) -> None:
        """This node's agent is proven dead, and its ranks with it."""
        self.dead.add(key)
        self.returned -= {key}
        self.back(key, members)

    def newcomer(self, node: Node, votes: bool = True) -> None:
        """This agent has no plan. `votes`: no coordinator has told it that it has no vote.

        If it has begun after the first plan, an older life of its node is dead, and it has no vote yet. Where there is
        no second life, it was only late, and has its vote unless a plan says that it is dead.
        """
        key = peer_key(node)
        before_the_first_plan = not self.offer[0]
        if votes and self.one_life:
            if before_the_first_plan:
                self.dead.discard(key)
            return
        if votes and before_the_first_plan:
            return
        if node.infra_rank < 0 and key not in self.dead:
            self.electors += 1  # it is one more node
        self.dead.add(key)
        self.returned -= {key}

    # --- votes for nodes that came back ---------------------------------------------------------------------

    def knows(
        self,
        key: str,
        term: int,
        cycle: int,
    ) -> None:
        """This node has the plan of (term, cycle)."""
        if (term, cycle) >= self.offer:
            self.knowing.add(key)

    def learn(self, plan: Plan, proven: Collection[str] = ()) -> None:
        """What a voter's plan says: the newest counts. `proven`: what we have proven about nodes of that plan."""
        offer = (plan.term, plan.cycle)
        self.electors = max(self.electors, plan.electors)
        if offer > self.offer:
            still_dead = self.dead.intersection(proven)
            self.dead = still_dead.union(plan.dead)
            self.returned = frozenset(plan.returned) - still_dead
            self._offers(offer)
        elif offer == self.offer:
            self.dead.update(plan.dead)
            self.returned &= set(plan.returned)

    def plan(
        self,
        term: int,
        cycle: int,
        members: Collection[str],
    ) -> None:
        """A plan is about to be sent: give the votes that all know of, and offer those of nodes that are back."""
        self.electors = max(self.electors, len(self.dead.union(members)))
        living = self.electors - len(self.dead)
        all_know = len(self.knowing - self.dead) >= living
        if self.returned and all_know:
            self.dead -= self.returned
        self.returned = frozenset(self.dead.intersection(members))
        self._offers((term, cycle))

    def _offers(self, offer: tuple[int, int]) -> None:
        self.offer = offer
        self.knowing = set()

    # --- fences ---------------------------------------------------------------------------------------------

    def won(
        self,
        voters: Collection[str],
        known: Iterable[Peer],
        now: float,
    ) -> None:
        """This coordinator is elected. Of the nodes that are `known`, some are missing."""
        self.elected = True
        self.missed_at = now
        self.absent = tuple(peer for peer in known if peer.key not in voters)

    def fence_the_missing(
        self,
        last_leader: str,
        leader_until: float,
        others_until: float,
        unsure: bool,
    ) -> None:
        """Nodes that did not register may run ranks until their leases are over."""
        if last_leader:
            self.leader = last_leader
            self.fences[last_leader] = leader_until
        self.fence_until = max(leader_until, others_until)
        self.unsure = unsure

    def lost(
        self,
        key: str,
        loyal_until: float,
        now: float,
    ) -> None:
        """A member is lost: until then it votes for no other coordinator."""
        self.missed_at = now
        self.loyal_until[key] = loyal_until

    def fence(self, key: str, until: float | None) -> None:
        """The ranks of this node may run until then; None: they are gone."""
        self.fences.pop(key, None)
        if until is not None:
            self.fences[key] = until

    def back(self, key: str, members: Collection[str]) -> None:
        """Its ranks are known again: this node registers, or is dead. `members`: keys of all members."""
        self.fences.pop(key, None)
        self.unfence(members, key)

    def unfence(self, members: Collection[str], but: str | None = None) -> None:
        """End the common fence if only the last leader is missing: it has a fence of its own."""
        if self.unsure:
            return
        has_own_fence = int(self.leader in self.fences)
        if self.missing(members, but) <= has_own_fence:
            self.fence_until = 0.0

    def fenced_until(self) -> float:
        """Before this (monotonic seconds) no rank may be started that may still run elsewhere."""
        return max((self.fence_until, *self.fences.values()))
