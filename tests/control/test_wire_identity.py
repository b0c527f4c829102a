"""The key and the certificate of a job: those of RFC 8032, equal on both ends, and of no other job."""

from __future__ import annotations

from nvrx_slurm.control.identity import identity, public_key, sign


def test_vector_of_the_rfc() -> None:
    """RFC 8032, section 7.1, test 3."""
    seed = bytes.fromhex("c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7")
    public = public_key(seed)
    assert public.hex() == "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025"
    first, second = sign(seed, public, b"\xaf\x82")[:32].hex(), sign(seed, public, b"\xaf\x82")[32:].hex()
    assert first == "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
    assert second == "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a"


def test_each_job_and_token_has_one_certificate() -> None:
    first = identity("token", "job").certificate
    identity.cache_clear()
    assert identity("token", "job").certificate == first
    others = {identity(*pair).certificate for pair in [("token", "job2"), ("token2", "job"), ("", ""), ("a", "b\0a")]}
    assert len(others) == 4 and first not in others
