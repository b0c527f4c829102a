"""The agent's decisions: the scenarios of `scenarios/agent/*.txt` (see `agent_stories`)."""

import pytest

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent, AgentState
from nvrx_slurm.types import Plan, Spent

from .agent_stories import AgentStory
from .samples import a_fault
from .stories import SCENARIOS, scenarios

pytestmark = pytest.mark.fast


STORIES = scenarios(SCENARIOS / "agent")


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in STORIES])
def test_scenario(lines):
    AgentStory().play(lines)


def test_a_rank_that_asks_in_a_loop_fills_no_log():
    story = AgentStory()
    story.begin("agent", "running")
    passed = [len(story.tell("asks", "continue")) for _ in range(101)]
    assert passed == [1] * 100 + [0]
    assert story.tell("asks", "exclude") == ["asked:1/0(exclude:0)"]


def test_no_row_starts_workers_before_the_preflight_has_passed():
    """RUNNING is entered from IDLE by a plan, and from PREPARING only by the end of the preflight."""
    entries = {
        key for key, row in Agent.table.items() if AgentState.RUNNING in row.to and key[0] is not AgentState.RUNNING
    }
    assert entries == {(AgentState.IDLE, Plan), (AgentState.PREPARING, ag.Prepared)}


def test_what_the_ranks_have_spent_is_told_to_the_next_coordinator_too():
    story = AgentStory()
    story.begin("agent", "running")
    core, spent = story.core, Spent(1, 0, 0.1)
    core.step(ag.Disconnected("it died"), 1.0)
    for rank in (0, 1):
        sent = core.step(ag.WorkerExited(rank, a_fault(0, local_rank=rank), spent=spent if rank else None), 2.0)
        assert ag.Send(spent) not in sent
    assert ag.Send(spent) in core.step(ag.Connected(), 3.0)
