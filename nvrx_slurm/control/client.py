"""The agent's end: finds the coordinator, and keeps one stream to it open.

An agent sends a beat each interval, by its own event loop, and the coordinator answers it. A coordinator that does not
answer is lost. So is one whose answer this agent could not take in time, because the agent was stopped or blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from nvrx_slurm import types as t
from nvrx_slurm.control import auth, codec
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.control.door import HANDSHAKE_TIMEOUT_S
from nvrx_slurm.control.identity import identity
from nvrx_slurm.control.stream import BEAT, Stream, receive_frame, send_frame
from nvrx_slurm.core.job import agent_events as ev
from nvrx_slurm.errors import AuthError, ExitCode, ProtocolError
from nvrx_slurm.system import bounded

_FIRST_RETRY_S, _LAST_RETRY_S, _RETRY_GROWTH = 0.01, 1.0, 1.6
_RESOLVE_TIMEOUT_S = _CONNECT_TIMEOUT_S = 3.0
_FOREIGN_S = 2.0  # for which strangers have to hold all endpoints; a coordinator of the last job may still be ending
_EARLIER = 0.6  # an agent sees silence this much earlier than its coordinator, and has begun to stop its workers
_PROBLEMS_SAID = 8
T = TypeVar("T")


class _NotThere(Exception):
    """Nothing of ours listens at this endpoint (yet); try the next one."""


class _Foreign(_NotThere):
    """A program that is not this job's coordinator has this endpoint."""


class ControlClient:
    """One agent's stream, whose owner it is. `post` gets the agent's events: Connected, messages, Disconnected.

    `endpoints`: candidates as (host, port), tried in order. `token` "" = ask for it with `credentials`.
    `keepalive`: interval and timeout, seconds. `say` gets each different problem once. `once`: after one try of all
    endpoints, or one stream, it is done, and posts Unreached or Disconnected; `refused` and `silent` say more.
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
        once: bool = False,
    ) -> None:
        self._endpoints = list(endpoints)
        self._job, self._token = job, token
        self._post = post
        self._interval_s, self._timeout_s = (seconds * _EARLIER for seconds in keepalive)
        self._credentials = credentials
        self._say = say
        self._said: set[str] = set()
        self._stream: Stream | None = None
        self._open = self._met = self._closing = False
        self._ended: asyncio.Future[Exception]  # of the stream
        self._foreign_since_s: float | None = None
        self._beat_s, self._answered = 0.0, True
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._once = once
        self.refused = self.silent = False  # how it ended
        self.on_beat: Callable[[float], None] = lambda sent_s: None
        self.last_problem = "not tried yet"
        if token:
            identity(token, job)  # raises UsageError here rather than later

    @property
    def token(self) -> str:
        """The job's token, as far as it is known."""
        return self._token

    def start(self) -> None:
        """Begin to look for the coordinator (on the running loop)."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(_report_defect)

    def send(self, message: t.AgentMessage) -> None:
        """Send a message; without a stream it is dropped: the next Register tells what matters."""
        if self._stream is not None:
            self._stream.send(codec.from_agent(message).SerializeToString())

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
        delay = _FIRST_RETRY_S
        # up to Python 3.11 wait_for() may lose a cancellation that coincides with the end of its awaitable
        while not self._closing:
            foreign = refusals = 0
            for host, port in self._endpoints:
                try:
                    await self._try(host, port)
                    if self._once:
                        return
                    delay = _FIRST_RETRY_S
                except _NotThere as why:
                    self.last_problem = f"{host}:{port}: {why}"
                    foreign += isinstance(why, _Foreign)
                    refusals += isinstance(why.__cause__, ConnectionRefusedError)
                    self.silent = self.silent or isinstance(why.__cause__, TimeoutError)
                if self._closing:
                    return
            if self._once:
                self.refused = refusals + foreign == len(self._endpoints)
                return self._post(ev.Unreached(self.last_problem))
            self._judge(foreign == len(self._endpoints))
            await asyncio.sleep(delay * random.uniform(0.7, 1.3))
            delay = min(delay * _RETRY_GROWTH, _LAST_RETRY_S)

    def _judge(self, all_foreign: bool) -> None:
        """Where others hold all endpoints, this job's coordinator can be at none: the agent ends."""
        if not all_foreign or self._met:
            self._foreign_since_s = None
        elif self._foreign_since_s is None:
            self._foreign_since_s = self._loop.time()
        elif self._loop.time() - self._foreign_since_s >= _FOREIGN_S:
            why = f"no coordinator of this job can be reached: {self.last_problem}"
            self._post(t.Refused(ExitCode.COORDINATOR_LOST, why))
            self._closing = True

    async def _try(self, host: str, port: int) -> None:
        """One endpoint: returns when a stream to our coordinator has ended; raises _NotThere if it never began."""
        problem: _NotThere = _NotThere("it has no address")
        for family, _, _, _, address in await _addresses(host, port):
            try:
                if not self._token:
                    self._token = await _in_time(self._ask_for_token(family, address), HANDSHAKE_TIMEOUT_S)
                return await self._talk(family, address)
            except (AuthError, ProtocolError) as error:
                self._say_once(f"{host}:{port} is not our coordinator: {error}; looking on")
                problem = _Foreign(str(error))
            except OSError as error:
                problem = _NotThere(error.strerror or str(error))
                problem.__cause__ = error
        raise problem

    def _say_once(self, sentence: str) -> None:
        """The listener may be a stranger, so the search goes on; each problem is said once."""
        if sentence not in self._said and len(self._said) < _PROBLEMS_SAID:
            self._said.add(sentence)
            self._say(sentence)

    async def _ask_for_token(self, family: int, address: Any) -> str:
        credentials = self._credentials
        if credentials is None:
            raise AuthError(f"{auth.TOKEN_ENV} is not set and there is no MUNGE to get the job's token with")
        sealed = await auth.in_thread(lambda: auth.seal_request(credentials, self._job))
        with await _connect(family, address) as connection:
            request = pb.TokenRequest(job=self._job, credential=sealed)
            await send_frame(connection, request.SerializeToString())
            reply = codec.parse(pb.TokenReply, await receive_frame(connection))
        return await auth.in_thread(lambda: auth.read_answer(credentials, self._job, reply.credential))

    # --- the stream ------------------------------------------------------------------------------------

    async def _talk(self, family: int, address: Any) -> None:
        connection = await _connect(family, address)
        self._ended = self._loop.create_future()
        late = self._loop.call_later(HANDSHAKE_TIMEOUT_S, self._too_late)
        self._stream = stream = Stream(connection, identity(self._token, self._job), False, self)
        try:
            why = await self._ended
        finally:
            late.cancel()
            stream.abort(ConnectionError("it was closed"))
            self._stream = None
        if not self._open:
            raise why
        self._open = False
        self.last_problem = str(why)
        if not self._closing:
            self._post(ev.Disconnected(str(why)))

    def _too_late(self) -> None:
        if self._stream is not None and not self._open:
            self._stream.abort(ConnectionError("no answer in time"))

    def proved(self) -> None:
        """It is our coordinator."""
        self._open = self._met = True
        assert self._stream is not None
        self._stream.send(pb.FromAgent(hello=pb.Hello(version=auth.VERSION)).SerializeToString())
        self._beat_s, self._answered = self._loop.time(), True
        self._wake(self._beat_s + self._interval_s)
        self._post(ev.Connected())

    def received(self, frame: bytes) -> None:
        """A message, or the answer to a beat. Raises ProtocolError."""
        if frame != BEAT:
            return self._post(codec.decode(codec.parse(pb.FromCoordinator, frame)))
        self._answered = True
        self.on_beat(self._beat_s)
        self._wake(self._beat_s + self._interval_s)

    def ended(self, why: Exception) -> None:
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
        """The interval is over, or the time for an answer."""
        now = self._loop.time()
        assert self._stream is not None
        since_s = now - self._beat_s
        self.silent = True
        if not self._answered:
            self._stream.abort(ConnectionError(f"the coordinator was silent for {since_s:.1f} s"))
        elif since_s >= self._interval_s + self._timeout_s:
            self._stream.abort(ConnectionError(f"this agent was stopped or blocked for {since_s:.1f} s"))
        else:
            self.silent = False
            self._beat_s, self._answered = now, False
            self._wake(now + self._timeout_s)
            self._stream.send(BEAT)


async def _in_time(call: Awaitable[T], seconds: float) -> T:
    """The result of `call`. Raises TimeoutError, an OSError, after `seconds`."""
    try:
        return await asyncio.wait_for(call, seconds)
    except asyncio.TimeoutError:
        raise TimeoutError("no answer in time") from None


async def _connect(family: int, address: Any) -> socket.socket:
    """A connected, non-blocking socket. Raises OSError."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await _in_time(asyncio.get_running_loop().sock_connect(connection, address), _CONNECT_TIMEOUT_S)
    except BaseException:
        connection.close()
        raise
    return connection


async def _addresses(host: str, port: int) -> list[tuple[Any, ...]]:
    """The addresses of `host` as getaddrinfo gives them. Raises _NotThere."""
    with contextlib.suppress(OSError):  # a number needs no resolver, and no thread
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    try:
        return await bounded.call_async(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), _RESOLVE_TIMEOUT_S, "the resolver"
        )
    except (OSError, bounded.Overrun, RuntimeError) as error:
        raise _NotThere(str(error)) from None


def _report_defect(task: asyncio.Task[None]) -> None:
    """The task ends only by cancellation. Report any other end at once: no code awaits its result."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        task.get_loop().call_exception_handler({"message": "the control client broke", "exception": error})
