"""`frozen` makes what `dataclass(frozen=True)` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace
from typing import Any

import pytest

from nvrx_slurm.frozen import frozen

BOTH = pytest.mark.parametrize("make", [frozen, dataclass(frozen=True)], ids=["frozen", "dataclass"])


def a_class(make: Callable[[type], type]) -> Any:
    class Base:
        a: int
        secret: str = field(default="s", repr=False)

    class Record(make(Base)):  # type: ignore[misc]
        b: tuple[int, ...] = ()
        c: list[int] = field(default_factory=list)

        def __post_init__(self) -> None:
            object.__setattr__(self, "a", int(self.a))

    return make(Record)


@BOTH
def test_values(make: Callable[[type], type]) -> None:
    record = a_class(make)
    one = record("1", b=(2,))
    assert (one.a, one.secret, one.b, one.c) == (1, "s", (2,), [])
    assert one == record(1, "s", (2,), []) and one != record(2, "s", (2,)) and one != (1, "s", (2,), [])
    assert replace(one, a=3).a == 3 and [f.name for f in fields(one)] == ["a", "secret", "b", "c"]
    assert repr(one).endswith("Record(a=1, b=(2,), c=[])")
    with pytest.raises(TypeError):
        record()


@BOTH
def test_attributes_are_set_once(make: Callable[[type], type]) -> None:
    one = a_class(make)(1)
    for name in ("a", "other"):
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, 2)
    with pytest.raises(FrozenInstanceError):
        del one.a
    assert one.a == 1


@BOTH
def test_equal_records_have_one_hash(make: Callable[[type], type]) -> None:
    record = make(type("Pair", (), {"__annotations__": {"a": int, "b": str}, "b": "x"}))
    assert {record(1), record(1, "x"), record(a=1)} == {record(1)} and len({record(1), record(2)}) == 2
