"""The key and the certificate of a job: equal on both ends, and of no other job."""

from __future__ import annotations

from nvrx_slurm.control.identity import identity


def test_each_job_and_token_has_one_certificate() -> None:
    first = identity("token", "job").certificate
    identity.cache_clear()
    assert identity("token", "job").certificate == first
    others = {identity(*pair).certificate for pair in [("token", "job2"), ("token2", "job"), ("", ""), ("a", "b\0a")]}
    assert len(others) == 4 and first not in others
