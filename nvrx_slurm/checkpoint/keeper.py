"""The keeper: the process of a node that owns the memory of checkpoints.

It ends a while after the launcher of the ranks, unless ranks of another launcher have come by then. No torch. One
thread decides; checksums, the making of memory and copies are in others.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.checkpoint import orphan
from nvrx_slurm.checkpoint.link import is_stranger
from nvrx_slurm.checkpoint.memory import UNREADABLE, Memory, rounded
from nvrx_slurm.checkpoint.store import Store
from nvrx_slurm.checkpoint.work import Work
from nvrx_slurm.core.checkpoint.memory import Generation, MemoryEvent, MemoryState, RankMemory
from nvrx_slurm.errors import ProtocolError

if TYPE_CHECKING:
    from nvrx_slurm.checkpoint.copies import Copies

_MAX_CLIENTS = 256
_THREADS = 4


class RankClient:
    """One connection of a rank, or of the agent."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.joined: m.Join | None = None
        self.waits = False  # for an answer that a thread prepares
        self.gone = False


class Keeper:
    """Serves ranks at `listener`. `limit`: bytes for checkpoints, 0 = what the cgroup and the machine allow.

    `linger_s`: how long it waits for ranks of another launcher when `launcher` has ended.
    """

    def __init__(self, listener: socket.socket, limit: int, launcher: int, linger_s: float) -> None:
        self._listener = listener
        self._linger_s = linger_s
        self._selector = selectors.DefaultSelector()
        self._work = Work(_THREADS)
        self._store = Store(limit)
        self._copies: Copies | None = None
        self._agent: RankClient | None = None  # that gets sentences
        self._clients: set[RankClient] = set()
        self._owners: dict[int, RankClient] = {}  # by rank: the process that may save
        self._launcher = -1  # pidfd; -1 = it has ended
        self._ended = set[int]()  # launchers
        self._ends_at = 0.0
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._work.woken, selectors.EVENT_READ, self._work.finish)
        self._follow(launcher)

    def run(self) -> None:
        """Until the launcher has ended, and none has followed it."""
        while self._launcher >= 0 or time.monotonic() < self._ends_at:
            left_s = None if self._launcher >= 0 else max(0.0, self._ends_at - time.monotonic())
            for key, _ in self._selector.select(left_s):
                key.data()

    # --- the launcher -------------------------------------------------------------------------------------------

    def _follow(self, launcher: int) -> None:
        self._ends_at = time.monotonic() + self._linger_s
        with suppress(OSError):  # it has ended, or is of another pid namespace
            self._launcher = -1 if launcher in self._ended else os.pidfd_open(launcher)
        if self._launcher >= 0:
            ended = partial(self._launcher_ended, launcher)
            self._selector.register(self._launcher, selectors.EVENT_READ, ended)

    def _launcher_ended(self, launcher: int) -> None:
        self._ended.add(launcher)  # its number may be there until it is reaped
        self._selector.unregister(self._launcher)
        os.close(self._launcher)
        self._launcher = -1
        self._ends_at = time.monotonic() + self._linger_s
        for client in self._owners.values():  # a keeper may serve ranks of several
            if self._launcher < 0 and client.joined is not None:
                self._follow(client.joined.launcher)

    # --- connections --------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(OSError):
            connection, _ = self._listener.accept()
            if is_stranger(connection) or len(self._clients) >= _MAX_CLIENTS:
                connection.close()
                return
            connection.setblocking(False)
            client = RankClient(connection)
            self._clients.add(client)
            self._selector.register(connection, selectors.EVENT_READ, partial(self._read, client))

    def _read(self, client: RankClient) -> None:
        if client.gone:  # closed by an event of the same round
            return
        try:
            data, _, flags, _ = client.connection.recvmsg(m.MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, flags = b"", 0
        if not data or flags & socket.MSG_TRUNC or client.waits:
            return self._drop(client)
        try:
            request = m.requests.decode(data)
        except ProtocolError:
            return self._drop(client)
        if isinstance(request, m.Join):
            return self._join(client, request)
        if isinstance(request, m.AgentRequest):
            return self._of_agent(client, request)
        if client.joined is None:
            return self._drop(client)
        if self._owners.get(client.joined.rank) is not client:
            return self._say(client, m.NotKept(f"another process is rank {client.joined.rank} now"))
        handlers: dict[type, Callable[[RankClient, Any], None]] = {
            m.AskSpace: self._ask_space,
            m.SaveDone: self._save_done,
            m.AskHeld: self._ask_held,
            m.AskSaved: self._ask_saved,
        }
        handlers[type(request)](client, request)

    def _drop(self, client: RankClient) -> None:
        """The end of a connection; a save that is being written is lost."""
        if client.gone:
            return
        client.gone = True
        self._clients.discard(client)
        self._selector.unregister(client.connection)
        client.connection.close()
        rank = client.joined.rank if client.joined is not None else -1
        if self._owners.get(rank) is client:
            del self._owners[rank]
            self._store.ranks[rank].abandon()

    def _say(self, client: RankClient, answer: m.Answer, memory: Memory | None = None) -> None:
        client.waits = False
        if client.gone:
            return
        data, fds = m.answers.encode(answer), [] if memory is None else [memory.file.fileno()]
        try:
            socket.send_fds(
                client.connection, [data], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            )
        except OSError:  # it does not read its answers
            self._drop(client)

    # --- requests -----------------------------------------------------------------------------------------------

    def _join(self, client: RankClient, request: m.Join) -> None:
        rank = self._store.rank(request.rank)
        if client.joined is not None or rank is None:
            return self._drop(client)
        client.joined = request
        rank.abandon()  # the newer process is the rank
        rank.copied = False
        self._owners[request.rank] = client
        if len(self._owners) >= request.local_world:
            self._store.leave_all_but(set(self._owners))
        if self._launcher < 0:
            self._follow(request.launcher)
        self._say(client, m.Accepted())

    def _of_agent(self, client: RankClient, request: m.AgentRequest) -> None:
        if isinstance(request, m.AskKept):
            return self._say(client, m.AllKept(self._store.kept()))
        if isinstance(request, m.Serve):
            return self._say(client, self._serve(client, request))
        if self._copies is not None:
            self._copies.follow(request)
        self._say(client, m.Accepted())

    def _serve(self, client: RankClient, request: m.Serve) -> m.Serving:
        from nvrx_slurm.checkpoint.copies import Copies  # TLS: only where there are copies

        self._agent = client
        if self._copies is None:
            self._copies = Copies(self._store, self._tell_agent, self._check)
            works = (self._copies.calls, self._copies.callers)
            for work in works:
                self._selector.register(work.woken, selectors.EVENT_READ, work.finish)
        before = self._copies.listener
        serving = self._copies.serve(request)
        listener = self._copies.listener
        if listener is not None and listener is not before:
            self._selector.register(listener, selectors.EVENT_READ, self._copies.accept)
        return serving

    def _tell_agent(self, sentence: str) -> None:
        if self._agent is not None:
            self._say(self._agent, m.Remark(sentence))

    def _of(self, client: RankClient) -> tuple[m.Join, RankMemory]:
        assert client.joined is not None
        return client.joined, self._store.ranks[client.joined.rank]

    def _ask_space(self, client: RankClient, request: m.AskSpace) -> None:
        joined, _ = self._of(client)
        if request.size <= 0 or request.iteration < 0:
            return self._drop(client)
        size = rounded(request.size)
        local_world = joined.local_world
        problem = self._store.lacks(joined.rank, size, local_world)
        if problem:
            return self._say(client, m.NotKept(problem))
        save = (joined.cycle, request.iteration)
        chosen = self._store.begin(joined.rank, save, joined.world, request.size)
        if chosen.memory is not None:
            return self._say(client, m.Space(chosen.serial), chosen.memory)
        memory = Memory(size)
        memory.used = request.size
        self._store.moving.add(memory)
        client.waits = True
        made = partial(self._made, client, memory, chosen, chosen.serial)
        self._work.do(memory.allocate, made)

    def _made(
        self,
        client: RankClient,
        memory: Memory,
        chosen: Generation,
        serial: int,
        error: OSError | None,
    ) -> None:
        self._store.moving.discard(memory)
        if chosen.serial != serial or chosen.state is not MemoryState.WRITING:
            return self._drop(client)  # another process is the rank now
        if error is not None:
            chosen.step(MemoryEvent.ABANDON)
            why = f"the kernel gives no memory for it: {error.strerror}"
            return self._say(client, m.NotKept(why))
        chosen.memory = memory
        self._say(client, m.Space(serial), memory)

    def _save_done(self, client: RankClient, request: m.SaveDone) -> None:
        joined, rank = self._of(client)
        written = rank.of(request.serial)
        if written is None or written.memory is None:
            return self._drop(client)
        memory = written.memory
        end = request.tree_at + request.tree_size
        is_inside = min(request.tree_at, request.tree_size) >= 0 and end <= memory.used
        if not is_inside or not rank.complete(request.serial):
            return self._drop(client)
        memory.used = end
        memory.tree_at = request.tree_at
        memory.tree_size = request.tree_size
        self._say(client, m.Accepted())
        self._check(joined.rank, written, partial(self._saved, joined.rank))

    def _saved(self, number: int, fits: bool) -> None:
        if fits and self._copies is not None:
            self._copies.offer(number)

    def _ask_held(self, client: RankClient, request: m.AskHeld) -> None:
        joined, rank = self._of(client)
        others = rank.other_worlds(joined.world)
        other = (
            f"a state of rank {joined.rank} is of {others[0]} ranks, not of {joined.world}"
            if others
            else ""
        )
        saves = {one.save for one in rank.held(joined.world)}
        if self._copies is not None:
            for number, save in self._copies.pending:
                if number == joined.rank:
                    saves.add(save)
        newest_first = sorted(saves, reverse=True)
        self._say(client, m.HeldSaves(tuple(newest_first), other))

    def _ask_saved(self, client: RankClient, request: m.AskSaved) -> None:
        joined, rank = self._of(client)
        waiting = None
        if self._copies is not None:
            this = (joined.rank, request.save)
            waiting = self._copies.pending.get(this)
        client.waits = True
        if waiting is not None:
            return waiting.append(partial(self._ask_saved, client, request))
        found = rank.find(joined.world, request.save)
        what = f"iteration {request.save[1]} of rank {joined.rank}"
        if found is None:
            return self._say(client, m.NotKept(f"{what} is not here"))
        memory = found.memory

        def answer(fits: bool) -> None:
            if fits:
                return self._say(client, m.Saved(memory.tree_at, memory.tree_size), memory)
            self._say(client, m.NotKept(f"{what} is damaged: its checksum differs"))

        self._check(joined.rank, found, answer)

    # --- work in threads ----------------------------------------------------------------------------------------

    def _check(self, number: int, what: Generation, then: Callable[[bool], None]) -> None:
        rank, serial = self._store.ranks[number], what.serial

        def checked(found: Any) -> None:
            then(rank.checked(serial, found if isinstance(found, int) else UNREADABLE))

        self._work.do(what.memory.checksum, checked)


def main(argv: list[str]) -> int:
    """NAME LIMIT LAUNCHER LINGER_S: listen, then go on without a parent; the caller's child ends."""
    limit = int(argv[1])
    launcher = int(argv[2])
    linger_s = float(argv[3])
    listener = orphan.listen(argv[0])
    if listener is None:
        return 0
    orphan.become_its_own(listener)
    Keeper(listener, limit, launcher, linger_s).run()
    os._exit(0)  # a thread may be at work
