"""No run of a log tree stops `nvrx`, whatever its files are, and all other runs are shown."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import hostile
import pytest
from asker import ask
from test_metrics import get, served

pytestmark = pytest.mark.process

REPO = Path(__file__).resolve().parents[2]
ENV = {**os.environ, "PYTHONPATH": str(REPO)}
MOST_MB = 100


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What is wrong with each run, and the run. The last one is as it should be."""
    home, tree = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("tree")
    found = hostile.make(tree, home)
    good = tree / "good/r0"
    shutil.copytree(home / "good", good, symlinks=True)
    (good / "result.json").unlink()
    status = {**hostile.STATUS, "job": {**hostile.STATUS["job"], "job": "good"}, "written": time.time() + 60.0}
    (good / "status.json").write_text(json.dumps(status))
    return {**found, "good": good}


def test_each_answer_is_quick_small_and_no_traceback(runs):
    asked = json.dumps({what: str(run.parent) for what, run in runs.items()})
    words = [sys.executable, str(Path(__file__).with_name("asker.py"))]
    env = {**ENV, "PET_LOG_DIR": str(runs["good"].parents[1])}
    done = subprocess.run(
        words, input=asked, env=env, capture_output=True, text=True, timeout=600, check=True, cwd=runs["good"]
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert len(runs) > 700 and told["wrong"] == {} and told["peak_mb"] < MOST_MB, told


def test_a_bad_run_is_one_line_and_all_others_are_shown(runs, monkeypatch):
    tree = runs["good"].parents[1]
    monkeypatch.setenv("PET_LOG_DIR", str(tree))
    here = {str(run) for run in runs.values() if run.is_symlink() or run.exists()}
    rows = [json.loads(row) for row in ask("list --all --json")[0].stdout.splitlines()]
    assert {row["run"] for row in rows} == here and len(rows) == len(here)
    lines = ask("list --all")[0].stdout.splitlines()
    assert len([line for line in lines if line[0] != " "]) == 1 + len(here) and max(map(len, lines)) < 800
    assert max(len(line) for line in lines if line[0] != " ") < 200
    week = json.loads(ask("goodput --since 999w --json")[0].stdout)
    assert {"good", "result.json0"} <= {*week["jobs"], *week["unreadable"]} and "good" in week["jobs"]
    assert len(week["unreadable"]) > 100
    assert len(ask("goodput --since 999w")[0].stdout.splitlines()) == 1 + len(week["jobs"]) + len(week["unreadable"])


def test_the_exporter_serves_the_others(runs):
    with served("--log-dir", str(runs["good"].parents[1])) as (url, _):
        deadline = time.monotonic() + 60.0
        while 'job_id="good"' not in (text := get(url)[1]):
            assert time.monotonic() < deadline
    unreadable = next(row for row in text.splitlines() if row.startswith("nvrx_exporter_unreadable_runs"))
    assert float(unreadable.split()[-1]) > 50 and max(map(len, text.splitlines())) < 4096
