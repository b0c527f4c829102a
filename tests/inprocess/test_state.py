"""State: what comes from the environment and what goes back."""

import os
from dataclasses import fields

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.inprocess.state import Mode, State

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize(
    "name, text, sentence",
    [
        (None, "2", None),
        ("RANK", None, "RANK is not set"),
        ("WORLD_SIZE", None, "WORLD_SIZE is not set"),
        ("RANK", "None", "RANK='None' is not a number"),
        ("RANK", "4", "RANK=4 is not within"),
        ("RANK", "-1", "RANK=-1 is not within"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0"),
    ],
)
def test_the_environment(monkeypatch, name, text, sentence):
    if name is None:
        assert State.from_env() == State(rank=2, world_size=4, initial_rank=2, initial_world_size=4)
        return
    monkeypatch.setenv(name, text or "")
    with pytest.raises(UsageError, match=sentence):
        State.from_env()


def test_the_environment_always_holds_numbers():
    for active_rank, expected in ((1, ("1", "3")), (None, ("5", "8"))):
        State(rank=5, world_size=8, active_rank=active_rank, active_world_size=3).set_distributed_vars()
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == expected


def test_advance_forgets_what_was_raised():
    state = State(rank=0, world_size=1, mode=Mode.ACTIVE, fn_exception=ValueError("x"))
    state.advance()
    assert (state.iteration, state.fn_exception, state.mode) == (1, None, Mode.ACTIVE)


def test_copy_from():
    state = State(rank=0, world_size=2)
    other = State(rank=1, world_size=5, mode=Mode.INACTIVE)
    state.copy_from(other, ["world_size"])
    assert (state.rank, state.world_size) == (0, 5)
    frozen = other.freeze()
    other.rank = 9
    state.copy_from(frozen)
    assert {field.name: getattr(frozen, field.name) for field in fields(State)} == vars(state)
    assert state.rank == 1
    with pytest.raises(AttributeError, match="colour"):
        state.copy_from(other, ["colour"])
