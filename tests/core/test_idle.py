"""When a rank that was told to end does nothing."""

import pytest

from nvrx_slurm.core.rank.idle import Signs, is_idle

pytestmark = pytest.mark.fast


WITHIN_S = 0.8
REST = Signs(True, b"202 sp ip", frozenset(), 1.0, 500)
BUSY = REST._replace(busy=frozenset({7}))


@pytest.mark.parametrize(
    "signs",
    [
        (REST, REST, REST),
        (BUSY, REST, BUSY),  # a thread that polls: it is seen at work now and then
        (BUSY, REST._replace(busy=frozenset({8})), BUSY),
        (REST, REST, REST._replace(cpu_s=1.0 + 0.06 * WITHIN_S)),  # a profiler
        (REST, REST, REST._replace(written=900)),
    ],
)
def test_a_rank_that_waits_in_c_is_idle(signs):
    assert is_idle(signs, WITHIN_S)


@pytest.mark.parametrize(
    "signs",
    [
        (REST, REST._replace(pending=False), REST),
        (REST._replace(pending=False),) * 3,
        (REST, REST, REST._replace(place=b"202 sp2 ip")),
        (REST._replace(place=b""),) * 3,
        (BUSY, BUSY._replace(busy=frozenset({6, 7})), BUSY),
        (REST, REST, REST._replace(cpu_s=1.0 + 0.5 * WITHIN_S)),
        (REST, REST, REST._replace(written=1 << 20)),
    ],
)
def test_a_rank_whose_handler_has_begun_or_that_works_is_not(signs):
    assert not is_idle(signs, WITHIN_S)
