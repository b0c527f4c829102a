"""`nvrx goodput`: one job, a chain, all jobs of a week, and what is no result."""

import json
from pathlib import Path

import pytest
from toolbox import nvrx, nvrx_json

from nvrx_slurm.core.account.account import BUCKETS, SECTION
from nvrx_slurm.core.account.figures import to_json
from nvrx_slurm.types import Account, NodeTime, SectionTime

pytestmark = pytest.mark.fast


REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "buckets.md"
FAULT = {"cycle": 0, "kind": "hang", "rule": "hang-culprit", "host": "n2", "rank": 1}
LOST = {"detect_s": 60.0, "down_s": 0.5, "again_s": 9.5, "recomputed_s": 30.0, "iteration": 40, "checkpoint": 30}


def node(key, **seconds):
    sections = tuple(SectionTime(name.partition("_")[2], took_s) for name, took_s in seconds.items() if "_" in name)
    return NodeTime(key, f"n{key}", "active", tuple(seconds.get(bucket, 0.0) for bucket in BUCKETS), sections)


NODES = (node("1", productive=800.0, checkpoint=100.0, detect=60.0, recomputed=30.0, of_evaluation=10.0),)
SPARE = NodeTime("2", "n2", "here", tuple(1000.0 * (bucket == "spare_idle") for bucket in BUCKETS))


def write(log_dir, run, ended, **more):
    account = to_json(Account(1000.0, 800.0, (*NODES, SPARE), (), SectionTime("", 100.0, 10)), 100.0, 0.0)
    restarts = [{"cycle": 0, "rank": 1, "time": ended, "cause": "hung", **LOST}] * 2
    result = {"duration_s": 1000.0, "ended": ended, "account": account, "restarts": restarts, "faults": [FAULT]}
    (log_dir / run).mkdir(parents=True)
    (log_dir / run / "result.json").write_text(json.dumps({**result, "spares_used": ["n2"], **more}))


def goodput(log_dir, *words):
    return nvrx("goodput", *words, PET_LOG_DIR=str(log_dir))


def found(log_dir, *words):
    return nvrx_json("goodput", *words, "--json", PET_LOG_DIR=str(log_dir))


def test_a_job_counts_with_all_its_runs_and_the_time_between_them(tmp_path):
    write(tmp_path, "7/r0", "2026-03-01T10:00:00+00:00")
    write(tmp_path, "7/r1", "2026-03-01T10:20:00+00:00", inprocess_restarts=[{}])
    job = found(tmp_path, "7")
    assert (job["runs"], job["wall_s"], job["productive_s"], job["inprocess_restarts"]) == (2, 2300.0, 1600.0, 1)
    assert job["job_ettr"] == pytest.approx(1600 / 2300, abs=1e-6)  # 100 s in the queue before the first, 200 between
    assert (job["productive_share"], job["productive_share_of_training_nodes"]) == (0.4, 0.8)
    assert (job["restarts"], job["lost_s"], job["lost_steps"]) == (4, 400.0, 40)
    assert job["by_cause"] == [{"kind": "hang hang-culprit", "restarts": 4, "lost_s": 400.0}]
    assert job["by_node"][0]["host"] == "n2" and job["grades"]["productive"] == "bounded"
    advice = " ".join(job["advice"])  # sqrt(2 x 10 s x 500 s) = 100 s; 83 s as now
    for part in ("save every 1 min 40 s", "20.0 %", "took over 2 times", "1 min 40 s each time", "n2 caused 4 of 4"):
        assert part in advice
    assert "took over 1 time;" in " ".join(found(tmp_path, "7/r0")["advice"])
    assert found(tmp_path, str(tmp_path / "7" / "r0"))["runs"] == 1
    text = goodput(tmp_path, "7").output
    assert "40 steps" in text and "job ettr" in text and f"{SECTION}evaluation" in text


@pytest.mark.parametrize(("again_s", "cold"), [(1.0, False), (90.0, True)])
def test_imports_of_restarts_are_told_and_not_those_of_the_first_start(tmp_path, again_s, cold):
    nodes = (node("1", **{"productive": 800.0, "import": 200.0}),)
    account = to_json(Account(1000.0, 800.0, nodes, (), SectionTime("", 0.0, 0)), 0.0, 0.0)
    restart = {"cycle": 0, "rank": 1, "time": "2026-03-01T10:00:00+00:00", "cause": "x", **LOST, "again_s": again_s}
    write(tmp_path, "7/r0", "2026-03-01T10:00:00+00:00", account=account, restarts=[restart])
    assert ("doctor --warm" in " ".join(found(tmp_path, "7")["advice"])) is cold


def test_a_chain_counts_with_all_its_links(tmp_path):
    write(tmp_path, "7/r0", "2026-03-01T10:00:00+00:00")
    write(tmp_path, "8/r0", "2026-03-01T10:20:00+00:00")
    (tmp_path / "chain_1").write_text("7\n8\n9\n")
    assert (found(tmp_path, "chain_1")["runs"], found(tmp_path, "7", "8")["wall_s"]) == (2, 2300.0)


@pytest.mark.parametrize(("runs", "share"), [(["7"], None), (["7", "8"], 0.4)])
def test_a_run_of_which_little_is_known_hides_no_other_one(tmp_path, runs, share):
    """What is not known of it counts as not productive."""
    account = to_json(Account(1000.0, 0.0, (), (), SectionTime("", 0.0, 0)), 0.0, 0.0)
    write(tmp_path, "7/r0", "2026-03-01T10:00:00+00:00", account={**account, "rest": "unknown"})
    write(tmp_path, "8/r0", "2026-03-01T10:20:00+00:00")
    assert found(tmp_path, *runs)["productive_share"] == share


def test_all_jobs_of_a_week_have_a_line_each(tmp_path):
    write(tmp_path, "7/r0", "2026-03-01T10:00:00+00:00")
    write(tmp_path, "8/r0", "2026-03-01T10:20:00+00:00", restarts=[], account=None)
    (tmp_path / "9" / "r0" / "events").mkdir(parents=True)  # it has just begun
    jobs = found(tmp_path, "--since", "1d")["jobs"]
    assert [(name, job["runs_without_account"]) for name, job in jobs.items()] == [("7", 0), ("8", 1)]
    assert jobs["7"]["user"] == tmp_path.owner()
    rows = goodput(tmp_path, "--since", "1d").output.splitlines()
    assert len(rows) == 3 and rows[1].startswith("7 ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--since", "soon"], "12h"),
        (["7", "--since", "7d"], "--since"),
        (["nowhere"], "job id"),
        (["7"], "not written like this"),
        (["9"], "nothing is known"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, words, said):
    write(tmp_path, "7/r0", "2026-03-01T10:00:00+00:00", account={"node_seconds": []})
    (tmp_path / "9" / "r0" / "events").mkdir(parents=True)
    (tmp_path / "9" / "r0" / "events" / "coordinator.jsonl").write_text('{"nvrx":"1"}\nno JSON\n{"wall":[]}\n')
    result = goodput(tmp_path, *words)
    assert result.exit_code == 2 and said in result.output


def test_the_reference_has_each_bucket():
    text = REFERENCE.read_text()
    for name, (grade, definition) in BUCKETS.items():
        assert f"| `{name}` | {grade.value} | {definition} |" in text
