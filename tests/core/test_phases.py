"""The restart sequence of one rank, as a script of what happens and what is done about it."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.inprocess import phases as ph
from nvrx_slurm.core.inprocess.phases import Phase

C, R, A, D = ph.Called(), ph.Released(), ph.Assigned(), ph.Done()
BEGIN = [(C, "enter"), (R, "assign"), (A, "initialize"), (D, "check_at_start"), (D, "run_or_wait")]
RESTART = [(ph.Interrupted(), "finalize"), (D, "check"), (D, "arrive"), (R, "assign")]
ENDS = [(ph.Completed(), "call_completion"), (D, "conclude"), (R, None)]
FAULTED, STOPPED = (ph.Faulted(), "tell_fault"), (ph.Stopped(), "await_abort")
COMPLETED = [(ph.Returned(), "complete"), *ENDS]
LEAVES = [(ph.Failed(), "leave"), (D, None)]


def play(*script: tuple[object, str | None]) -> ph.Restarts:
    """Each event, and the one thing that is done then."""
    machine = ph.Restarts(0.0)
    for event, what in script:
        assert machine.step(event, 0.0) == ([] if what is None else [ph.Do(what)]), event
    return machine


ENDINGS = [
    (COMPLETED, Phase.DONE),
    (ENDS, Phase.DONE),  # a reserve that is not needed
    (RESTART, Phase.ASSIGNING),  # a reserve that may be needed
    ([FAULTED, *RESTART], Phase.ASSIGNING),
    ([STOPPED, *RESTART], Phase.ASSIGNING),
    ([(ph.Returned(), "complete"), *RESTART], Phase.ASSIGNING),  # another rank fails after it returned here
    ([FAULTED, (ph.Completed(), "leave"), LEAVES[1]], Phase.GONE),  # a fault that no rank waits for any more
]


@pytest.mark.parametrize(("script", "state"), ENDINGS)
def test_how_an_iteration_ends(script: list[tuple[object, str | None]], state: Phase) -> None:
    assert play(*BEGIN, *script).state is state


def test_a_fault_before_the_function_is_called() -> None:
    for place in (2, 3, 4):
        play(*BEGIN[:place], STOPPED, *RESTART)
    for place in (3, 4):
        play(*BEGIN[:place], FAULTED, *RESTART)


def test_a_rank_is_lost_while_ranks_are_assigned() -> None:
    assert play(*BEGIN[:2], (ph.Disturbed(), "arrive_unassigned"), (R, "assign")).state is Phase.ASSIGNING


def test_a_rank_can_leave_from_everywhere() -> None:
    for way in ([*BEGIN, *RESTART[:-1]], [*BEGIN, FAULTED], [*BEGIN, *COMPLETED[:-1]]):
        for place in range(1, len(way) + 1):
            assert play(*way[:place], *LEAVES).state is Phase.GONE
