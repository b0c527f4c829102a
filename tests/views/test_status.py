"""`nvrx status` and `nvrx list` on files: what is healthy, what needs a person, and what cannot be told."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toolbox import nvrx

from nvrx_slurm.config.layers import SETTINGS
from nvrx_slurm.core.coordinator import status as core_status
from nvrx_slurm.views import log_tree, status

pytestmark = pytest.mark.fast


NOW = time.time()
NODES = {
    "expected": 3, "needed": 2, "active": 2, "spare": 1, "missing": 0, "excluded": 0, "gone": [],
}  # fmt: skip
LOST = {**NODES, "spare": 0, "missing": 1, "gone": [{"host": "n7", "how": "lost", "time": NOW - 60}]}
INCIDENT = {
    "time": NOW - 60,
    "cycle": 3,
    "cause": "boom",
    "rule": "gpu-ecc",
    "done": "restarted",
    "down_s": 1.5,
}
GOOD = {
    "version": 1, "term": 1, "writer": "w", "written": NOW, "interval_s": 5.0, "state": "running", "since": NOW - 100,
    "job": {"job": "7", "run": "r0", "name": "llama", "user": "ann", "partition": "gpu", "hangs_watched": True},
    "began": NOW - 900, "cycle": 4, "waits": None, "end": None, "allocation_ends": NOW + 3600, "nodes": NODES,
    "restarts": {"used": 1, "allowed": 10}, "spares_used": [], "hang": None, "incidents": [INCIDENT],
    "no_progress": 0, "account": None, "checkpoint": {"iteration": 18300, "time": NOW - 120},
    "ranks": {"table": [["n1", 0, 8, "busy"], ["n2", 8, 8, "busy"]], "spares": ["n3"]},
}  # fmt: skip
WAITS = {"state": "waiting", "waits": {"why": "1 of at least 2 nodes are here; missing: n9", "until": NOW + 200}}
OPEN = [[13, "step", 22.0], [0, "step", 0.2]]
TRAINS = {"progress": {"ranks": 16, "stepped": 16, "steps": 41, "step_s": 0.5, "open": OPEN}}
SAVES = {"checkpoint": {"iteration": 18300, "time": NOW - 120, "every_s": 300.0, "iteration_s": 3.0}}
# What is different from GOOD; the exit code, and what is said.
CASES = {
    "good": ({}, 0, (
        "healthy", "1 min 40 s", "15 min", "llama", "ann", "cycle 4", "2 active", "1 of 10", "18300", "1 h", "gpu-ecc",
        "1.5 s",
    )),
    "silent": ({"written": NOW - 41}, 1, ("silent", "41")),
    "as old as three intervals": ({"written": NOW - 14}, 0, ("healthy",)),
    "a longer interval": ({"written": NOW - 41, "interval_s": 20.0}, 0, ("healthy",)),
    "written by a clock ahead": ({"written": NOW + 14}, 0, ("healthy",)),
    "far ahead": ({"written": NOW + 60}, 1, ("clock", "1 min ahead")),
    "no spare is left": ({"nodes": LOST}, 2, ("no spare", "1 of 3", "n7 lost")),
    "lost, but one is left": ({"nodes": {**LOST, "expected": 4, "spare": 1}}, 0, ("healthy", "1 missing")),
    "there never was a spare": ({"nodes": {**LOST, "needed": 3}}, 0, ("healthy",)),
    "few restarts are left": ({"restarts": {"used": 9, "allowed": 10}}, 2, ("1 of 10 restarts are left",)),
    "none was allowed": ({"restarts": {"used": 0, "allowed": 0}}, 0, ("healthy",)),
    "waits": ({**WAITS, "since": NOW - 9, "cycle": -1}, 0, ("missing: n9", "3 min")),
    "waits for long": (WAITS, 2, ("waiting for 1 min", "missing: n9")),
    "from memory": ({"incidents": [{**INCIDENT, "resumed": "iteration 7 is"}]}, 0, ("iteration 7 is", "healthy")),
    "dies at its start": ({"state": "paused"}, 2, ("again and again",)),
    "no progress": ({"no_progress": 2}, 2, ("2 cycles",)),
    "time limit": ({"allocation_ends": NOW}, 2, ("the time limit has come", "--until-done")),
    "hang": ({"hang": {"rank": 3}, "waits": {"why": "x", "until": NOW - 99}}, 2, ("a rank hangs",)),
    "ranks train": (TRAINS, 0, ("step 41 of this cycle, 0.5 s for each", "about 7200 more")),
    "ranks begin to train": ({"progress": {**TRAINS["progress"], "stepped": 3}}, 0, ("3 of 16 ranks have begun",)),
    "checkpoints alone tell": (SAVES, 0, ("3 s for each, about 1200 more", "one every 5 min")),
    "later version": ({"version": 2}, 1, ("version 2",)),
    "ANSI": ({"job": {**GOOD["job"], "name": "\x1b[2J\u202eevil"}}, 0, ("\\x1b[2J", "healthy")),
    "no job": ({"job": None}, 1, ("no readable status",)),
    "text for a number": ({"written": "soon"}, 1, ("no readable status",)),
    "infinite": ({"since": float("-inf")}, 1, ("no readable status",)),
    "not a number": ({"written": float("nan")}, 1, ("no readable status",)),
    "huge": ({"incidents": [{**INCIDENT, "time": 1e300}]}, 1, ("no readable status",)),
    "a list of incidents that is none": ({"incidents": 3}, 1, ("no readable status",)),
}  # fmt: skip


def put(run, **change):
    run.mkdir(parents=True, exist_ok=True)
    (run / "status.json").write_text(json.dumps({**GOOD, **change}))


def observed(run, **change):
    put(run, **change)
    return status.observe(run, NOW, ranks=True)


@pytest.mark.parametrize(("change", "code", "parts"), CASES.values(), ids=CASES)
def test_what_a_status_means(tmp_path, change, code, parts):
    seen = observed(tmp_path, **change)
    assert seen.code == code, seen
    assert "\x1b" not in nvrx("status", tmp_path).output
    said = "\n".join((seen.head, seen.verdict, *seen.lines)).replace("\x1b", "\\x1b")
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize("content", ["", "[]", "{", "3", '"x"', "null", '{"version": 1}', "[" * 10**5, "\x00\xff"])
def test_a_damaged_status_is_one_sentence(tmp_path, content):
    (tmp_path / "status.json").write_text(content, encoding="latin-1")
    done = nvrx("status", tmp_path)
    assert done.exit_code == 1 and "cannot tell" in done.output and done.output.count("\n") == 2


def test_ranks_have_the_age_of_their_sections(tmp_path):
    lines = observed(tmp_path, **TRAINS).lines
    assert lines[-3:] == (
        "n1  ranks 0-7  busy  0 in step for 0.2 s",
        "n2  ranks 8-15  busy  13 in step for 22.0 s",
        "n3  spare",
    )


def test_each_node_has_how_it_starts_ranks(tmp_path):
    warmth = {"warmth": ["", "warm: torch", "cold: busy"], "warmth_of": [1, 0, 2]}
    lines = observed(tmp_path, ranks={**GOOD["ranks"], **warmth}).lines
    starts = [line for line in lines if line.startswith("starts")]
    assert starts == ["starts      cold: busy (n3)", "starts      warm: torch (n1)"]
    assert lines[-3:] == ("n1  ranks 0-7  busy  warm: torch", "n2  ranks 8-15  busy", "n3  spare  cold: busy")


def test_what_is_not_there_cannot_be_told(tmp_path):
    (tmp_path / "r0").mkdir()
    os.mkfifo(tmp_path / "r0/status.json")  # reading it would never end
    assert nvrx("status", tmp_path / "r0").exit_code == 1
    assert nvrx("status", tmp_path).exit_code == nvrx("status", tmp_path / "9").exit_code == 1


def test_a_log_tree_is_listed_and_its_runs_are_found(tmp_path):
    for job, content in {"1/r0": {}, "2/r0": {"written": time.time()}, "2/r1": {"nodes": LOST}}.items():
        put(tmp_path / job, **{"written": time.time(), **content})
    result = {"code": 93, "reason": "r", "duration_s": 3}
    (tmp_path / "1/r0/result.json").write_text(json.dumps(result))
    env = {log_tree.LOG_DIR_ENV: str(tmp_path)}
    assert [nvrx("status", place, **env).exit_code for place in ("1", "2", "2/r0")] == [3, 2, 0]
    rows = [json.loads(line) for line in nvrx("list", "--json", **env).output.splitlines()]
    assert sorted((Path(row["run"]).name, row["code"]) for row in rows) == [("r0", 0), ("r0", 3), ("r1", 2)]
    assert "no run" in nvrx("list", "--log-dir", "/nonexistent").output
    one = json.loads(nvrx("status", "2", "--json", **env).output)
    assert one["status"]["nodes"] == LOST and one["code"] == 2 and "no spare" in one["verdict"]


@pytest.mark.parametrize("words", ["list", "status", "why", "goodput", "goodput --since 1d", "logs", "report"])
def test_readers_ask_slurm_for_nothing(tmp_path, monkeypatch, words):
    for tool in ("squeue", "sacct", "scontrol", "sinfo", "srun", "scancel"):
        (tmp_path / tool).write_text(f"#!/bin/sh\necho {tool} >> {tmp_path}/asked\n")
        (tmp_path / tool).chmod(0o755)
    subprocess.run(["squeue"], env={"PATH": str(tmp_path)}, check=True)
    put(tmp_path / "logs/7/r0", written=time.time())
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    assert nvrx(*words.split(), PET_LOG_DIR=str(tmp_path / "logs")).output
    assert (tmp_path / "asked").read_text() == "squeue\n"


@pytest.fixture
def ordinary():
    """Runs the test as the user nobody: root may read every file."""
    if os.geteuid() == 0:
        os.seteuid(65534)
        yield
        os.seteuid(0)
    else:
        yield


@pytest.fixture
def private(tmp_path, monkeypatch):
    """A log tree with two jobs. Only its owner may read the second one."""
    for job in ("1/r0", "2/r0"):
        put(tmp_path / job, written=time.time())
    (tmp_path / "2").chmod(0)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    tmp_path.chmod(0o755)
    (tmp_path / "2").chmod(0o755)


@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["goodput", "--since", "1d"]], ids=" ".join)
def test_what_may_not_be_read_is_said(private, ordinary, words):
    shown = nvrx(*words, PET_LOG_DIR=".")
    assert "not shown: 1 job of . that you may not read" in shown.stderr and "not shown" not in shown.stdout


def test_a_log_tree_that_may_not_be_read_is_not_called_empty(private, monkeypatch, request):
    private.chmod(0o711)
    request.getfixturevalue("ordinary")
    shown = nvrx("list", PET_LOG_DIR=".")
    assert ". cannot be read; ask its owner" in shown.stderr and "no run" not in shown.output


def test_a_list_is_a_table_that_fits_80_columns(tmp_path):
    costs = {"detect_s": 3.0, "down_s": 1.0, "again_s": 2.0, "recomputed_s": None}
    result = {"code": 93, "reason": "r", "started": "2026-03-01T10:00:00Z", "restarts_used": 1, "restarts": [costs]}
    restarts = {"used": 1, "allowed": 10, "down_s": 2.5}
    account = {"node_seconds": {"detect": 40.0, "recomputed": 6.0, "stop": 9.0, "productive": 70.0}}  # of two nodes
    runs = {
        "1/r0": TRAINS, "2/r1": {"restarts": restarts, "account": account, **TRAINS},
        "3/r0": {"checkpoint": None, "nodes": LOST}, "4/r0": {"job": None},
    }  # fmt: skip
    for job, content in runs.items():
        put(tmp_path / job, **{"written": time.time(), **content})
    (tmp_path / "1/r0/result.json").write_text(json.dumps(result))
    (tmp_path / "5/r0").mkdir(parents=True)
    lines = nvrx("list", **{log_tree.LOG_DIR_ENV: str(tmp_path)}).output.splitlines()
    assert lines[0].split() == ["JOB", "NAME", "STATE", "START", "NODES", "STEP", "RESTARTS", "LOST"]
    rows = {line.split()[0]: line.split() for line in lines[1:] if line[0] != " "}
    assert rows["1"][1:4] == ["llama", "ended", "93"] and rows["1"][-4:] == ["18300", "1", "6.0", "s"]
    assert rows["2/r1"][1:3] == ["llama", "running"] and rows["2/r1"][-5:] == ["2+1", "18300", "1/10", "25.5", "s"]
    (paced,) = [line for line in lines if "of this cycle" in line]
    assert paced.startswith("  step 41 of this cycle, 0.5 s for each")
    assert rows["3"][-3:] == ["-", "1/10", "-"]  # not known, which is not 0
    assert rows["4"][1:2] == ["-"] and rows["5"][1:] == ["-"] * 7
    assert sum("no spare" in line or "cannot tell" in line for line in lines) == 3
    assert max(map(len, lines[:2])) <= 80


def test_it_is_quick_and_what_it_says_twice_is_the_same():
    """Imports are what it costs; the settings alone take five times as long."""
    code = "import sys, nvrx_slurm.views.status, nvrx_slurm.cli.toolbox; print(*sys.modules)"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    loaded = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    heavy = {"nvrx_slurm.types", "nvrx_slurm.config.settings", "asyncio", "dataclasses", "subprocess"}
    assert heavy & set(loaded.split()) == set()
    assert status.VERSION == core_status.VERSION
    assert SETTINGS["log_dir"].env == (log_tree.LOG_DIR_ENV,) and SETTINGS["log_dir"].default == log_tree.LOG_DIR


def test_of_a_job_with_any_number_of_runs_so_many_are_looked_at(tmp_path, monkeypatch):
    """200,000 folders of one user took 29 s of root's `nvrx goodput`, and 120 MB of the exporter."""
    for run in range(9):
        (tmp_path / f"r{run}").mkdir()
    monkeypatch.setattr(log_tree, "_MOST_RUNS", 4)
    assert len(log_tree.runs_of(tmp_path)) == 4
