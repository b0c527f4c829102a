"""Compose: order, values passed on, the class of the result."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import pytest

from nvrx_slurm.inprocess.plugins.compose import Compose


class Base(ABC):
    @abstractmethod
    def __call__(self, value: Any) -> Any: ...


class Middle(Base):
    def __init__(self, name: str, answer: Callable[[Any], Any] | None = None) -> None:
        self.name = name
        self.answer = answer or (lambda value: value + [name])

    def __call__(self, value: Any) -> Any:
        return self.answer(value)


class Left(Middle):
    pass


class Right(Middle):
    pass


class Other(Base):
    def __call__(self, value: Any) -> Any:
        return value


def test_the_last_listed_is_called_first() -> None:
    assert Compose(Middle("a"), Middle("b"), Middle("c"))([]) == ["c", "b", "a"]


def test_the_result_is_of_the_lowest_common_class() -> None:
    both = Compose(Left("a"), Right("b"))
    assert isinstance(both, Middle) and isinstance(both, Compose)
    assert not isinstance(both, (Left, Right))
    assert isinstance(Compose(Left("a"), Other()), Base) and not isinstance(Compose(Left("a"), Other()), Middle)
    assert isinstance(Compose(Left("a")), Left)


def test_a_base_with_abstract_methods_of_its_own_is_passed_over() -> None:
    class Template(Middle):
        @abstractmethod
        def part(self) -> str: ...

    one, two = (type(name, (Template,), {"part": str})(name) for name in ("One", "Two"))
    composed = Compose(one, two)
    assert isinstance(composed, Middle) and not isinstance(composed, Template)
    assert composed([]) == ["Two", "One"]


def test_compositions_compose() -> None:
    inner = Compose(Left("a"), Right("b"))
    for outer in (Compose(inner, Left("c")), Compose(inner, Compose(Left("c")))):
        assert isinstance(outer, Middle)
        assert [member.name for member in outer.members()] == ["a", "b", "c"]  # type: ignore[attr-defined]
        assert outer([]) == ["c", "b", "a"]


def test_plain_functions_compose() -> None:
    assert Compose(lambda x: x + 1, lambda x: x * 2)(5) == 11


def test_a_member_that_returns_none_is_named_and_passed_by() -> None:
    forgetful = Middle("forgetful", lambda value: None)
    with pytest.warns(UserWarning, match="Middle object .* returned None"):
        assert Compose(Left("a"), forgetful)([]) == ["a"]


def test_the_leftmost_member_may_return_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(Middle("x", lambda value: None), Left("a"))([]) is None


def test_a_tuple_is_passed_on_as_arguments() -> None:
    assert Compose(lambda a, b: a - b, lambda a, b: (b, a))(1, 5) == 4


@pytest.mark.parametrize(
    ("members", "sentence"),
    [((), "at least one"), ((3,), "3 is not callable"), ((Left,), r"write Left\(\)")],
)
def test_what_cannot_be_composed(members: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        Compose(*members)


def test_members_may_object_to_their_company() -> None:
    class Loner(Middle):
        def check_composition(self, members: list[Any]) -> None:
            if len(members) > 1:
                raise TypeError("alone, please")

    Compose(Loner("a"))
    with pytest.raises(TypeError, match="alone"):
        Compose(Left("a"), Compose(Loner("b")))


def test_a_member_that_raises_is_not_hidden() -> None:
    called: list[str] = []

    def never(value: Any) -> Any:
        called.append("never")

    def bad(value: Any) -> Any:
        raise ValueError("from the member")

    with pytest.raises(ValueError, match="from the member"):
        Compose(never, bad)(1)
    assert called == []


def test_members_may_object_to_what_they_return() -> None:
    class Strict(Middle):
        def check_result(self, value: Any) -> None:
            if not isinstance(value, list):
                raise TypeError(f"{self.name} returned {value!r}")

    wrong = Strict("wrong", lambda value: 3)
    assert Compose(Left("a"), Strict("b"))([]) == ["b", "a"]
    for composed in (
        Compose(Left("a"), wrong),
        Compose(wrong, Left("a")),
        Compose(Left("a"), Compose(Left("b"), wrong)),
    ):
        with pytest.raises(TypeError, match="^wrong returned 3$"):
            composed([])
