"""Hands the job's token to agents that Slurm started without one: both ends. MUNGE proves that their user is the same.

One frame each way, without TLS. Calls of MUNGE may block: they run in a thread, with a bound.
"""

from __future__ import annotations

import asyncio
import socket

from nvrx_slurm.codec import Wire
from nvrx_slurm.control.auth import TOKEN_ENV, Credentials, in_thread
from nvrx_slurm.control.stream import UNPROVED_BYTES
from nvrx_slurm.errors import AuthError, ProtocolError
from nvrx_slurm.types import TokenReply, TokenRequest

REQUESTS, REPLIES = Wire[TokenRequest](TokenRequest), Wire[TokenReply](TokenReply)
_REQUEST = b"nvrx-token-request\0"
_TOKEN = b"nvrx-token\0"


class TokenServer:
    """The coordinator's end. MUNGE is asked for one request at a time."""

    def __init__(self, credentials: Credentials, job: str) -> None:
        self._credentials = credentials
        self._job = job
        self.token = ""  # not known yet
        self._one_by_one = asyncio.Lock()

    async def serve(self, connection: socket.socket) -> None:
        """Answer the request that comes on `connection`; the caller bounds it. Raises as `ask`."""
        request = REQUESTS.decode(await _receive(connection))
        await self._one_by_one.acquire()
        answer = asyncio.ensure_future(in_thread(lambda: self.answer(request.credential)))
        answer.add_done_callback(self._answered)
        sealed = await asyncio.shield(answer)  # a caller that leaves makes no room for another call
        await _send(connection, REPLIES.encode(TokenReply(sealed)))

    def answer(self, credential: str) -> str:
        """The token, sealed for the user that sealed `credential`. Raises AuthError, ConnectionError."""
        if not self.token:
            # who asks comes again, and nobody is refused
            raise ConnectionError("a token was asked for, and this agent does not know it yet")
        if self._credentials.open(credential) != _REQUEST + self._job.encode():
            raise AuthError("a token was asked for with a credential of another job")
        return self._credentials.seal(_TOKEN + self._job.encode() + b"\0" + self.token.encode())

    def _answered(self, answer: asyncio.Future[str]) -> None:
        self._one_by_one.release()
        if not answer.cancelled():
            answer.exception()  # else asyncio complains where the peer has left


def request(credentials: Credentials, job: str) -> str:
    """Credential by which an agent asks for the token. Raises AuthError."""
    return credentials.seal(_REQUEST + job.encode())


def read_answer(credentials: Credentials, job: str, sealed: str) -> str:
    """The token in an answer. Raises AuthError."""
    payload = credentials.open(sealed)
    head = _TOKEN + job.encode() + b"\0"
    if not payload.startswith(head):
        raise AuthError("the answer with the token is of another job")
    return payload[len(head) :].decode("ascii", "replace")


async def ask(connection: socket.socket, credentials: Credentials | None, job: str) -> str:
    """The agent's end: the token. The caller bounds it. Raises AuthError, ProtocolError, OSError."""
    if credentials is None:
        raise AuthError(f"{TOKEN_ENV} is not set and there is no MUNGE to get the job's token with")
    sealed = await in_thread(lambda: request(credentials, job))
    await _send(connection, REQUESTS.encode(TokenRequest(job, sealed)))
    reply = REPLIES.decode(await _receive(connection))
    return await in_thread(lambda: read_answer(credentials, job, reply.credential))


async def _receive(connection: socket.socket) -> bytes:
    """A frame of at most 16 KiB. Raises ProtocolError, OSError."""
    loop = asyncio.get_running_loop()
    data = b""
    size = 0  # of the frame, as far as its head has come
    while len(data) < 4 + size:
        more = await loop.sock_recv(connection, 4096)
        if not more:
            raise ProtocolError("the peer sent no whole frame")
        data += more
        size = int.from_bytes(data[:4], "big")
        if max(size, len(data)) > UNPROVED_BYTES:
            raise ProtocolError("the peer sent too long a frame")
    return data[4:]


async def _send(connection: socket.socket, frame: bytes) -> None:
    head = len(frame).to_bytes(4, "big")
    await asyncio.get_running_loop().sock_sendall(connection, head + frame)
