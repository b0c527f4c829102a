"""The key and the certificate of a job: those of RFC 8032, equal on both ends, and of no other job."""

from __future__ import annotations

import pytest

from nvrx_slurm.control.identity import identity, public_key, sign


@pytest.mark.parametrize(
    ("seed", "public", "message", "signature"),
    [  # RFC 8032, section 7.1, tests 1 and 3
        (
            "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            "",
            "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46bd25bf5f0595b"
            "be24655141438e7a100b",
        ),
        (
            "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
            "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
            "af82",
            "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc6594a7c15e9716e"
            "d28dc027beceea1ec40a",
        ),
    ],
)
def test_vectors_of_the_rfc(seed: str, public: str, message: str, signature: str) -> None:
    assert public_key(bytes.fromhex(seed)).hex() == public
    assert sign(bytes.fromhex(seed), bytes.fromhex(public), bytes.fromhex(message)).hex() == signature


def test_each_job_and_token_has_one_certificate() -> None:
    first = identity("token", "job").certificate
    identity.cache_clear()
    assert identity("token", "job").certificate == first
    others = {identity(*pair).certificate for pair in [("token", "job2"), ("token2", "job"), ("", ""), ("a", "b\0a")]}
    assert len(others) == 4 and first not in others
