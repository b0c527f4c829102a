"""Every row of the cores' tables matters: some test needs it, and it leads everywhere it says it may lead.

The tests of the modules in SUITES are run under a recorder. Then, for each row, the first test that
visits it is run again without the row, and must fail with UnknownTransition.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import pytest

from nvrx_slurm.core.inprocess.phases import Restarts
from nvrx_slurm.core.job.agent import Agent, State
from nvrx_slurm.core.job.coordinator import Coordinator
from nvrx_slurm.core.machine import Machine
from nvrx_slurm.errors import UnknownTransition

from . import (
    test_agent,
    test_agent_requests,
    test_coordinator,
    test_min_healthy,
    test_phases,
    test_preflight,
    test_requests,
    test_takeover,
)

Key = tuple[Enum, type]
Scenario = Callable[[], None]

SUITES = {
    Coordinator: (test_coordinator, test_takeover, test_min_healthy, test_requests, test_preflight),
    Agent: (test_agent, test_agent_requests, test_preflight),
    Restarts: (test_phases,),
}
ROWS = [(machine, key) for machine in SUITES for key in machine.table]


def name(value: object) -> str:
    if isinstance(value, tuple):
        return f"{value[0].name}-{value[1].__name__}"
    return getattr(value, "__name__", str(value))


def scenarios(machine: type[Machine]) -> list[Scenario]:
    return [test for suite in SUITES[machine] for title, test in vars(suite).items() if title.startswith("test_")]


@pytest.fixture(scope="module")
def visits() -> dict[tuple[type[Machine], Key], tuple[Scenario, set[Enum]]]:
    """For each row the first scenario that visits it, and all states that any scenario reached from it."""
    found: dict[tuple[type[Machine], Key], tuple[Scenario, set[Enum]]] = {}
    step = Machine.step
    with pytest.MonkeyPatch.context() as patch:
        for machine in SUITES:
            for scenario in scenarios(machine):

                def recorded(self: Machine, event: object, now: float, scenario: Scenario = scenario) -> list[object]:
                    before = self.state
                    commands = step(self, event, now)
                    found.setdefault((type(self), (before, type(event))), (scenario, set()))[1].add(self.state)
                    return commands

                patch.setattr(Machine, "step", recorded)
                scenario()
    return found


@pytest.mark.parametrize(("machine", "key"), ROWS, ids=name)
def test_without_the_row_a_scenario_fails(machine: type[Machine], key: Key, visits, monkeypatch) -> None:
    assert (machine, key) in visits, "no scenario visits this row"
    scenario, _ = visits[machine, key]
    scenario()
    monkeypatch.setattr(machine, "table", {k: row for k, row in machine.table.items() if k != key})
    with pytest.raises(UnknownTransition, match=f"no row for {key[1].__name__} in {key[0].name}"):
        scenario()


@pytest.mark.parametrize(("machine", "key"), ROWS, ids=name)
def test_the_row_leads_wherever_it_says(machine: type[Machine], key: Key, visits) -> None:
    assert (machine, key) in visits, "no scenario visits this row"
    assert visits[machine, key][1] == set(machine.table[key].to)


@pytest.mark.parametrize(("machine", "key"), ROWS, ids=name)
def test_the_row_names_a_method_and_a_reason(machine: type[Machine], key: Key) -> None:
    row = machine.table[key]
    assert callable(getattr(machine, row.do))
    assert row.why
    assert len(set(row.to)) == len(row.to)


def test_an_event_without_a_row_raises() -> None:
    agent = test_agent.AgentBench()
    with pytest.raises(UnknownTransition, match="Agent: no row for WorkerExited in IDLE"):
        agent.exits(0)


def test_a_handler_that_wanders_off_its_row_raises(monkeypatch) -> None:
    agent = test_agent.AgentBench.running()
    monkeypatch.setattr(Agent, "on_warned", lambda self, event, now: setattr(self, "state", State.GONE))
    with pytest.raises(UnknownTransition, match="Warned in RUNNING led to GONE, which its row does not allow"):
        agent.tell(test_agent.ag.Warned(10))
