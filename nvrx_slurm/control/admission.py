"""Admission: the listening socket, and which of its connections may begin a handshake.

`Admission` decides, and is pure. At most HANDSHAKES handshakes run at once, and fewer per address. A failed handshake
keeps its slot for a second, so at most HANDSHAKES per second can fail, and no address gets all slots.
All other connections wait unread, which costs a few hundred bytes. Of the waiting addresses the one with the fewest
slots is next, and of its connections the newest: an agent does not queue behind a thousand idle callers.

`Listener` accepts connections, keeps those without a proof small, and hands the job's token over.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from itertools import islice, takewhile
from time import monotonic

from nvrx_slurm.control.handover import TokenServer
from nvrx_slurm.control.identity import JobIdentity
from nvrx_slurm.control.stream import Stream
from nvrx_slurm.errors import AuthError, ProtocolError, UsageError

HANDSHAKE_TIMEOUT_S = 10.0  # from the connection to the registration
_SHARED_TIMEOUT_S = 2.0  # for a handshake while other connections wait
_FAILED_SLOT_S = 1.0  # for which a failed handshake keeps its slot
HANDSHAKES, _HANDSHAKES_EACH = 128, 96  # at once in all, and for one address
_BACKLOG = 4096  # connections that the kernel accepts before us
_ACCEPTS = 64  # at a time, before the loop does something else
_ACCEPT_PAUSE_S = 0.5  # when no descriptor is left
# after a turn in which callers had to make room: they may come back as fast as they like
_FULL_PAUSE_S = 0.1
_MOST_CALLERS = 8192
_REFUSALS_SAID = 5
_TLS_HANDSHAKE = b"\x16"  # first byte of a TLS record; that of a short frame is 0


class Caller:
    """One connection: without a proof until it has registered."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.socket = connection
        self.address = address
        self.stream: Stream | None = None  # from the first byte of TLS on
        self.task: asyncio.Task[None] | None = None  # hands the token over
        self.greeted = False
        self.node_id = ""  # "" = not registered
        # our last answer; the peer has sent its last beat at that time or later
        self.answered_s = self.sent_s = monotonic()

    def abort(self, why: Exception) -> None:
        """End its stream."""
        if self.stream is not None:
            self.stream.abort(why)


class Admission:
    """Connections without a proof. All times are monotonic seconds."""

    def __init__(self, most: int) -> None:
        """`most`: connections without a proof at a time; beyond, the oldest of the busiest address goes."""
        self._most = most
        self._arrived: dict[Caller, tuple[str, float]] = {}  # all, oldest first
        self._waiting: dict[str, dict[Caller, None]] = {}  # by address, oldest first
        self._begun: dict[Caller, float] = {}  # since when, oldest first
        self._taken: Counter[str] = Counter()  # slots by address
        self._failed: deque[tuple[float, str]] = deque()  # until when whose slot stays taken

    def arrive(self, connection: Caller, address: str, now: float) -> list[Caller]:
        """A connection was accepted. Returns those that have to make room for it."""
        self._arrived[connection] = address, now
        self._waiting.setdefault(address, {})[connection] = None
        if len(self._arrived) <= self._most:
            return []
        busiest = max(self._waiting.values(), key=len)
        return [next(iter(busiest))]

    def unproved(self) -> list[Caller]:
        """All connections without a proof."""
        return list(self._arrived)

    def leave(self, connection: Caller, proved: bool, now: float) -> None:
        """A connection has registered or has ended. One that is not here is ignored."""
        address, _ = self._arrived.pop(connection, ("", 0.0))
        waiting = self._waiting.get(address, {})
        if connection in waiting:
            del waiting[connection]
            if not waiting:
                del self._waiting[address]
        elif self._begun.pop(connection, None) is not None:
            if proved:
                self._taken[address] -= 1
            else:
                self._failed.append((now + _FAILED_SLOT_S, address))

    def late(self, now: float) -> list[Caller]:
        """Connections whose time is over: to be closed, and then to `leave`."""
        gone = [
            g
            for g, _ in takewhile(
                lambda item: item[1][1] + HANDSHAKE_TIMEOUT_S <= now, self._arrived.items()
            )
        ]
        if self._waiting:
            gone += [
                g
                for g, _ in takewhile(
                    lambda item: item[1] + _SHARED_TIMEOUT_S <= now, self._begun.items()
                )
            ]
        return list(dict.fromkeys(gone))

    def admit(self, now: float) -> list[Caller]:
        """Connections that may begin their handshake now."""
        while self._failed and self._failed[0][0] <= now:
            self._taken[self._failed.popleft()[1]] -= 1
        self._taken += Counter()  # forget addresses without a slot
        admitted = []
        while self._waiting and self._taken.total() < HANDSHAKES:
            # of 10,000 addresses, as a rule the first
            fresh = (one for one in self._waiting if not self._taken[one])
            address = next(fresh, None) or min(self._waiting, key=lambda one: self._taken[one])
            if self._taken[address] >= _HANDSHAKES_EACH:
                break
            connection, _ = self._waiting[address].popitem()
            if not self._waiting[address]:
                del self._waiting[address]
            self._taken[address] += 1
            self._begun[connection] = now
            admitted.append(connection)
        return admitted

    def deadline(self) -> float | None:
        """When `late` or `admit` will have something new, or None."""
        oldest = next(iter(self._arrived.values()), None)
        times = [] if oldest is None else [oldest[1] + HANDSHAKE_TIMEOUT_S]
        if self._waiting:
            times += [self._failed[0][0]] if self._failed else []
            times += [since + _SHARED_TIMEOUT_S for since in islice(self._begun.values(), 1)]
        return min(times, default=None)


class Listener:
    """Connections until they register. `on_frame(peer, frame)` and `on_end(peer, why)` are what `Stream` calls; the end
    of a stream has to be told to `left`.

    `tokens` hands the job's token over; None: it is not handed out. `say` gets the first refusals. `identity`, of the
    job, is to be set before the first connection.
    """

    identity: JobIdentity

    def __init__(
        self,
        on_frame: Callable[[Caller, bytes], None],
        on_end: Callable[[Caller, Exception], None],
        tokens: TokenServer | None,
        say: Callable[[str], None],
    ) -> None:
        self._on_frame, self._on_end, self._tokens, self._say = on_frame, on_end, tokens, say
        # descriptors are for the job first
        callers = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4
        self._admission = Admission(max(2 * HANDSHAKES, min(_MOST_CALLERS, callers)))
        self._refusals = 0
        self._listener: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tending = False

    @property
    def port(self) -> int:
        """Where it listens; 0: it does not."""
        return int(self._listener.getsockname()[1]) if self._listener is not None else 0

    def fileno(self) -> int:
        """The descriptor of the listening socket; -1: there is none."""
        return -1 if self._listener is None else self._listener.fileno()

    def take(self, listener: socket.socket) -> None:
        """Accept connections on a socket that listens already; `close` closes it."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def open(self, address: str, ports: list[int]) -> None:
        """Listen on the first free one of `ports` at the IP `address`. Raises UsageError when none is free."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        both = address == "::"
        for port in ports:
            with contextlib.suppress(
                OSError, ValueError
            ):  # ValueError: "::" where there is no IPv6
                end = (address, port)
                return self.take(
                    socket.create_server(end, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
                )
        raise UsageError(
            f"the coordinator cannot listen on {address}: ports {', '.join(map(str, ports))} are taken or the address"
            f" is not this host's; give another with --rdzv-endpoint HOST:PORT"
        )

    def close(self) -> None:
        """Stop listening; callers are closed."""
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for peer in self._admission.unproved():
            self._close(peer, ConnectionError("the coordinator ends"))
        if self._timer is not None:
            self._timer.cancel()

    def admitted(self, peer: Caller) -> None:
        """Let it go: it holds the token, and the server bounds it from now on."""
        self._admission.leave(peer, True, self._loop.time())
        self._tend_soon()

    def left(self, peer: Caller, why: Exception) -> None:
        """Forget a caller whose connection has ended."""
        if isinstance(why, (AuthError, ProtocolError)):
            self.say_refusal(f"refused a connection from {peer.address}: {why}")
        self._admission.leave(peer, False, self._loop.time())
        self._tend_soon()

    def say_refusal(self, sentence: str) -> None:
        """Say the first few; callers must not fill the log."""
        self._refusals += 1
        if self._refusals <= _REFUSALS_SAID:
            self._say(sentence)

    def _accept(self) -> None:
        assert self._listener is not None
        full = False
        for _ in range(_ACCEPTS):
            try:
                connection, source = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                break
            except (
                OSError
            ) as error:  # no descriptor (EMFILE, ENFILE) or no memory: members must not notice
                self.say_refusal(f"cannot accept connections: {error.strerror}; trying again")
                self._pause(_ACCEPT_PAUSE_S)
                break
            connection.setblocking(False)
            # a Unix socket's has none
            address = source[0].removeprefix("::ffff:") if source else ""
            for peer in self._admission.arrive(
                Caller(connection, address), address, self._loop.time()
            ):
                full = True
                self._close(peer, ConnectionError("newer connections took its slot"))
        if full:
            self._pause(_FULL_PAUSE_S)
        self._tend()

    def _pause(self, seconds: float) -> None:
        assert self._listener is not None
        self._loop.remove_reader(self._listener)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept)

    def _tend_soon(self) -> None:
        if not self._tending:
            self._tending = True
            self._loop.call_soon(self._tend)

    def _tend(self) -> None:
        """Let callers in or out, and set the timer for the next time."""
        self._tending = False
        if self._listener is None:
            return
        now = self._loop.time()
        for peer in self._admission.late(now):
            self._close(peer, ProtocolError("it did not finish the handshake in time"))
        for peer in self._admission.admit(now):
            self._begin(peer)
        if self._timer is not None:
            self._timer.cancel()
        due = self._admission.deadline()
        self._timer = None if due is None else self._loop.call_at(due, self._tend)

    def _begin(self, peer: Caller) -> None:
        """The first byte of an admitted connection tells what it wants."""
        try:
            first = peer.socket.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return self._loop.add_reader(peer.socket.fileno(), self._begin, peer)
        except OSError as error:
            return self._close(peer, error)
        if first == _TLS_HANDSHAKE:
            with contextlib.suppress(OSError):
                peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.answered_s = peer.sent_s = self._loop.time()
            on_frame = partial(self._on_frame, peer)
            on_end = partial(self._on_end, peer)
            peer.stream = Stream(peer.socket, self.identity, True, on_frame, on_end)
        elif first == b"\0" and self._tokens is not None:
            self._loop.remove_reader(peer.socket.fileno())
            peer.task = self._loop.create_task(self._hand_over(peer, self._tokens))
        elif first == b"\0":
            self._close(peer, AuthError("it asks for a token, and this coordinator hands out none"))
        else:
            self._close(
                peer,
                ProtocolError("it speaks another protocol")
                if first
                else ConnectionError("it left"),
            )

    async def _hand_over(self, peer: Caller, tokens: TokenServer) -> None:
        why: Exception = ConnectionError("it has its answer")
        try:
            await tokens.serve(peer.socket)
        except (AuthError, ProtocolError, OSError) as error:
            why = error
        peer.task = None
        self._close(peer, why)

    def _close(self, peer: Caller, why: Exception) -> None:
        """End this connection, whatever it has become."""
        peer.abort(why)
        if peer.stream is None and peer.socket.fileno() >= 0:
            if peer.task is not None:
                peer.task.cancel()
            self._loop.remove_reader(peer.socket.fileno())
            peer.socket.close()
            self.left(peer, why)
