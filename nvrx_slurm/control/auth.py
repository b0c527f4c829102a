"""The job's secret token: made once per job, and passed on in the environment or by `handover.py`.

`identity.py` derives from it what the two ends of a connection prove to each other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Protocol, TypeVar

from nvrx_slurm.errors import AuthError
from nvrx_slurm.system import bounded

VERSION = 6  # version of the messages in `control.messages`
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
    except bounded.Overrun as error:
        raise AuthError(str(error)) from None
