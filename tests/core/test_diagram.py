"""docs/reference/state-machines.md is what the tables say."""

from __future__ import annotations

from pathlib import Path

import diagram

from nvrx_slurm.core.agent.agent import Agent

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "state-machines.md"


def test_the_document_is_generated() -> None:
    fresh = DOCUMENT.read_text() == diagram.document()
    assert fresh, "run: python scripts/lib/diagram.py > docs/reference/state-machines.md"


def test_a_diagram_begins_ends_and_leaves_out_what_does_nothing() -> None:
    lines = diagram.mermaid(Agent).splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> PREPARING"]
    assert lines[-1] == "    GONE --> [*]"
    assert "    RUNNING --> SUCCEEDED: WorkerExited" in lines
    assert not any(line.startswith("    LEAVING --> LEAVING") and "Plan" in line for line in lines)
