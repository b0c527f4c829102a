"""The restart sequence of one rank, as a script of what happens and what is done about it."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.inprocess import phases as ph
from nvrx_slurm.core.inprocess.phases import Phase

C, R, A, D = ph.Called(), ph.Released(), ph.Assigned(), ph.Done()
BEGIN = [
    (C, Phase.ENTERING),
    (R, Phase.ASSIGNING),
    (A, Phase.INITIALIZING),
    (D, Phase.CHECKING_START),
    (D, Phase.RUNNING),
]
RESTART = [(ph.Interrupted(), Phase.FINALIZING), (D, Phase.CHECKING), (D, Phase.ARRIVED), (R, Phase.ASSIGNING)]
ENDS = [(ph.Completed(), Phase.COMPLETING), (D, Phase.CONCLUDED), (R, None)]
FAULTED, STOPPED = (ph.Faulted(), Phase.TELLING), (ph.Stopped(), Phase.STOPPING)
COMPLETED = [(ph.Returned(), Phase.RETURNED), *ENDS]
LEAVES = [(ph.Failed(), Phase.LEAVING), (D, None)]


def play(*script: tuple[object, Phase | None]) -> ph.Restarts:
    """Each event, and the one thing that is done then."""
    machine = ph.Restarts(0.0)
    for event, what in script:
        assert machine.step(event, 0.0) == ([] if what is None else [what]), event
    return machine


ENDINGS = [
    (COMPLETED, Phase.DONE),
    (ENDS, Phase.DONE),  # a reserve that is not needed
    (RESTART, Phase.ASSIGNING),  # a reserve that may be needed
    ([FAULTED, *RESTART], Phase.ASSIGNING),
    ([STOPPED, *RESTART], Phase.ASSIGNING),
    ([(ph.Returned(), Phase.RETURNED), *RESTART], Phase.ASSIGNING),  # another rank fails after it returned here
    ([STOPPED, (ph.Completed(), Phase.LEAVING), LEAVES[1]], Phase.GONE),
    ([FAULTED, (ph.Completed(), Phase.LEAVING), LEAVES[1]], Phase.GONE),  # a fault that no rank waits for any more
]


@pytest.mark.parametrize(("script", "state"), ENDINGS)
def test_how_an_iteration_ends(script: list[tuple[object, Phase | None]], state: Phase) -> None:
    assert play(*BEGIN, *script).state is state


def test_a_fault_before_the_function_is_called() -> None:
    for place in (2, 3, 4):
        play(*BEGIN[:place], STOPPED, *RESTART)
    for place in (3, 4):
        play(*BEGIN[:place], FAULTED, *RESTART)


def test_a_rank_is_lost_while_ranks_are_assigned() -> None:
    assert play(*BEGIN[:2], (ph.Disturbed(), Phase.UNASSIGNED), (R, Phase.ASSIGNING)).state is Phase.ASSIGNING
    play(*BEGIN[:2], (ph.Disturbed(), Phase.UNASSIGNED), *LEAVES)


def test_a_rank_can_leave_from_everywhere() -> None:
    for way in ([*BEGIN, *RESTART[:-1]], [*BEGIN, FAULTED], [*BEGIN, STOPPED], [*BEGIN, *COMPLETED[:-1]]):
        for place in range(1, len(way) + 1):
            assert play(*way[:place], *LEAVES).state is Phase.GONE
