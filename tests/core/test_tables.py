"""Every row of the cores' tables matters: a scenario needs it, and it leads everywhere it says it may lead.

The scenarios and tests of SUITES are run under a recorder.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path

import diagram
import pytest

from nvrx_slurm.core.agent.agent import Agent, AgentState
from nvrx_slurm.core.agent.leaving import Leaving
from nvrx_slurm.core.agent.ranks import Ranks
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.states import LIVE
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.inprocess.phases import Restarts
from nvrx_slurm.core.machine import Machine, rows
from nvrx_slurm.errors import UnknownTransition
from nvrx_slurm.types import Finish

from . import test_agent, test_coordinator, test_election, test_phases
from .agent_stories import AgentStory
from .stories import REACHED, Story, anything_in, out_of_time
from .walks import walk

WALKS = range(200)
DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "state-machines.md"


def _tests(module, without):
    return [test for title, test in vars(module).items() if title.startswith("test_") and title != without]


SUITES = {
    Coordinator: [
        *(lambda lines=lines: Story().play(lines) for _, lines in test_coordinator.STORIES),
        *(partial(anything_in, state) for state in REACHED if state != "CLOSED"),
        *(partial(out_of_time, state.name) for state in LIVE),
        *(partial(walk, seed) for seed in WALKS),
    ],
    Agent: [*(lambda lines=lines: AgentStory().play(lines) for _, lines in test_agent.STORIES)],
    Election: [partial(test_election.walk, seed) for seed in WALKS],
    Restarts: [
        *(partial(test_phases.test_how_an_iteration_ends, *row) for row in test_phases.ENDINGS),
        *_tests(test_phases, without="test_how_an_iteration_ends"),
    ],
}
MACHINES = pytest.mark.parametrize("machine", SUITES)
pytestmark = [pytest.mark.fast, pytest.mark.xdist_group("tables")]  # the scenarios are run once


@pytest.fixture(scope="module")
def visits():
    """For each row all states that any scenario reached from it."""
    found = defaultdict(lambda: defaultdict(set))
    transit = Machine._transit

    def recorded(self, event, now):
        before, kind = self.state, type(event.message if isinstance(event, self.envelope) else event)
        posted = transit(self, event, now)
        found[type(self)][before, kind].add(self.state)
        return posted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Machine, "_transit", recorded)
        for scenario in (scenario for suite in SUITES.values() for scenario in suite):
            scenario()
    return found


@MACHINES
def test_no_row_is_unvisited(machine, visits):
    """So a scenario fails where a row is missing: an event without a row raises."""
    unvisited = machine.table.keys() - visits[machine].keys()
    assert {(state.name, event.__name__) for state, event in unvisited} == set()


@MACHINES
def test_each_row_leads_wherever_it_says(machine, visits):
    lies = {
        (state.name, event.__name__, to.name)
        for (state, event), row in machine.table.items()
        for to in set(row.to) - visits[machine][state, event]
    }
    assert not lies


def test_a_state_and_event_have_one_row():
    again = AgentState.IDLE, Agent, "ignore", (), "twice"
    with pytest.raises(TypeError, match="two rows"):
        rows(again, again)
    own = rows((AgentState.LEAVING, Finish, "ignore", (), "twice"))
    with pytest.raises(TypeError, match="two rows"):
        type("Twice", (Machine,), {"parts": (Leaving,), "table": own})


def test_an_event_without_a_row_raises():
    with pytest.raises(UnknownTransition, match="Agent: no row for WorkerExited in IDLE"):
        AgentStory().play(["agent idle", "exits 0"])


def test_a_handler_that_leaves_its_row_raises(monkeypatch):
    monkeypatch.setattr(Ranks, "on_warned", lambda self, event, now: AgentState.GONE)
    with pytest.raises(UnknownTransition, match="Warned in RUNNING led to GONE"):
        AgentStory().play(["agent running", "user 10"])


def test_the_document_is_generated():
    fresh = DOCUMENT.read_text() == diagram.document()
    assert fresh, "run: python scripts/lib/diagram.py > docs/reference/state-machines.md"


def test_a_diagram_begins_and_ends():
    lines = diagram.mermaid(Agent).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> PREPARING"] and lines[-1] == "    GONE --> [*]"
    assert "    RUNNING --> SUCCEEDED: WorkerExited" in lines
