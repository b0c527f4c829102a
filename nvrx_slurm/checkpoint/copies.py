"""Copies between the keepers of two nodes: a state of a rank is offered, or asked for, and sent.

Threads move bytes. They hold the keeper's lock where something is decided.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.checkpoint.channel import PROOF_S, Channel, address_of, listening
from nvrx_slurm.checkpoint.memory import Memory, rounded
from nvrx_slurm.checkpoint.store import Store
from nvrx_slurm.checkpoint.work import Work
from nvrx_slurm.control.identity import JobIdentity, from_pem
from nvrx_slurm.core.checkpoint.memory import Generation
from nvrx_slurm.records import Wanted

_MOST_CALLS = 4  # to other keepers at once; further ones wait
_MOST_CALLERS = 16  # further ones are hung up on: few nodes have something to do with this one
_SLOW = (
    "copies of checkpoints take longer than saves, so ranks may have copies of different iterations;"
    " save less often, or name a faster --ft-checkpoint-interface"
)
_TORN = "it was replaced while it was sent: saves come faster than copies"


class Copies:
    """Role of a keeper whose agent names an interface. `say`: a sentence for people.

    `check(number, generation, then)` compares a checksum, and calls `then` with whether it fits.
    """

    def __init__(
        self,
        store: Store,
        lock: AbstractContextManager[Any],
        say: Callable[[str], None],
        check: Callable[[int, Generation, Callable[[bool], None]], None],
    ) -> None:
        self._store = store
        self._lock = lock
        self._say = say
        self._check = check
        self._calls = Work(_MOST_CALLS, lock)
        self._callers = Work(_MOST_CALLERS, lock)
        self.listener: socket.socket | None = None
        self.pending: dict[tuple[int, m.Save], list[Callable[[], None]]] = {}  # what is fetched
        self._identity: JobIdentity | None = None
        self._name = ""  # of this keeper, for others
        self._busy = 0  # with so many callers
        self._to = ("", 0)  # who gets copies
        self._sending = set[int]()  # ranks
        self._sent: dict[int, tuple[tuple[str, int], Generation]] = {}  # to whom, and what, by rank
        self._waiting = Counter[int]()  # saves of a rank during a send
        self._is_slow = False  # it was said
        self._said: dict[int, str] = {}  # why the last copy of a rank was not kept

    # --- the agent ------------------------------------------------------------------------------

    def serve(self, request: m.Serve) -> m.Serving:
        """Listen for other keepers."""
        try:
            address = address_of(request.interface)
            if self.listener is None:
                self.listener = listening(address, request.port)
        except OSError as error:
            why = f"no copies are kept: --ft-checkpoint-interface {request.interface}: {error}"
            return m.Serving("", 0, why)
        self._store.has_copies = True
        port = self.listener.getsockname()[1]
        self._name = f"{address} {port}"
        return m.Serving(address, port)

    def follow(self, request: m.Follow) -> None:
        """A cycle begins: send what is here to its partner, and fetch what its ranks may load."""
        if self._identity is None or self._identity.pem != request.pem:
            with suppress(OSError, ValueError):
                self._identity = from_pem(request.pem)
        self._to = (request.plan.address, request.plan.port)
        for wanted in request.plan.wanted:
            self._want(wanted)
        for number in self._store.ranks:
            self.offer(number)

    # --- one's own states are sent --------------------------------------------------------------

    def offer(self, number: int) -> None:
        """Send the newest verified state of a rank of this node, unless one is on its way."""
        identity = self._identity
        rank = self._store.ranks.get(number)
        if identity is None or not self._to[0]:
            return
        if rank is None or rank.copied:
            return
        if number in self._sending:
            self._waiting[number] += 1
            return
        newest = next((one for one in rank.held if one.checksum >= 0), None)
        if newest is None or self._sent.get(number) == (self._to, newest):
            return
        self._sent[number] = (self._to, newest)
        if self._waiting.pop(number, 0) > 1 and not self._is_slow:
            self._is_slow = True
            self._say(_SLOW)
        self._sending.add(number)
        self._store.moving.add(newest.memory)
        push = partial(self._push, number, newest, newest.memory)
        send = partial(self._send, identity, self._to, push)
        then = partial(self._sent_one, number, newest.memory)
        self._calls.do(send, then)

    def _send(
        self,
        identity: JobIdentity,
        to: tuple[str, int],
        push: Callable[[Channel], None],
    ) -> None:
        connection = socket.create_connection(to, PROOF_S)
        with Channel(connection, identity, is_server=False) as channel:
            push(channel)

    def _sent_one(self, number: int, memory: Memory, result: OSError | None) -> None:
        self._sending.discard(number)
        self._store.moving.discard(memory)
        why = "" if result is None else f"no copy of rank {number} is kept: {result}"
        if why != self._said.get(number, ""):
            self._said[number] = why
            self._say(why or f"copies of rank {number} are kept again")
        self.offer(number)

    def _push(self, number: int, what: Generation, memory: Memory, channel: Channel) -> None:
        offer = m.Offer(
            number,
            what.world,
            what.cycle,
            what.iteration,
            memory.used,
            what.checksum,
            self._name,
        )
        channel.tell(offer)
        answer = channel.hear()
        if isinstance(answer, m.Space):
            for block in memory.blocks():
                if what.memory is not memory:
                    raise OSError(_TORN)
                channel.write(block)
            answer = channel.hear()
        if not isinstance(answer, m.Accepted):
            raise OSError(getattr(answer, "why", "it answers something else"))

    # --- other keepers call ---------------------------------------------------------------------

    def accept(self) -> None:
        """A caller; who it is is found in a thread."""
        assert self.listener is not None
        with suppress(OSError):
            connection, _ = self.listener.accept()
            if self._identity is None or self._busy >= _MOST_CALLERS:
                return connection.close()
            self._busy += 1
            answer = partial(self._answer, connection, self._identity)
            self._callers.do(answer, self._answered)

    def _answered(self, result: OSError | None) -> None:
        self._busy -= 1

    def _answer(self, connection: socket.socket, identity: JobIdentity) -> None:
        with Channel(connection, identity, is_server=True) as channel:
            request = channel.hear()
            if isinstance(request, m.Offer):
                self._take(channel, request)
            elif isinstance(request, Wanted):
                self._give(channel, request)

    def _give(self, channel: Channel, wanted: Wanted) -> None:
        with self._lock:
            found = self._here(wanted)
            memory = None if found is None else found.memory
            if memory is not None:
                self._store.moving.add(memory)
        if found is None or memory is None:
            return channel.tell(m.NotKept("it is not here any more"))
        try:
            self._push(wanted.rank, found, memory, channel)
        finally:
            with self._lock:
                self._store.moving.discard(memory)

    def _here(self, wanted: Wanted) -> Generation | None:
        rank = self._store.ranks.get(wanted.rank)
        save = (wanted.cycle, wanted.iteration)
        return next((one for one in (rank.held if rank else ()) if one.save == save), None)

    # --- a state comes --------------------------------------------------------------------------

    def _take(self, channel: Channel, offer: m.Offer, wanted: bool = False) -> None:
        """In a thread. `wanted`: it was asked for. Raises OSError where it does not come whole."""
        with self._lock:
            begun = self._begin(offer, wanted)
        if not isinstance(begun, Memory):
            channel.tell(begun)
            if isinstance(begun, m.NotKept):
                raise OSError(begun.why)
            return
        fits = False
        try:
            begun.allocate()
            channel.tell(m.Space())
            fits = begun.receive(channel.read_into) == offer.checksum
        finally:
            with self._lock:
                self._store.moving.discard(begun)
                answer = self._arrived(begun, offer, wanted, fits)
        channel.tell(answer)
        if isinstance(answer, m.NotKept):
            raise OSError(answer.why)

    def _begin(self, offer: m.Offer, wanted: bool) -> Memory | m.Accepted | m.NotKept:
        store = self._store
        rank = store.rank(offer.rank)
        if rank is None or offer.size <= 0:
            return m.NotKept("it is no state of a rank")
        if not wanted and not rank.copied:
            return m.NotKept(f"rank {offer.rank} runs here")
        if not wanted and any(one.cycle > offer.cycle for one in rank.held):
            return m.NotKept(f"rank {offer.rank} has gone on in a later cycle")
        same = rank.find(offer.world, (offer.cycle, offer.iteration))
        if same is not None and same.checksum == offer.checksum:
            return m.Accepted()
        problem = store.lacks(offer.rank, rounded(offer.size), local_world=0)
        if problem or rank.writing:
            return m.NotKept(problem or f"rank {offer.rank} saves already")
        memory = store.place(offer.rank, offer.size, may_tear=False)
        if memory is None:
            memory = Memory(rounded(offer.size))
        memory.used = offer.size
        store.moving.add(memory)
        return memory

    def _arrived(
        self,
        memory: Memory,
        offer: m.Offer,
        wanted: bool,
        fits: bool,
    ) -> m.Accepted | m.NotKept:
        store = self._store
        rank = store.rank(offer.rank)
        if not fits:
            return m.NotKept("it is damaged: its checksum differs")
        may_take = wanted or (rank is not None and rank.copied)
        if rank is None or rank.writing or not may_take:
            return m.NotKept(f"rank {offer.rank} runs here by now")
        fields = (offer.cycle, offer.iteration, offer.world, memory, offer.checksum)
        rank.complete(Generation(*fields, is_copy=True), is_last=not wanted)
        if not wanted:
            rank.source = offer.source
            store.forget(offer.cycle, offer.source)
        return m.Accepted()

    # --- what ranks of this node may load -------------------------------------------------------

    def _want(self, wanted: Wanted) -> None:
        key = (wanted.rank, (wanted.cycle, wanted.iteration))
        if key in self.pending:
            return
        self.pending[key] = []
        here = self._here(wanted)

        def checked(fits: bool) -> None:
            if fits:
                return self._settle(key)
            if here is not None:
                self._say(f"rank {wanted.rank}: iteration {wanted.iteration} is damaged here")
            self._calls.do(partial(self._fetch, wanted), partial(self._fetched, key, wanted))

        if here is None:
            checked(False)
        else:
            self._check(wanted.rank, here, checked)

    def _fetch(self, wanted: Wanted) -> None:
        if self._identity is None:
            raise OSError("the job's identity is not known")
        connection = socket.create_connection((wanted.address, wanted.port), PROOF_S)
        with Channel(connection, self._identity, is_server=False) as channel:
            channel.tell(wanted)
            offer = channel.hear()
            if not isinstance(offer, m.Offer):
                raise OSError(getattr(offer, "why", "it answers something else"))
            self._take(channel, offer, wanted=True)

    def _fetched(self, key: tuple[int, m.Save], wanted: Wanted, result: OSError | None) -> None:
        what = f"rank {wanted.rank}: iteration {wanted.iteration}"
        where = f"from the keeper at {wanted.address}"
        if result is None:
            self._say(f"{what} was fetched {where}")
        else:
            self._say(f"{what} cannot be fetched {where}: {result}")
        self._settle(key)

    def _settle(self, key: tuple[int, m.Save]) -> None:
        for then in self.pending.pop(key):
            then()
