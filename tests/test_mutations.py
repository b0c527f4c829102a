"""The table of mutants (tests/mutations): each defect has its place and its tests. `scripts/mutants` applies them."""

import subprocess
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[1]
TABLE = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((REPO / "tests/mutations").glob("*.yaml"))}


@pytest.mark.fast
def test_each_mutation_has_its_place_and_its_tests():
    rows = [row for room in TABLE.values() for row in room]
    assert len(rows) > 200
    assert [row["name"] for row in rows if (REPO / row["file"]).read_text().count(row["find"]) != 1] == []
    words = {word.partition("::") for row in rows for word in row["tests"] if word.startswith("tests/")}
    texts = {path: (REPO / path).read_text() if (REPO / path).is_file() else "" for path, _, _ in words}
    assert [word for word in words if word[2].partition("[")[0] not in texts[word[0]]] == []
    assert [path for path in texts if not (REPO / path).exists()] == []


@pytest.mark.matrix
def test_the_program_applies_one():
    if not (REPO / ".venv").exists():
        pytest.skip("scripts/test has not made .venv here")
    words = [REPO / "scripts/mutants", "restarts-one-too-many"]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout.count(b"1 killed, 0 survived") == 1
