"""The restart sequence of one rank, as a script of what happens and what is done about it."""

import pytest

from nvrx_slurm.core.inprocess import phases as ph
from nvrx_slurm.core.inprocess.phases import RestartPhase as P

pytestmark = pytest.mark.fast


R, D = ph.Released(), ph.StepDone()
BEGIN = [(ph.Called(), P.ENTERING), (R, P.ASSIGNING), (ph.Assigned(), P.STARTING), (D, P.RUNNING)]
RESTART = [(ph.Interrupted(), P.RECOVERING), (D, P.ARRIVED), (R, P.ASSIGNING)]
ENDED, RETURNED = (ph.FunctionEnded(), P.STOPPING), (ph.Returned(), P.RETURNED)
COMPLETED = [(ph.Completed(), P.COMPLETING), (R, None)]
LEAVES = [(ph.CannotGoOn(), P.LEAVING), (D, None)]


def play(*script):
    """Each event, and the one thing that is done then."""
    machine = ph.Restarts(0.0)
    for event, what in script:
        assert machine.step(event, 0.0) == ([] if what is None else [what]), event
    return machine


ENDINGS = [
    ([RETURNED, *COMPLETED], P.DONE),
    (COMPLETED, P.DONE),  # a reserve that is not needed
    (RESTART, P.ASSIGNING),  # a reserve that may be needed
    ([ENDED, *RESTART], P.ASSIGNING),
    ([RETURNED, *RESTART], P.ASSIGNING),  # another rank fails after it returned here
    ([ENDED, (ph.Completed(), P.LEAVING), LEAVES[1]], P.GONE),  # a fault that no rank waits for any more
]


@pytest.mark.parametrize("script, state", ENDINGS)
def test_how_an_iteration_ends(script, state):
    assert play(*BEGIN, *script).state is state


def test_a_fault_before_the_function_is_called():
    for place in (2, 3):
        play(*BEGIN[:place], ENDED, *RESTART)


def test_a_rank_is_lost_while_ranks_are_assigned():
    lost = (ph.AssignmentFailed(), P.ARRIVED)
    assert play(*BEGIN[:2], lost, (R, P.ASSIGNING)).state is P.ASSIGNING
    play(*BEGIN[:2], lost, *LEAVES)


def test_a_rank_can_leave_from_everywhere():
    for way in ([*BEGIN, *RESTART[:-1]], [*BEGIN, ENDED], [*BEGIN, RETURNED, *COMPLETED[:-1]]):
        for place in range(1, len(way) + 1):
            assert play(*way[:place], *LEAVES).state is P.GONE
