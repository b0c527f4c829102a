"""The key and the certificate of a job: equal on both ends, and of no other job."""

import hashlib
from datetime import datetime

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from nvrx_slurm.control.identity import identity

pytestmark = pytest.mark.fast


def test_each_job_and_token_has_one_certificate():
    first = identity("token", "job").certificate
    identity.cache_clear()
    assert identity("token", "job").certificate == first
    others = {identity(*pair).certificate for pair in [("token", "job2"), ("token2", "job"), ("", ""), ("a", "b\0a")]}
    assert len(others) == 4 and first not in others


def test_the_certificate_is_the_one_that_the_builder_of_cryptography_makes():
    seed = hashlib.sha256(b"nvrx control\0job\0token").digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "nvrx")])
    times = datetime(1970, 1, 1), datetime(2049, 12, 31, 23, 59, 59)
    built = x509.CertificateBuilder(name, name, key.public_key(), 1, *times).sign(key, None)
    assert identity("token", "job").certificate == built.public_bytes(Encoding.DER)
