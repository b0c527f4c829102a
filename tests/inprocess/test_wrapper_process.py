"""What is odd about a rank's process: children that its function forks, closed streams, an empty environment."""

from __future__ import annotations

import io
import logging
from pathlib import Path

import pytest
from ranks_harness import Job

from nvrx_slurm.inprocess.log import _OurHandler


@pytest.mark.parametrize(
    ("place", "how", "code", "said"),
    [
        ("function", "raise", 1, {"kind": "ValueError", "chain": ["ValueError: of the child"]}),
        ("function", "exit", 3, {"kind": "SystemExit"}),
        ("function", "return", 0, {"value": "of the child"}),
        ("initialize", "raise", 1, {"kind": "ValueError"}),
        ("initialize", "return", 0, {}),
    ],
)
def test_a_child_that_the_user_forks_is_no_rank(
    job: Job, tmp_path: Path, place: str, how: str, code: int, said: dict[str, object]
) -> None:
    """It ends as it likes; the ranks go on, and the death of its own is seen as ever."""
    job.start("forks", 3, module="scenarios_process", place=place, how=how)
    child = job.await_event(1, "child")
    assert child["code"] == code and child.get("suspended", 1) == 1
    assert job.of(1, "returned" if how == "return" else "raised", **said)
    job.await_events(range(3), "waited")
    assert not any(job.of(rank, "entered", iteration=1) for rank in range(3))
    (tmp_path / "fault").touch()
    for rank in (0, 2):
        job.await_event(rank, "entered", iteration=1, WORLD_SIZE="2")
        assert job.await_end(rank) == 0
    assert "rank 1: its process has ended" in (tmp_path / "monitor1.log").read_text()
    job.await_nothing_left()


@pytest.mark.parametrize(("how", "code"), [("raise", 1), ("exit", 3), ("return", 0)])
def test_a_child_that_abort_forks_ends(job: Job, how: str, code: int) -> None:
    """It has neither main thread nor function; the rank goes on."""
    job.start("abort_forks", 2, module="scenarios_process", how=how)
    for rank in range(2):
        assert job.await_event(rank, "child")["code"] == code
        job.await_event(rank, "entered", iteration=1, WORLD_SIZE="2")
        assert job.await_end(rank) == 0
        assert ("ValueError: of the child" in job.err(rank).read_text()) == (how == "raise")
    job.await_nothing_left()


def test_what_a_child_asks_of_the_wrapper_concerns_no_rank(job: Job) -> None:
    """Even if the monitor thread held the lock of atomic blocks when it was forked."""
    job.start("child_asks", 1, module="scenarios_process")
    assert job.await_event(0, "child")["code"] == 0
    assert job.of(0, "child", pinged=False, suspended=0)
    assert job.await_event(0, "returned")["value"] == "done"
    job.await_nothing_left()


@pytest.mark.parametrize("closed", [[0], [0, 1, 2]])
def test_no_socket_takes_the_place_of_a_closed_stream(job: Job, closed: list[int]) -> None:
    job.start("closed", 2, module="scenarios_process", closed=closed)
    for rank in range(2):
        assert job.await_event(rank, "entered", iteration=1)["streams"] == ["/dev/null"] * len(closed)
        assert job.await_event(rank, "returned")["value"] == "done"
        assert job.await_end(rank) == 0
    job.await_nothing_left()


def test_a_rank_0_that_never_comes_is_named(job: Job) -> None:
    """It has failed at its entry, for example."""
    job.start("waits_for_store", 2, ranks=[1], module="scenarios_process", timeout=0.5)
    chain = job.await_event(1, "raised")["chain"]
    assert f"nobody has listened on 127.0.0.1:{job.port} (MASTER_ADDR, MASTER_PORT) for 0.5 s; rank 0" in chain[0]
    assert job.await_end(1) == 1
    job.await_nothing_left()


def test_the_log_keeps_the_rank_when_the_environment_is_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = _OurHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("[rank %(rank)s]"))
    for value in ("7", None):
        monkeypatch.setenv("RANK", value) if value else monkeypatch.delenv("RANK")
        handler.emit(logging.makeLogRecord({}))
    assert handler.stream.getvalue() == "[rank 7]\n[rank 7]\n"


def test_a_limit_that_does_not_count_wakes_nobody(job: Job) -> None:
    """The monitor process looks now and then, not 500 times a second."""
    names = ("monitor_process_interval", "monitor_thread_interval", "progress_watchdog_interval")
    times = {"soft_timeout": 0.5, "hard_timeout": 1.0, **dict.fromkeys(names, 0.4)}
    job.start("suspends", 1, module="scenarios_process", times=times)
    before, after = job.await_event(0, "returned")["value"]
    assert 0 < after - before < 100
    assert job.await_end(0) == 0
    job.await_nothing_left()
