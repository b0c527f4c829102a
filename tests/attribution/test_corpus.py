"""The rules against the corpus of public reports: how often class, blame and cause are right, in both of its parts."""

from __future__ import annotations

import time

import pytest
from cases import is_aside, multis, scores, singles, written

from nvrx_slurm.core.attribution.evidence import TAIL_BYTES, examine
from nvrx_slurm.types import FaultKind, RankFault

pytestmark = pytest.mark.fast


def test_the_corpus_is_large_and_from_many_projects() -> None:
    names = [case.id for case in singles()] + [case["id"] for case in multis()]
    assert len(names) == len(set(names))
    assert len(singles()) >= 200 and len(multis()) >= 40
    assert len({case.source.partition("/")[0] for case in singles()}) >= 12
    assert 0.25 < sum(map(is_aside, names)) / len(names) < 0.42


@pytest.mark.parametrize(("aside", "right"), [(False, 0.95), (True, 0.90)], ids=["seen", "put aside"])
def test_class_blame_and_cause_are_right(aside: bool, right: float) -> None:
    """`python tests/attribution/cases.py seen` shows what is wrong."""
    found = scores(aside)
    assert found["right"] >= right and found["confident mistakes"] <= 0.01 and found["wrong exclusions"] == 0, found
    assert found["cause right"] >= 0.90, found


def test_two_ends_of_64_kib_are_examined_in_time() -> None:
    """The target is 20 ms. Half of the output is behind the last progress, so that all rules look at it."""
    case = next(one for one in singles() if one.id == "timeout-llamafactory")
    noise = b"n3:4711:99 [3] NCCL INFO Channel 01/0 : 2[2] -> 0[0] via P2P/IPC/read\n" * 512
    text = (b"step 12 loss 2.3\n" + noise + written(case, ("peers",))[0].encode())[-TAIL_BYTES:]
    text = b"x" * (TAIL_BYTES - len(text)) + text
    fault = RankFault(FaultKind.SIGNAL, "n1", 1, 3, 1, 4711, -6, "SIGABRT")
    took_s = []
    for _ in range(5):
        began_s = time.process_time()
        examine(fault, text, text)
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.02
