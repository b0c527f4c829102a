"""The rules against the corpus of public reports: how often class, blame and cause are right, in both of its parts."""

from __future__ import annotations

from cases import is_aside, multis, singles


def test_the_corpus_is_large_and_from_many_projects() -> None:
    names = [case.id for case in singles()] + [case["id"] for case in multis()]
    assert len(names) == len(set(names))
    assert len(singles()) >= 200 and len(multis()) >= 40
    assert len({case.source.partition("/")[0] for case in singles()}) >= 12
    assert 0.25 < sum(map(is_aside, names)) / len(names) < 0.42
