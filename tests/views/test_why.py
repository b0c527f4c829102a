"""`nvrx why` on the log trees of real jobs, and on damaged ones."""

import io
import json
from pathlib import Path

import pytest
from toolbox import nvrx, nvrx_json

from nvrx_slurm.views import why

pytestmark = pytest.mark.fast


CAUSE = {
    "kind": "exit", "host": "n3", "infra_rank": 3, "rank": 7, "local_rank": 1, "exit_code": 1, "traceback": "",
    "message": "CUDA error: uncorrectable ECC error \x1b[2J", "log": "/l/rank_7.err", "line": "/w/train.py:16",
    "finding": {"rule": "gpu-ecc", "blame": "node", "confidence": "certain", "line": "uncorrectable ECC error"},
}  # fmt: skip
ECHO = {"kind": "exit", "host": "n1", "rank": 2, "rule": "gloo-peer"}
RESTART = {"cycle": 0, "time": "2026-03-01T10:00:00", "down_s": 1.5, "cause": "rank 7 exited"}
RESULT = {
    "code": 1, "reason": "all restarts are used", "duration_s": 65.0, "summary": "1 restart", "first_cause": CAUSE,
    "restarts": [RESTART], "last_faults": [ECHO, {**ECHO, "rank": 3}, {**CAUSE, "rule": "gpu-ecc"}],
    "excluded_nodes": ["n3"], "inprocess_restarts": [{"cycle": 0, "iteration": 4, "why": "rank 1: exception: E"}],
}  # fmt: skip


def told(place, code=0):
    result = nvrx("why", place)
    assert result.exit_code == code, result.output
    return result.output


def test_an_ended_job(tmp_path):
    (tmp_path / "result.json").write_text(json.dumps(RESULT))
    text = told(tmp_path)
    for part in ("code 1", "cycle 0 failed", "rank 7 on node n3", "gpu-ecc", "2 x gloo-peer", "excluded nodes: n3"):
        assert part in text
    assert "/w/train.py:16" in text and "iteration 4 was" in text and "\x1b" not in text


def test_each_thing_is_told_once_and_json_has_all(tmp_path):
    log = tmp_path / "cycle_0/node_3_n3/rank_7.err"
    log.parent.mkdir(parents=True)
    log.write_text(f"{'noise' * 3}\n" * 41 + "[rank7]: RuntimeError: CUDA error: uncorrectable ECC error\nadvice\n")
    message = "RuntimeError: CUDA error: uncorrectable ECC error"
    line = {"finding": {**CAUSE["finding"], "line": message}, "message": message, "log": str(log)}  # type: ignore[dict-item]
    cause = {**CAUSE, **line, "class": "gpu-memory-error", "what_to_do": "Report the node."}
    head = f"rank 7 (local rank 1, pid 0) on node 3 (n3) exited with code 1: {message}"
    result = {**RESULT, "first_cause": cause, "reason": f"{head}; all restarts are used", "cycles": 2}
    result["restarts"] = [{**RESTART, "cause": head}]
    (tmp_path / "result.json").write_text(json.dumps(result))
    text = told(tmp_path)
    assert text.count(message) == 1 and f"{log}:42" in text
    parts = [
        "first cause: ",
        "to blame: node (certain)",
        "evidence: rank 7 on node n3",
        "what was done",
        "what to do: Report",
    ]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    story = nvrx_json("why", "--json", tmp_path)
    found = [story[key] for key in ("what_happened", "class", "log_line", "what_to_do", "excluded_nodes")]
    assert found == [message, "gpu-memory-error", 42, "Report the node.", ["n3"]]


def test_the_run_that_is_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, run in enumerate(("30/r0", "31/r0", "31/r1")):
        (tmp_path / "nvrx_logs" / run).mkdir(parents=True)
        (tmp_path / "nvrx_logs" / run / "result.json").write_text(json.dumps({"code": code, "reason": "-"}))
    (tmp_path / "nvrx_logs/latest").symlink_to("31/r1")
    for place in ("", "latest", "31", "31/r1", "nvrx_logs", "nvrx_logs/31/", "nvrx_logs/31/r1"):
        said = nvrx("why", *filter(None, [place])).output
        assert said.startswith("job 31 (nvrx_logs/31/r1): ended with code 2"), said
        assert "nvrx_logs/31/r1 has no events" in nvrx("replay", place or "31").output
    assert "32" in told(Path("32"), 2)


def test_a_running_job_tells_what_its_coordinators_said(tmp_path):
    (tmp_path / "events").mkdir()
    for term, name in enumerate(("coordinator", "coordinator_term_2_node_1")):
        step = {"wall": 10.0 + term, "commands": [{"type": "Say", "text": f"said in term {term + 1}\n  to do: x"}]}
        (tmp_path / "events" / f"{name}.jsonl").write_text(f"{json.dumps(step, separators=(',', ':'))}\n{{torn")
    text = told(tmp_path)
    assert text.index("said in term 1\n      to do: x\n") < text.index("+1.0s  said in term 2")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"first_cause": 3}', '{"first_cause": {}}', '{"restarts": [1]}'])
def test_a_damaged_result_is_one_sentence(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    assert "result.json" in told(tmp_path, 2)


def test_a_directory_without_a_run_is_said(tmp_path):
    assert "neither" in told(tmp_path, 2)


@pytest.mark.parametrize("log", ["/etc/passwd", "../../passwd"])
def test_a_log_that_is_not_of_the_run_is_not_looked_into(tmp_path, log):
    run = tmp_path / "7/r0"
    run.mkdir(parents=True)
    for place in (tmp_path, run):
        (place / "passwd").write_text("root: one\n")
    cause = {**CAUSE, "log": log, "finding": {**CAUSE["finding"], "line": "root:"}}
    (run / "result.json").write_text(json.dumps({**RESULT, "first_cause": cause}))
    assert nvrx_json("why", "--json", run)["log_line"] == 0


class Growing(io.FileIO):
    """Its writer is faster than who reads it."""

    reads = 0

    def read(self, size=-1):
        self.reads += 1
        assert self.reads < 9
        with open(self.name, "ab") as file:
            file.write(b"x" * size)
        return super().read(size)


def test_a_log_that_grows_while_it_is_read_is_read_up_to_what_it_was(tmp_path, monkeypatch):
    log = tmp_path / "cycle_0/node_0_n3/rank_7.err"
    log.parent.mkdir(parents=True)
    log.write_text("a\nuncorrectable ECC error\n")
    monkeypatch.setattr(why, "opened", lambda *place: Growing(Path(*place)))
    cause = {**CAUSE, "log": f"/w/{log.relative_to(tmp_path)}"}
    (tmp_path / "result.json").write_text(json.dumps({**RESULT, "first_cause": cause}))
    assert nvrx_json("why", "--json", tmp_path)["log_line"] == 2
