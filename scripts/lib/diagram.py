"""State diagrams of the cores, drawn from the tables that they run on.

python scripts/lib/diagram.py > docs/reference/state-machines.md
"""

from __future__ import annotations

from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.inprocess.phases import Restarts

_INTRODUCTION = """\
# State machines

Generated from the tables in `nvrx_slurm/core` by `python scripts/lib/diagram.py`; a test compares. An event that
has no row in a state is a defect and raises `UnknownTransition`. An event may always leave the state as it is; where a
row names several states, its method decides. The diagrams show only changes of the state.
"""


def mermaid(machine):
    """A mermaid `stateDiagram-v2` of all transitions to another state."""
    first = next(iter(machine.table))[0]
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), row in machine.table.items():
        for target in row.to:
            arrows.setdefault((state.name, target.name), []).append(event.__name__)
    lines += [f"    {state} --> {target}: {', '.join(events)}" for (state, target), events in arrows.items()]
    lines += [f"    {state.name} --> [*]" for state in _last(machine)]
    return "\n".join(lines)


def _last(machine):
    """States without rows: nothing is handled any more."""
    with_rows = {state for state, _ in machine.table}
    yield from (state for state in type(next(iter(with_rows))) if state not in with_rows)


def table(machine):
    """All rows as a Markdown table; equal rows of several states are one line."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for (state, event), row in machine.table.items():
        to = ", ".join(target.name for target in row.to if target is not state)
        lines.setdefault((event.__name__, to, row.why), []).append(state.name)
    head = ["| state | event | may lead to | why |", "|---|---|---|---|"]
    return "\n".join([*head, *(f"| {', '.join(states)} | {' | '.join(rest)} |" for rest, states in lines.items())])


def _states(machine):
    states = type(next(iter(machine.table))[0])
    return "\n".join(f"- **{state.name}**: {state.value}" for state in states)


def document():
    """docs/reference/state-machines.md."""
    parts = [_INTRODUCTION]
    for machine in (Coordinator, Agent, Election, Restarts):
        parts.append(f"## {machine.__name__}\n\n{_states(machine)}\n")
        parts.append(f"```mermaid\n{mermaid(machine)}\n```\n\n{table(machine)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(document(), end="")
