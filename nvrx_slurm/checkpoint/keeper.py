"""The keeper: the process of a node that owns the memory of checkpoints.

It ends a while after the launcher of the ranks, unless ranks of another launcher have come by then. No torch.
Checksums, the making of memory and copies are in threads; one of all decides at a time.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.checkpoint import orphan
from nvrx_slurm.checkpoint.copies import Copies
from nvrx_slurm.checkpoint.link import is_stranger
from nvrx_slurm.checkpoint.memory import Memory, rounded
from nvrx_slurm.checkpoint.store import Store
from nvrx_slurm.checkpoint.work import Work
from nvrx_slurm.core.checkpoint.memory import Generation, RankMemory
from nvrx_slurm.errors import ProtocolError

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
        self._lock = threading.RLock()  # of who decides
        self._work = Work(_THREADS, self._lock)
        self._store = Store(limit)
        self._copies = Copies(
            self._store,
            self._lock,
            self._tell_agent,
            self._check,
        )
        self._agent: RankClient | None = None  # that gets sentences
        self._clients: set[RankClient] = set()
        self._owners: dict[int, RankClient] = {}  # by rank: the process that may save
        self._launchers: dict[int, int] = {}  # pidfds of those that run
        self._ends_at = 0.0
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._follow(launcher)

    def run(self) -> None:
        """Until all launchers have ended, and none has come since then."""
        while self._launchers or time.monotonic() < self._ends_at:
            left_s = None if self._launchers else max(0.0, self._ends_at - time.monotonic())
            for key, _ in self._selector.select(left_s):
                with self._lock:
                    key.data()

    # --- launchers ----------------------------------------------------------------------------------------------

    def _follow(self, launcher: int) -> None:
        self._ends_at = time.monotonic() + self._linger_s
        if launcher not in self._launchers:
            with suppress(OSError):  # it has ended, or is of another pid namespace
                self._launchers[launcher] = pidfd = os.pidfd_open(launcher)
                ended = partial(self._launcher_ended, launcher)
                self._selector.register(pidfd, selectors.EVENT_READ, ended)

    def _launcher_ended(self, launcher: int) -> None:
        pidfd = self._launchers.pop(launcher)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._ends_at = time.monotonic() + self._linger_s

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
            self._store.ranks[rank].writing = None

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
        rank.writing = None  # the newer process is the rank
        rank.copied = False
        self._owners[request.rank] = client
        if len(self._owners) >= request.local_world:
            self._store.leave_all_but(set(self._owners))
        self._follow(request.launcher)
        self._say(client, m.Accepted())

    def _of_agent(self, client: RankClient, request: m.AgentRequest) -> None:
        if isinstance(request, m.AskKept):
            return self._say(client, m.AllKept(self._store.kept()))
        if isinstance(request, m.Serve):
            return self._say(client, self._serve(client, request))
        self._copies.follow(request)
        self._say(client, m.Accepted())

    def _serve(self, client: RankClient, request: m.Serve) -> m.Serving:
        self._agent = client
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
        joined, rank = self._of(client)
        if request.size <= 0 or request.iteration < 0:
            return self._drop(client)
        size = rounded(request.size)
        problem = self._store.lacks(joined.rank, size, joined.local_world)
        if problem:
            return self._say(client, m.NotKept(problem))
        chosen = Generation(joined.cycle, request.iteration, joined.world)
        memory = self._store.place(joined.rank, request.size, may_tear=True)
        rank.writing = chosen
        if memory is None:
            memory = Memory(size)
            self._store.moving.add(memory)
            client.waits = True
            made = partial(self._made, client, memory, rank, chosen)
            self._work.do(memory.allocate, made)
        else:
            self._made(client, memory, rank, chosen, None)
        memory.used = request.size

    def _made(
        self,
        client: RankClient,
        memory: Memory,
        rank: RankMemory,
        chosen: Generation,
        error: OSError | None,
    ) -> None:
        self._store.moving.discard(memory)
        if rank.writing is not chosen:
            return self._drop(client)  # another process is the rank now
        if error is not None:
            rank.writing = None
            why = f"the kernel gives no memory for it: {error.strerror}"
            return self._say(client, m.NotKept(why))
        chosen.memory = memory
        self._say(client, m.Space(), memory)

    def _save_done(self, client: RankClient, request: m.SaveDone) -> None:
        joined, rank = self._of(client)
        written = rank.writing
        if written is None or written.memory is None:
            return self._drop(client)
        rank.complete(written)
        self._say(client, m.Accepted())
        self._check(joined.rank, written, lambda _: self._copies.offer(joined.rank))

    def _ask_held(self, client: RankClient, request: m.AskHeld) -> None:
        joined, rank = self._of(client)
        world = joined.world
        other = max((one.world for one in rank.held if one.world != world), default=0)
        saves = {one.save for one in rank.held if one.world == world}
        saves.update(save for number, save in self._copies.pending if number == joined.rank)
        newest_first = sorted(saves, reverse=True)
        self._say(client, m.HeldSaves(tuple(newest_first), other))

    def _ask_saved(self, client: RankClient, request: m.AskSaved) -> None:
        joined, rank = self._of(client)
        waiting = self._copies.pending.get((joined.rank, request.save))
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
                return self._say(client, m.Saved(memory.used, found.is_copy), memory)
            self._say(client, m.NotKept(f"{what} is damaged: its checksum differs"))

        self._check(joined.rank, found, answer)

    # --- work in threads ----------------------------------------------------------------------------------------

    def _check(self, number: int, what: Generation, then: Callable[[bool], None]) -> None:
        rank = self._store.ranks[number]

        def checked(found: Any) -> None:
            then(rank.checked(what, found if isinstance(found, int) else -1))

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
