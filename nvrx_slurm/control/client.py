"""The agent's end: one try to reach the coordinator, and one stream to it.

An agent sends a beat each interval, by its own event loop, and the coordinator answers it. A coordinator that does not
answer is lost. So is one whose answer this agent could not take in time, because the agent was stopped or blocked.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from nvrx_slurm import types as t
from nvrx_slurm.control import addresses, auth, handover
from nvrx_slurm.control.admission import HANDSHAKE_TIMEOUT_S
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.messages import FROM_AGENTS, FROM_COORDINATOR
from nvrx_slurm.control.stream import AGE, BEAT, Stream
from nvrx_slurm.core.agent import events as ev
from nvrx_slurm.errors import AuthError, ProtocolError
from nvrx_slurm.system import bounded

_CONNECT_TIMEOUT_S = 3.0
_EARLIER = 0.6  # an agent sees silence this much earlier than its coordinator, and has begun to stop its workers
T = TypeVar("T")


class ControlClient:
    """One agent's stream, whose owner it is. `post` gets Connected, messages, Disconnected; or Unreached.

    `endpoints`: candidates as (host, port), tried once, in order. `token` "" = ask for it with `credentials`.
    `keepalive`: interval and timeout, seconds. `say` is told of programs that do not hold the token. How it ended:
    `refused`, `silent`.
    `on_beat(sent_s)` is called with each answer to a beat. Raises UsageError.
    """

    def __init__(
        self,
        endpoints: Sequence[tuple[str, int]],
        job: str,
        token: str,
        post: Callable[[Any], None],
        keepalive: tuple[float, float],
        credentials: auth.Credentials | None = None,
        say: Callable[[str], None] = lambda sentence: None,
        on_beat: Callable[[float], None] = lambda sent_s: None,
    ) -> None:
        self._endpoints = list(endpoints)
        self._job = job
        self.token = token  # of the job, as far as it is known
        self._post = post
        self._interval_s, self._timeout_s = (seconds * _EARLIER for seconds in keepalive)
        self._credentials = credentials
        self._say = say
        self._on_beat = on_beat
        self._stream: Stream | None = None
        self._open = self._closing = False
        self._ended: asyncio.Future[Exception]  # of the stream
        self._beat_s, self._answered, self._answered_s = 0.0, True, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self.refused = self.silent = False  # how it ended
        self.last_problem = "not tried yet"
        if token:
            identity(token, job)  # raises UsageError here rather than later

    @property
    def addresses(self) -> tuple[str, str]:
        """The IP addresses of this host and of the coordinator on the stream; "" without one."""
        return ("", "") if self._stream is None else self._stream.addresses

    def start(self) -> None:
        """Begin to look for the coordinator (on the running loop)."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(bounded.report_defect)

    def send(self, message: t.AgentMessage) -> None:
        """Send a message; without a stream it is dropped: the next Register tells what matters."""
        if self._stream is not None:
            self._stream.send(FROM_AGENTS.encode(message))

    async def close(self, grace_s: float) -> None:
        """Deliver what was sent (at most `grace_s` seconds), then close the stream."""
        if self._task is None:
            return
        self._closing = True
        if self._stream is not None and self._open:
            self._stream.finish(grace_s)
            await asyncio.wait({self._ended}, timeout=grace_s)
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=grace_s)

    # --- finding the coordinator ----------------------------------------------------------------------

    async def _run(self) -> None:
        refused = 0
        for host, port in self._endpoints:
            try:
                return await self._try(host, port)
            except (AuthError, ProtocolError) as error:
                refused += 1
                self.last_problem = f"{host}:{port} is not our coordinator: {error}"
                self._say(f"{self.last_problem}; looking on")
            except OSError as error:
                refused += isinstance(error, ConnectionRefusedError)
                self.silent = self.silent or isinstance(error, TimeoutError)
                self.last_problem = f"{host}:{port}: {error.strerror or error}"
        self.refused = refused == len(self._endpoints)
        self._post(ev.Unreached(self.last_problem))

    async def _try(self, host: str, port: int) -> None:
        """One endpoint: returns when a stream to our coordinator has ended. Raises an error if it never began."""
        problem: Exception = OSError("it has no address")
        for family, _, _, _, address in await addresses.find(host, port):
            try:
                if not self.token:
                    self.token = await _in_time(
                        self._ask_for_token(family, address), HANDSHAKE_TIMEOUT_S
                    )
                return await self._talk(family, address)
            except (AuthError, ProtocolError, OSError) as error:
                problem = error
        raise problem

    async def _ask_for_token(self, family: int, address: Any) -> str:
        with await _connect(family, address) as connection:
            return await handover.ask(connection, self._credentials, self._job)

    # --- the stream ------------------------------------------------------------------------------------

    async def _talk(self, family: int, address: Any) -> None:
        connection = await _connect(family, address)
        self._ended = self._loop.create_future()
        self._wake(self._loop.time() + HANDSHAKE_TIMEOUT_S)
        self._stream = stream = Stream(
            connection,
            identity(self.token, self._job),
            False,
            self._received,
            self._on_end,
            self._on_proved,
        )
        try:
            why = await self._ended
        finally:
            stream.abort(ConnectionError("it was closed"))
            self._stream = None
        if not self._open:
            raise why
        self._open = False
        if not self._closing:
            self._post(ev.Disconnected(str(why)))

    def _on_proved(self) -> None:
        """Begin to talk: it is our coordinator."""
        self._open = True
        assert self._stream is not None
        self._stream.send(FROM_AGENTS.encode(t.Hello(auth.VERSION)))
        self._beat_s = self._loop.time()
        self._answered = True
        self._answered_s = self._beat_s
        self._wake(self._beat_s + self._interval_s)
        self._post(ev.Connected())

    def _received(self, frame: bytes) -> None:
        """Take a message, or the answer to a beat. Raises ProtocolError."""
        if frame != BEAT:
            return self._post(FROM_COORDINATOR.decode(frame))
        self._answered, self._answered_s = True, self._loop.time()
        self._on_beat(self._beat_s)
        self._wake(self._beat_s + self._interval_s)

    def _on_end(self, why: Exception) -> None:
        """The stream has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if not self._ended.done():
            self._ended.set_result(why)

    def _wake(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at_s, self._beat)

    def _beat(self) -> None:
        """The interval is over, or the time for an answer or for the handshake."""
        now = self._loop.time()
        assert self._stream is not None
        since_s = now - self._beat_s
        if not self._open:
            return self._stream.abort(ConnectionError("no answer in time"))
        if (
            since_s >= self._interval_s + self._timeout_s
        ):  # this call is late: nothing is known of the coordinator
            self._stream.abort(
                ConnectionError(f"this agent was stopped or blocked for {since_s:.1f} s")
            )
        elif not self._answered:
            self.silent = True
            self._stream.abort(ConnectionError(f"the coordinator was silent for {since_s:.1f} s"))
        else:
            self._beat_s = now
            self._answered = False
            self._wake(now + self._timeout_s)
            self._stream.send(AGE.pack(now - self._answered_s))


async def _in_time(call: Awaitable[T], seconds: float) -> T:
    """The result of `call`. Raises TimeoutError, an OSError, after `seconds`."""
    try:
        return await bounded.wait_for(call, seconds)
    except asyncio.TimeoutError:
        raise TimeoutError("no answer in time") from None


async def _connect(family: int, address: Any) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _in_time(
            asyncio.get_running_loop().sock_connect(connection, address), _CONNECT_TIMEOUT_S
        )
    except BaseException:
        connection.close()
        raise
    return connection
