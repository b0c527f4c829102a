"""What is said and written at the end of a job."""

import asyncio
import json
import os
import threading
from functools import partial

import pytest
from waits import WAIT_S

from nvrx_slurm import types as t
from nvrx_slurm.core.coordinator.events import JobOver
from nvrx_slurm.core.words import in_words
from nvrx_slurm.declared import replace
from nvrx_slurm.node.output import result, writer

pytestmark = pytest.mark.process


BAD = 'Traceback (most recent call last):\n  File "/w/train.py", line 16, in <module>\nValueError: bad\n'
CAUSE = t.RankFault(t.FaultKind.EXIT, "n2", 1, 3, 1, 4711, 1, "ValueError: bad", BAD, "/logs/rank_3.err")
LOST = t.FaultRecord(2.0, 0, t.FaultKind.NODE_LOST, "n3", 2, -1, -1, 0, "node 2 (n3) was lost: reset")
CRASH = t.FaultRecord(4.5, 1, t.FaultKind.SIGNAL, "n2", 1, 3, 1, -9, "rank 3 was killed by SIGKILL")
EXIT = t.FaultRecord(8.25, 2, t.FaultKind.EXIT, "n2", 1, 3, 1, 1, "rank 3 exited with code 1")
HANG = t.FaultRecord(8.5, 2, t.FaultKind.HANG, "n1", 0, 0, 0, -9, "rank 0 hung")
RESTARTS = (
    t.RestartRecord(0, 2.0, 3.0, "node 2 (n3) was lost", iteration=10, checkpoint=3, detect_s=0.5),
    t.RestartRecord(1, 4.5, 0.1, "rank 3", recomputed_s=1.5, again_s=0.5),
)
JOB = t.JobReport(
    12.0, 3, 2, RESTARTS, (LOST, CRASH), 0, (CRASH,), lost_nodes=("n3",), spares_used=("n4",), down_s=3.1,
    account=t.Account(12.0, 6.0, ()),
)  # fmt: skip
GOOD = JobOver(0, "all ranks finished", None, JOB)
LAST = (EXIT, HANG, replace(LOST, cycle=2))
WHY = "rank 3 (local rank 1, pid 4711) on node 1 (n2) exited with code 1: ValueError: bad; all 2 restarts are used"
FAILED = JobOver(1, WHY, CAUSE, replace(JOB, faults=(LOST, CRASH, *LAST), last_faults=LAST))
SURVIVED = t.JobReport(90.0, 1, faults=(LOST, CRASH), excluded_nodes=("n5", "n6"))
HISTORY = "2 restarts, 1 lost node, 1 used spare, 7 steps and 5.6 s lost, 50.0 % productive"
CANCELLED = JobOver(143, "cancelled", None, replace(JOB, lost_nodes=(), spares_used=()))


@pytest.mark.parametrize(
    "done, line",
    [
        (
            GOOD,
            f"code 0: all ranks finished after {HISTORY} (12.0 s in all)",
        ),
        (JobOver(0, "all ranks finished", None, t.JobReport(0.04)), "code 0: all ranks finished (0.04 s in all)"),
        (
            JobOver(0, "all ranks finished", None, SURVIVED),
            "code 0: all ranks finished after 2 survived faults, 2 excluded nodes (1 min 30 s in all)",
        ),
        (CANCELLED, "code 143: cancelled; 2 restarts, 7 steps and 5.6 s"),
        (
            FAILED,
            f"code 1: all 2 restarts are used; {HISTORY} (12.0 s in all)",
        ),
    ],
)
def test_one_line_tells_the_history(done, line):
    assert result.sentence(done).splitlines()[0].startswith(f"job ends with {line}")


def test_a_failing_end_lists_the_failed_ranks_and_the_first_cause_last():
    _, title, _, *rows = result.sentence(FAILED).splitlines()
    assert title == "failed in cycle 2:"
    assert [row.split() for row in rows[:3]] == [
        ["+8.25s", "3", "1", "1", "(n2)", "code", "1"],
        ["+8.50s", "0", "0", "0", "(n1)", "hang", "(SIGKILL)"],
        ["+2.00s", "-", "-", "2", "(n3)", "node-lost"],
    ]
    assert rows[3].startswith("first cause: rank 3 ")
    assert rows[4:6] == ["  at: /w/train.py:16", "  log: /logs/rank_3.err"]
    assert rows[-1] == "  | ValueError: bad"
    echo = replace(HANG, kind=t.FaultKind.EXIT, exit_code=1, rule="gloo-peer")
    victim = replace(FAILED, report=replace(JOB, last_faults=(EXIT, echo)))
    marked = [line for line in result.sentence(victim).splitlines() if "victim" in line]
    assert len(marked) == 1 and marked[0].split()[1] == "0"
    many = replace(FAILED, report=replace(JOB, last_faults=(EXIT,) * 1000))
    assert "and 968 more" in result.sentence(many) and result.sentence(many).count("code 1") < 40
    alone = replace(FAILED, report=replace(JOB, last_faults=(EXIT,)))
    assert "failed in cycle" not in result.sentence(alone)


def publish(path, done=GOOD):
    said = []

    async def write():
        file = writer.Writer(said.append)
        file.put(path, partial(result.write_result, path, result.content(done, 2)))
        await file.close(writer.HANGS_S)

    asyncio.run(write())
    return said


def test_the_file_keeps_its_keys_and_tells_every_fault_with_its_time(tmp_path):
    publish(tmp_path / "result.json", FAILED)
    written = json.loads((tmp_path / "result.json").read_text())
    assert (written["first_cause"]["rank"], written["first_cause"]["line"]) == (3, "/w/train.py:16")
    assert [(f["cycle"], f["host"], f["kind"], f["at_s"]) for f in written["faults"][:2]] == [
        (0, "n3", "node-lost", 2.0), (1, "n2", "signal", 4.5),
    ]  # fmt: skip
    assert written["faults"][0]["time"] < written["faults"][1]["time"] < written["ended"]
    assert [r["down_s"] for r in written["restarts"]] == [3.0, 0.1] and len(written["last_faults"]) == 3
    wanted = {
        "code": 1, "reason": WHY, "slurm_restart_count": 2, "restarts_used": 2, "lost_nodes": ["n3"],
        "excluded_nodes": [], "spares_used": ["n4"], "down_s": 3.1, "duration_s": 12.0,
    }  # fmt: skip
    assert {name: written[name] for name in wanted} == wanted
    assert os.listdir(tmp_path) == ["result.json"]
    publish(tmp_path / "result.json")
    assert json.loads((tmp_path / "result.json").read_text())["first_cause"] is None


def test_restarts_in_process_are_in_the_order_of_cycles(tmp_path):
    for cycle in (2, 10):
        notes = tmp_path / f"cycle_{cycle}" / "inprocess.jsonl"
        notes.parent.mkdir()
        notes.write_text(json.dumps({"cycle": cycle, "iteration": 1, "why": "a rank died"}))
    publish(tmp_path / "result.json")
    told = json.loads((tmp_path / "result.json").read_text())["inprocess_restarts"]
    assert [one["cycle"] for one in told] == [2, 10]


def test_a_file_system_that_fails_or_hangs_costs_the_file_only(tmp_path, monkeypatch):
    assert "No such file" in publish(tmp_path / "gone" / "result.json")[0]
    monkeypatch.setattr(writer, "HANGS_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(result, "write_atomic", lambda path, data: answers.wait(WAIT_S))
    assert "within 0.01 s" in publish(tmp_path / "result.json")[0]
    answers.set()


def test_durations_in_words():
    seconds = (0.0, 0.051, 3.14, 59.9, 60.0, 61.4, 3599.6, 3660.0, 86400.0)
    words = ["0.00 s", "0.05 s", "3.1 s", "59.9 s", "1 min", "1 min 1 s", "1 h", "1 h 1 min", "24 h"]
    assert [in_words(one) for one in seconds] == words
