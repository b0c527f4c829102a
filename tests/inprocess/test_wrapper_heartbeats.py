"""Who is silent, by the reader's own clock, which only the test moves."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from nvrx_slurm.inprocess.meeting.store import StoreView
from nvrx_slurm.inprocess.watch import heartbeats, progress
from nvrx_slurm.inprocess.watch.board import Board
from nvrx_slurm.inprocess.watch.heartbeats import Heartbeats
from nvrx_slurm.inprocess.watch.page import AUTO, MANUAL, WAITING, WATCHED, Page


class World:
    """Eight ranks; rank 0 watches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(heartbeats.time, "monotonic", lambda: self.now_s)
        view = StoreView(dist.HashStore(), "p/")
        self.ranks = [Heartbeats(view, rank, 8, 1.0, 30.0) for rank in range(8)]

    def pass_s(self, seconds: int, dead: set[int]) -> dict[int, float]:
        """Everybody alive beats once a second; what rank 0 finds in the end."""
        found: dict[int, float] = {}
        for _ in range(seconds):
            self.now_s += 1.0
            for rank, heartbeats in enumerate(self.ranks):
                if rank not in dead:
                    heartbeats.beat()
            found = self.ranks[0].silent(())
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(monkeypatch)
    made.ranks[0].begin()
    assert made.pass_s(5, set()) == {}
    return made


def test_a_neighbour_is_silent_for_the_timeout(world: World) -> None:
    assert world.pass_s(30, {1}) == {}
    assert world.pass_s(1, {1}).keys() == {1}


def test_the_other_ranks_of_a_lost_host_follow_soon(world: World) -> None:
    lost = {1, 2, 3, 4}
    assert world.pass_s(31, lost).keys() == {1}
    assert world.pass_s(4, lost).keys() == lost


def test_a_rank_that_is_slow_is_not_lost(world: World) -> None:
    assert world.pass_s(29, {1}) == {}
    assert world.pass_s(1, set()) == {}
    assert world.pass_s(29, {1}) == {}


def test_who_did_not_look_blames_nobody(world: World) -> None:
    """This process was stopped, or its machine was, while the others were not seen."""
    world.now_s += 3600.0
    assert world.ranks[0].silent(()) == {}
    assert world.pass_s(29, {1}) == {}
    assert world.pass_s(2, {1}).keys() == {1}


def test_who_has_not_been_started_is_not_silent_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    assert world.pass_s(100, {1, 2}) == {}
    world.ranks[0].begin()
    assert world.pass_s(30, {1, 2}) == {}
    assert world.pass_s(6, {1, 2}).keys() == {1, 2}


def test_the_dead_are_passed_over(world: World) -> None:
    for _ in range(40):
        world.pass_s(1, {1, 2})
        found = world.ranks[0].silent({1})
    assert found.keys() == {2}


def test_who_did_not_look_takes_nothing_for_still(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    still = progress.Stall(1.0)
    assert [still.seconds(7) for now[0] in (1000.0, 1001.0, 1003.5)] == [0.0, 1.0, 3.5]
    assert [still.seconds(8) for now[0] in (1004.0, 1005.0)] == [0.0, 1.0]
    assert [still.seconds(8) for now[0] in (2000.0, 2001.0)] == [0.0, 1.0], "this process was stopped"


def test_the_watchdog_survives_what_it_cannot_look_after(caplog: pytest.LogCaptureFixture) -> None:
    """Without its signs of life the rank would be killed."""
    page, looked, twice = Page(), [], threading.Event()

    def look() -> None:
        looked.append(1)
        if len(looked) == 2:
            twice.set()
        raise OSError("no process can be made")

    watchdog = progress.ProgressWatchdog(page, 0.01, (look,))
    page.words[WAITING] = 1
    watchdog.start()
    try:
        assert twice.wait(30.0)
        before = page.words[AUTO]
        deadline_s = time.monotonic() + 30.0
        while page.words[AUTO] == before:
            assert time.monotonic() < deadline_s
    finally:
        watchdog.stop()
    assert not watchdog.is_alive()


def test_progress_is_what_was_seen_last_by_every_active_method() -> None:
    page = Page()
    page.words[AUTO] -= 5_000_000_000
    assert 5.0 <= page.idle_s() < 6.0
    page.beat()
    page.words[MANUAL] = page.words[AUTO] - 9_000_000_000
    assert page.idle_s() < 1.0, "pings count in the function only"
    page.words[WATCHED] = 1
    assert 9.0 <= page.idle_s() < 10.0
    page.words[WAITING] = 1
    assert page.idle_s() < 1.0


def test_a_board_is_read_on_from_where_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "board"
    board = Board(str(path), 3)
    assert board.read() == [] and board.fd is not None
    path.write_bytes(b'{"v": 1, "cycle": 3, "ranks": [4, 5], "why": "gone"}\n{"v": 1, "cyc')
    assert [record.rank for record in board.read()] == [4, 5]
    with path.open("ab") as file:
        file.write(b'le": 3, "ranks": [6]}\n{"v": 2, "ranks": [1]}\n{"v": 1, "cycle": 9, "ranks": [1]}\n[]\nx\n')
    assert [record.rank for record in board.read()] == [6]
    assert board.read() == []
