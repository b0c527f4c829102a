"""What loses work needs a ground that is no word: certainty, repetition, exit codes or the user's wish."""

from itertools import product

import pytest

from nvrx_slurm.core.attribution.follows import FailedCycle, course
from nvrx_slurm.core.attribution.signatures import SIGNATURES
from nvrx_slurm.core.attribution.verdict import judge
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Confidence, FaultKind, Finding, RankFault, Remedy, RestartRecord

from .samples import restart_limits

pytestmark = pytest.mark.fast

LIMITS = restart_limits(stops_on_repeats=True)
UNSURE = [s for s in SIGNATURES if s.confidence is not Confidence.CERTAIN]
ENDS = [(FaultKind.EXIT, 1), (FaultKind.SIGNAL, -9), (FaultKind.SIGNAL, -6), (FaultKind.HANG, -9), (FaultKind.LOSS, -9)]
LONG_S, HERE = 900.0, 510
CYCLE = FailedCycle(4, 8, True, False, LONG_S, HERE, 500)


def judged(s, kind, code, past):
    """The verdict on a rank whose output has a line of this rule."""
    finding = Finding(s.name, s.role, s.blame, s.confidence, s.remedy, "same", "a line")
    verdict = judge([RankFault(kind, "h1", 1, 3, 1, 4711, code, "a line", "Traceback", finding=finding)], 4, past)
    assert verdict is not None
    return verdict


def keeps_work(found):
    return not found.end and found.exclude is None and found.resume_before < 0


def before(fingerprint, **more):
    """A cycle that has failed at the same iteration, after the same checkpoint."""
    record = RestartRecord(0, 1.0, 1.0, "", 3, fingerprint, "h1", 1, 1, HERE, 500, ran_s=LONG_S)
    return replace(record, **more)


@pytest.mark.parametrize("s", UNSURE, ids=[s.name for s in UNSURE])
def test_words_that_are_not_certain_lose_no_work(s):
    """Neither at once, nor after another failure, whatever the rule says of blame and remedy."""
    starts = (CYCLE, replace(CYCLE, first=True, lasted_s=1.0, reached=-1), replace(CYCLE, resume_before=500))
    pasts = ([], [before("other")], [before("other", elsewhere=True)] * 3)
    for (kind, code), cycle, past in product(ENDS, starts, pasts):
        assert keeps_work(course(judged(s, kind, code, past), cycle, past, LIMITS, False)), (kind, code, past)


@pytest.mark.parametrize("sure", [Confidence.LIKELY, Confidence.GUESS])
@pytest.mark.parametrize(
    ("past", "told", "ends", "resume_before"),
    [
        ([before("same")], -1, False, 500),  # soon after the same checkpoint
        ([before("same")], 500, True, -1),  # an older one has not helped
        ([before("same", checkpoint=0, host="h2", infra_rank=2, elsewhere=True)], -1, True, -1),  # on two nodes
    ],
)
def test_what_comes_again_is_judged_without_its_words(past, told, ends, resume_before, sure):
    """Whatever a rule says, and how surely: the same failure at the same place has the same consequence."""
    kinds = {(s.role, s.blame, s.remedy): s for s in UNSURE if not s.one_node}
    found = set()
    for s in kinds.values():
        verdict = judged(s._replace(confidence=sure), FaultKind.EXIT, 1, past)
        one = course(verdict, replace(CYCLE, resume_before=told), past, LIMITS, False)
        found.add((one.end != 0, one.resume_before))
    # A rule about an outage only keeps work: the consequence is there, or it is not.
    assert found == {(ends, resume_before), (False, -1)}


def test_a_torn_checkpoint_that_is_only_likely_needs_an_iteration():
    torn = next(s for s in SIGNATURES if s.name == "checkpoint-torn")
    past = [before("same", iteration=-1)]
    cycle = replace(CYCLE, reached=-1)
    certain = torn._replace(confidence=Confidence.CERTAIN)
    drops = [course(judged(s, FaultKind.EXIT, 1, past), cycle, past, LIMITS, False) for s in (torn, certain)]
    assert [one.resume_before for one in drops] == [-1, 500]


def test_a_rank_that_hung_loses_its_node_only_where_the_user_wants_that():
    hung = next(s for s in UNSURE if s.remedy is Remedy.ELSEWHERE)
    verdict = judged(hung, FaultKind.HANG, -9, [])
    excluded = [course(verdict, CYCLE, [], LIMITS, wanted).exclude is not None for wanted in (False, True)]
    assert excluded == [False, True]
