"""The identity of a job: an Ed25519 key and its certificate, derived from the job's token, and TLS 1.3 with them.

Ed25519 signs deterministically, so both ends derive the same certificate, byte for byte. Each accepts only that one.
A peer that completes the handshake therefore holds the token, and no host in between can read or alter a byte.

The key is made here (RFC 8032, section 5.1) because OpenSSL has no way to it from Python, and importing `cryptography`
costs more time and memory than the whole transport. The arithmetic is not constant in time. It runs once per process,
before any peer can watch; in handshakes OpenSSL signs. OpenSSL refuses a certificate that does not fit its key.
"""

from __future__ import annotations

import base64
import hashlib
import os
import ssl
from functools import cache
from typing import NamedTuple

from nvrx_slurm.errors import UsageError

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_X = 15112221349535400772501151409588531511454012693041857206046113283949847762202
_Y = 4 * pow(5, -1, _P) % _P
_Point = tuple[int, int, int, int]  # extended homogeneous coordinates
_ED25519 = bytes.fromhex("300506032b6570")  # AlgorithmIdentifier of RFC 8410
_DATES = bytes.fromhex("301e") + b"\x17\x0d700101000000Z" + b"\x17\x0d491231235959Z"  # fixed; clocks play no part


class Identity(NamedTuple):
    """What both ends of a connection need."""

    certificate: bytes  # DER
    server: ssl.SSLContext
    client: ssl.SSLContext


@cache
def identity(token: str, job: str) -> Identity:
    """The identity of `job` with this token. Raises UsageError where OpenSSL does not allow TLS 1.3 with Ed25519."""
    seed = hashlib.sha256(b"\0".join((b"nvrx control", job.encode(), token.encode()))).digest()
    certificate = _certificate(seed)
    try:
        ends = (_context(kind, seed, certificate) for kind in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT))
        return Identity(certificate, *ends)
    except (ssl.SSLError, ValueError) as error:
        raise UsageError(
            f"OpenSSL ({ssl.OPENSSL_VERSION}) does not take an Ed25519 key for TLS 1.3: {error};"
            " is this machine in FIPS mode? Use a Python whose OpenSSL allows it"
        ) from None


def _context(kind: int, seed: bytes, certificate: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(kind)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if kind == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # each connection proves the token anew
    key = bytes.fromhex("302e020100300506032b657004220420") + seed  # PKCS #8, RFC 8410 section 7
    pem = b"".join(_pem(name, der) for name, der in ((b"PRIVATE KEY", key), (b"CERTIFICATE", certificate)))
    fd = os.memfd_create("nvrx-identity")  # OpenSSL reads files only, and this one is on no disk
    try:
        os.write(fd, pem)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    return context


def _pem(name: bytes, der: bytes) -> bytes:
    return b"-----BEGIN %b-----\n%b-----END %b-----\n" % (name, base64.encodebytes(der), name)


def _certificate(seed: bytes) -> bytes:
    """A self-signed X.509 certificate of version 1 (RFC 5280): its name is "nvrx", its serial number 1."""
    name = _der(0x30, _der(0x31, _der(0x30, b"\x06\x03\x55\x04\x03", _der(0x0C, b"nvrx"))))
    public = public_key(seed)
    key = _der(0x30, _ED25519, _der(0x03, b"\0", public))
    body = _der(0x30, b"\x02\x01\x01", _ED25519, name, _DATES, name, key)
    return _der(0x30, body, _ED25519, _der(0x03, b"\0", sign(seed, public, body)))


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)  # here always below 256
    return bytes((tag, size) if size < 128 else (tag, 0x81, size)) + content


# --- Ed25519 ---------------------------------------------------------------------------------------------------------


def public_key(seed: bytes) -> bytes:
    """The public key, 32 bytes, of a private key of 32 bytes."""
    return _compressed(_times(_secrets(seed)[0]))


def sign(seed: bytes, public: bytes, message: bytes) -> bytes:
    """The signature, 64 bytes, of `message` by the private key `seed`, whose public key is `public`."""
    scalar, prefix = _secrets(seed)
    nonce = _hash(prefix, message)
    commitment = _compressed(_times(nonce))
    answer = (nonce + _hash(commitment, public, message) * scalar) % _ORDER
    return commitment + answer.to_bytes(32, "little")


def _secrets(seed: bytes) -> tuple[int, bytes]:
    digest = hashlib.sha512(seed).digest()
    return int.from_bytes(digest[:32], "little") & (2**254 - 8) | 2**254, digest[32:]


def _hash(*parts: bytes) -> int:
    return int.from_bytes(hashlib.sha512(b"".join(parts)).digest(), "little") % _ORDER


def _plus(p: _Point, q: _Point) -> _Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]), (p[1] + p[0]) * (q[1] + q[0])
    c, d = 2 * p[3] * q[3] * _D, 2 * p[2] * q[2]
    e, f, g, h = (b - a) % _P, (d - c) % _P, (d + c) % _P, (b + a) % _P
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


@cache
def _powers() -> list[_Point]:
    """The base point times 1, 2, 4, 8, ..."""
    powers = [(_X, _Y, 1, _X * _Y % _P)]
    for _ in range(255):
        powers.append(_plus(powers[-1], powers[-1]))
    return powers


def _times(scalar: int) -> _Point:
    """The base point, `scalar` times."""
    total = (0, 1, 1, 0)
    for bit, power in enumerate(_powers()):
        if scalar >> bit & 1:
            total = _plus(total, power)
    return total


def _compressed(point: _Point) -> bytes:
    inverse = pow(point[2], -1, _P)
    x, y = point[0] * inverse % _P, point[1] * inverse % _P
    return (y | (x & 1) << 255).to_bytes(32, "little")
