"""Which module of the coordinator writes a field of another object."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nvrx_slurm.core import coordinator

pytestmark = pytest.mark.fast

CORE = Path(coordinator.__file__).parents[1]
PARTS = (*sorted((CORE / "coordinator").glob("*.py")), CORE / "straggler" / "suspects.py")
# A field with several writers is a debt: this table may only get shorter.
WRITERS = {
    "hangs.search": {"running"},
    "job.assignment": {"roster", "takeover"},
    "job.before": {"gathering"},
    "job.cycle": {"gathering", "roster"},
    "job.elsewhere": {"gathering", "stopping"},
    "job.fresh": {"gathering", "takeover"},
    "job.pause_until": {"stopping"},
    "job.started_at": {"running"},
    "job.suspect": {"gathering", "stopping"},
    "job.term": {"takeover"},
    "job.unwanted": {"gathering", "suspects"},
    "ledger.cause": {"hangs", "running", "takeover"},
    "ledger.checkpoint": {"stopping"},
    "ledger.faults": {"gathering"},
    "ledger.out_of_time": {"ending"},
    "ledger.reached": {"coordinator"},
    "quorum.absent": {"takeover"},
    "quorum.begin_until": {"takeover"},
    "quorum.dead": {"takeover"},
    "quorum.elected": {"takeover"},
    "quorum.electors": {"roster", "takeover"},
    "quorum.fence_until": {"takeover"},
    "quorum.leader": {"takeover"},
    "quorum.missed_at": {"roster", "takeover"},
    "quorum.resign_at": {"coordinator"},
    "quorum.returned": {"takeover"},
    "quorum.silent_s": {"coordinator", "roster"},
    "quorum.unsure": {"takeover"},
}
SHARED = ("job", "ledger", "quorum", "budget", "hangs", "ending")


def writes(text: str) -> set[str]:
    """The fields of shared objects that this source assigns."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            if name.lstrip("_") in SHARED:
                found.add(f"{name.lstrip('_')}.{node.attr}")
    return found


def test_each_field_is_written_where_the_table_says() -> None:
    found: dict[str, set[str]] = {}
    for path in PARTS:
        for field in writes(path.read_text()):
            found.setdefault(field, set()).add(path.stem)
    assert found == WRITERS


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("self._job.cycle = 1", "job.cycle"),
        ("a, job.fresh = 1, 2", "job.fresh"),
        ("quorum.dead |= some", "quorum.dead"),
        ("del roster.job.before", "job.before"),
    ],
)
def test_each_form_of_a_write_is_seen(text: str, field: str) -> None:
    assert writes(text) == {field}
