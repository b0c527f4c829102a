"""Llama 3's interruptions in a small replay, with every rule of `invariants.py` checked at each step."""

from statistics import fmean

import pytest
from replay_llama3 import PUBLISHED, Replay, findings, run
from replay_picture import picture
from replay_world import MEMORY, Latencies

pytestmark = pytest.mark.fast


@pytest.mark.repeats("memory")
@pytest.mark.parametrize("latencies", [Latencies(), MEMORY], ids=["disk", "memory"])
def test_a_small_replay_keeps_every_promise(latencies):
    job = Replay(nodes=2048, spares=6, thin=256, faults=70, latencies=latencies)
    outcomes = [run(job, seed, judged=True) for seed in range(1)]
    assert [one for one in findings(job, outcomes) if "user code" not in one] == []  # six spares: it queues often
    for one in outcomes:
        assert one.struck.total() >= 69 and {"device", "error", "node", "maintenance"} <= one.struck.keys()
        assert sum(one.shares.values()) == pytest.approx(1.0) and one.links > 3
        assert {"detect", "recomputed", "queue", "checkpoint"} <= one.shares.keys() and "other" not in one.shares
    assert fmean(one.ettr for one in outcomes) == pytest.approx(job.formula(), abs=0.02)
    drawn = picture([(job, outcomes)])
    assert drawn.startswith("<svg") and "http" not in drawn.replace("http://www.w3.org/2000/svg", "")


def test_the_published_counts_are_466():
    assert PUBLISHED == 466 and Replay().mtbf_s == pytest.approx(10_012, abs=1)
