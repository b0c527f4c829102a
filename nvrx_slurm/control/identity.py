"""The identity of a job: an Ed25519 key and its certificate, derived from the job's token, and TLS 1.3 with them.

Ed25519 signs deterministically (RFC 8032), so both ends derive the same certificate, byte for byte. Each accepts only
that one. A peer that completes the handshake holds the token, and no host in between can read or alter a byte.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from datetime import datetime
from functools import cache
from typing import NamedTuple

from nvrx_slurm.errors import UsageError

_FROM, _UNTIL = datetime(1970, 1, 1), datetime(2049, 12, 31, 23, 59, 59)  # noqa: DTZ001 - fixed; clocks play no part


class JobIdentity(NamedTuple):
    """What both ends of a connection need."""

    certificate: bytes  # DER
    server: ssl.SSLContext
    client: ssl.SSLContext


@cache
def identity(token: str, job: str) -> JobIdentity:
    """The identity of `job` with this token. Raises UsageError where OpenSSL does not allow TLS 1.3 with Ed25519."""
    from cryptography.exceptions import UnsupportedAlgorithm  # 70 ms: only in jobs of several nodes

    seed = hashlib.sha256(b"\0".join((b"nvrx control", job.encode(), token.encode()))).digest()
    try:
        certificate, pem = _made(seed)
        return JobIdentity(
            certificate,
            *(_context(end, certificate, pem) for end in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)),
        )
    except (ssl.SSLError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"OpenSSL ({ssl.OPENSSL_VERSION}) does not take an Ed25519 key for TLS 1.3: {error};"
            " is this machine in FIPS mode? Use a Python whose OpenSSL allows it"
        ) from None


def _made(seed: bytes) -> tuple[bytes, bytes]:
    """The self-signed certificate of the key with this seed (DER), and both (PEM)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "nvrx")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, _FROM, _UNTIL)
    certificate = builder.sign(key, None)
    pem = key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())
    return certificate.public_bytes(to.Encoding.DER), pem + certificate.public_bytes(to.Encoding.PEM)


def _context(kind: int, certificate: bytes, pem: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection proves the token anew
    fd = os.memfd_create("nvrx-identity")  # OpenSSL reads files only, and this one is on no disk
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context
