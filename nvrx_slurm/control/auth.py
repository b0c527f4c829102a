"""The job's secret token: made once per job, passed on in the environment, never sent, proved by HMAC.

Both ends of a stream prove that they hold the token over fresh nonces of both ends. A stranger that listens on the
coordinator's port, or connects to it, learns nothing to replay. The stream is not encrypted: an attacker that alters
packets between two nodes is not kept out (see docs/architecture.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Protocol

from nvrx_slurm.errors import AuthError

VERSION = 1  # of the wire protocol in control.proto
NONCE_BYTES = 16
TOKEN_ENV = "NVRX_TOKEN"


class Credentials(Protocol):
    """A site's user authentication (MUNGE): credentials that only the same user can make and open."""

    def seal(self, payload: bytes) -> str:
        """Seal `payload`. Raises AuthError."""

    def open(self, credential: str) -> bytes:
        """Payload of a credential that the same user sealed. Raises AuthError for any other."""


def new_token() -> str:
    """A fresh token: 32 random bytes, hex."""
    return secrets.token_hex(32)


def new_nonce() -> bytes:
    """16 random bytes for one stream."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str, role: str, job: str, own_nonce: bytes, peer_nonce: bytes) -> bytes:
    """HMAC-SHA256 by which `role` ("agent" or "coordinator") of `job` shows that it holds `token`."""
    text = b"\0".join((b"nvrx", str(VERSION).encode(), role.encode(), job.encode(), own_nonce, peer_nonce))
    return hmac.new(token.encode(), text, hashlib.sha256).digest()


def check(token: str, role: str, job: str, own_nonce: bytes, peer_nonce: bytes, given: bytes) -> None:
    """Raise AuthError unless `given` is the proof of `role`, which sent `own_nonce`."""
    if len(own_nonce) != NONCE_BYTES or len(peer_nonce) != NONCE_BYTES:
        raise AuthError(f"the {role} sent a nonce of a wrong length")
    if not hmac.compare_digest(proof(token, role, job, own_nonce, peer_nonce), given):
        raise AuthError(f"the {role} does not hold this job's token")


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
