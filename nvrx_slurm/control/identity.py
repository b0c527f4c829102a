"""The identity of a job: an Ed25519 key and its certificate, derived from the job's token, and TLS 1.3 with them.

Ed25519 signs deterministically (RFC 8032), so both ends derive the same certificate, byte for byte. Each accepts only
that one. A peer that completes the handshake holds the token, and no host in between can read or alter a byte.
"""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
from functools import cache
from typing import NamedTuple

from nvrx_slurm.errors import UsageError

# A certificate without its public key and signature (DER): CN=nvrx, 1970 to 2049, Ed25519. The X.509 builder of
# `cryptography` makes the same bytes, and its import costs 50 ms. tests/control/test_identity.py compares the two.
_BEFORE = bytes.fromhex("3081c9")
_SIGNED_PART = bytes.fromhex(
    "307da003020102020101300506032b6570300f310d300b06035504030c046e767278301e170d3730303130313030303030305a"
    "170d3439313233313233353935395a300f310d300b06035504030c046e767278302a300506032b6570032100"
)
_AFTER = bytes.fromhex("300506032b6570034100")
_PRIVATE_KEY = bytes.fromhex(
    "302e020100300506032b657004220420"
)  # PKCS #8 before the seed (RFC 8410)


class JobIdentity(NamedTuple):
    """What both ends of a connection need."""

    pem: str  # key and certificate
    certificate: bytes  # DER
    server: ssl.SSLContext
    client: ssl.SSLContext


@cache
def identity(token: str, job: str) -> JobIdentity:
    """The identity of `job` with this token. Raises UsageError where OpenSSL does not allow TLS 1.3 with Ed25519."""
    from cryptography.exceptions import UnsupportedAlgorithm

    seed = hashlib.sha256(b"\0".join((b"nvrx control", job.encode(), token.encode()))).digest()
    try:
        return from_pem(_made(seed))
    except (ssl.SSLError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"OpenSSL ({ssl.OPENSSL_VERSION}) does not take an Ed25519 key for TLS 1.3: {error};"
            " is this machine in FIPS mode? Use a Python whose OpenSSL allows it"
        ) from None


def from_pem(pem: str) -> JobIdentity:
    """The identity with this key and certificate. Raises ValueError, or OSError of OpenSSL."""
    certificate = ssl.PEM_cert_to_DER_cert(pem[pem.index(ssl.PEM_HEADER) :])
    ends = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    return JobIdentity(pem, certificate, *(_context(end, certificate, pem) for end in ends))


def _made(seed: bytes) -> str:
    """The key with this seed and its self-signed certificate (PEM)."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
    )  # 15 ms: only with several nodes

    key = Ed25519PrivateKey.from_private_bytes(seed)
    signed = _SIGNED_PART + key.public_key().public_bytes_raw()
    certificate = _BEFORE + signed + _AFTER + key.sign(signed)
    private = base64.b64encode(_PRIVATE_KEY + seed).decode()
    pem = f"-----BEGIN PRIVATE KEY-----\n{private}\n-----END PRIVATE KEY-----\n"
    return pem + ssl.DER_cert_to_PEM_cert(certificate)


def _context(kind: int, certificate: bytes, pem: str) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection proves the token anew
    fd = os.memfd_create("nvrx-identity")  # OpenSSL reads files only, and this one is on no disk
    try:
        os.write(fd, pem.encode())
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
