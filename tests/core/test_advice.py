"""What a person is told about checkpoints, and how often to save."""

import pytest

from nvrx_slurm.core.checkpoint.advice import worries
from nvrx_slurm.core.checkpoint.interval import best_interval_s, mtbf_s

pytestmark = pytest.mark.fast


WELL = {"age_s": 900.0, "saved_s": [0.0, 600.0, 1200.0], "same_as": "", "sizes": (1 << 30, 1 << 31), "save_s": 60.0}


@pytest.mark.parametrize(
    "change, about",
    [
        ({}, []),
        ({"age_s": 1300.0}, ["late"]),
        ({"age_s": 1e6, "saved_s": [0.0]}, []),  # the usual interval is not known
        ({"age_s": 50.0, "saved_s": [0.0, 1.0, 2.0]}, []),
        ({"same_as": "step_100"}, ["same"]),
        ({"sizes": (1 << 30, 1 << 30)}, ["disk"]),
        ({"save_s": 100.0}, ["time"]),
    ],
)
def test_a_person_is_told(change, about):
    assert [*worries(**{**WELL, "warned_s": 120.0, **change})] == about
    assert not worries(**{**WELL, "save_s": 100.0, "warned_s": 0.0})


def test_the_time_between_faults_is_that_of_llama_3_until_there_are_faults():
    assert mtbf_s(2048, 0.0, 0) == pytest.approx(54 * 86400 / 419)  # 186 min
    assert mtbf_s(2048, 86400.0, 9) == pytest.approx((11135 + 86400) / 10, rel=1e-3)
    assert best_interval_s(60.0, mtbf_s(2048, 0.0, 0)) / 60 == pytest.approx(19.3, abs=0.1)  # as Meta's table says
