"""The job's secret token: made once per job, passed on in the environment, and handed over only sealed by MUNGE.

`identity.py` derives from it what the two ends of a connection prove to each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

from nvrx_slurm.errors import AuthError
from nvrx_slurm.system import bounded

VERSION = 2  # of the wire protocol in control.proto
TOKEN_ENV = "NVRX_TOKEN"
_MUNGE_TIMEOUT_S = 8.0
T = TypeVar("T")


class Credentials(Protocol):
    """A site's user authentication (MUNGE): credentials that only the same user can make and open."""

    def seal(self, payload: bytes) -> str:
        """Seal `payload`. Raises AuthError."""

    def open(self, credential: str) -> bytes:
        """Payload of a credential that the same user sealed. Raises AuthError for any other."""


def new_token() -> str:
    """A fresh token: 32 random bytes, hex."""
    return secrets.token_hex(32)


async def in_thread(call: Callable[[], T]) -> T:
    """Run a call of MUNGE, which may block, in a thread. Raises AuthError, also after 8 s without an answer."""
    try:
        return await bounded.call_async(call, _MUNGE_TIMEOUT_S, "MUNGE")
    except (bounded.Overrun, RuntimeError) as error:
        raise AuthError(str(error)) from None


def seal_request(credentials: Credentials, job: str) -> str:
    """Credential by which an agent without a token asks for it."""
    return credentials.seal(b"nvrx-token-request\0" + job.encode())


def answer_request(credentials: Credentials, job: str, token: str, credential: str) -> str:
    """The coordinator's answer: the token, sealed for the same user. Raises AuthError."""
    if credentials.open(credential) != b"nvrx-token-request\0" + job.encode():
        raise AuthError("a token was asked for with a credential of another job")
    return credentials.seal(b"nvrx-token\0" + job.encode() + b"\0" + token.encode())


def read_answer(credentials: Credentials, job: str, credential: str) -> str:
    """Token from the coordinator's answer. Raises AuthError."""
    payload = credentials.open(credential)
    head = b"nvrx-token\0" + job.encode() + b"\0"
    if not payload.startswith(head):
        raise AuthError("the answer with the token is of another job")
    return payload[len(head) :].decode("ascii", "replace")
