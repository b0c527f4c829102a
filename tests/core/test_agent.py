"""The agent's decisions: the scenarios of `scenarios/agent/*.txt` (see `agent_stories`)."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent, AgentState
from nvrx_slurm.types import Plan

from .agent_stories import AgentStory
from .stories import SCENARIOS, scenarios

STORIES = scenarios(SCENARIOS / "agent")


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in STORIES])
def test_scenario(lines: list[str]) -> None:
    AgentStory().play(lines)


def test_a_rank_that_asks_in_a_loop_fills_no_log() -> None:
    story = AgentStory()
    story.begin("agent", "running")
    passed = [len(story.tell("asks", "continue")) for _ in range(101)]
    assert passed == [1] * 100 + [0]
    assert story.tell("asks", "exclude") == ["asked:1/0(exclude:0)"]


def test_no_row_starts_workers_before_the_preflight_has_passed() -> None:
    """RUNNING is entered from IDLE by a plan, and from PREPARING only by the end of the preflight."""
    entries = {
        key for key, row in Agent.table.items() if AgentState.RUNNING in row.to and key[0] is not AgentState.RUNNING
    }
    assert entries == {(AgentState.IDLE, Plan), (AgentState.PREPARING, ag.Prepared)}
