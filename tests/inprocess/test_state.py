"""State: what comes from the environment and what goes back."""

from __future__ import annotations

import os
from dataclasses import FrozenInstanceError, fields

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.state import FrozenState, Mode, State


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")


def test_from_env() -> None:
    state = State.from_env()
    assert state == State(rank=2, world_size=4, initial_rank=2, initial_world_size=4)
    assert (state.active_rank, state.active_world_size, state.mode, state.iteration) == (
        None,
        None,
        Mode.INITIALIZED,
        0,
    )


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("RANK", None, "RANK is not set"),
        ("WORLD_SIZE", None, "WORLD_SIZE is not set"),
        ("RANK", "None", "RANK='None' is not a number"),
        ("RANK", "4", "RANK=4 is not within"),
        ("RANK", "-1", "RANK=-1 is not within"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0"),
    ],
)
def test_a_bad_environment(monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, sentence: str) -> None:
    if text is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=sentence):
        State.from_env()


@pytest.mark.parametrize(
    ("active_rank", "mode", "expected"),
    [(1, Mode.ACTIVE, ("1", "3")), (None, Mode.INACTIVE, ("5", "8")), (None, Mode.INITIALIZED, ("5", "8"))],
)
def test_the_environment_always_holds_numbers(active_rank: int | None, mode: Mode, expected: tuple[str, str]) -> None:
    State(rank=5, world_size=8, active_rank=active_rank, active_world_size=3, mode=mode).set_distributed_vars()
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == expected


def test_advance_forgets_what_was_raised() -> None:
    state = State(rank=0, world_size=1, mode=Mode.ACTIVE, fn_exception=ValueError("x"))
    state.advance()
    assert (state.iteration, state.fn_exception, state.mode) == (1, None, Mode.ACTIVE)


def test_frozen_is_an_equal_copy_that_cannot_change() -> None:
    assert [field.name for field in fields(State)] == [field.name for field in fields(FrozenState)]
    fault = ValueError("x")
    state = State(rank=0, world_size=2, active_rank=0, active_world_size=1, iteration=3, fn_exception=fault)
    frozen = state.freeze()
    state.rank = 1
    assert (frozen.rank, frozen.iteration, frozen.initial_world_size) == (0, 3, 2)
    assert frozen.fn_exception is fault
    with pytest.raises(FrozenInstanceError):
        frozen.rank = 1  # type: ignore[misc]


def test_copy_from() -> None:
    state = State(rank=0, world_size=2)
    other = State(rank=1, world_size=5, mode=Mode.INACTIVE)
    state.copy_from(other, ["world_size"])
    assert (state.rank, state.world_size) == (0, 5)
    state.copy_from(other.freeze())
    assert state == other
    with pytest.raises(AttributeError, match="colour"):
        state.copy_from(other, ["colour"])
