"""Compose: order, values passed on, the class of the result."""

import warnings
from abc import ABC, abstractmethod

import pytest

from nvrx_slurm.inprocess.plugins.compose import Compose

pytestmark = pytest.mark.process


class Base(ABC):
    @abstractmethod
    def __call__(self, value): ...


class Middle(Base):
    def __init__(self, name, answer=None):
        self.name = name
        self.answer = answer or (lambda value: value + [name])

    def __call__(self, value):
        return self.answer(value)


class Left(Middle): ...


class Right(Middle): ...


class Other(Base):
    def __call__(self, value):
        return value


def test_order_values_and_nesting():
    assert Compose(Middle("a"), Middle("b"), Middle("c"))([]) == ["c", "b", "a"]
    assert Compose(lambda x: x + 1, lambda x: x * 2)(5) == 11
    assert Compose(lambda a, b: a - b, lambda a, b: (b, a))(1, 5) == 4  # a tuple becomes arguments
    inner = Compose(Left("a"), Right("b"))
    for outer in (Compose(inner, Left("c")), Compose(inner, Compose(Left("c")))):
        assert isinstance(outer, Middle)
        assert [member.name for member in outer.members()] == ["a", "b", "c"]
        assert outer([]) == ["c", "b", "a"]


def test_the_result_is_of_the_lowest_common_class():
    both = Compose(Left("a"), Right("b"))
    assert isinstance(both, Middle) and isinstance(both, Compose) and not isinstance(both, (Left, Right))
    assert isinstance(Compose(Left("a"), Other()), Base) and not isinstance(Compose(Left("a"), Other()), Middle)
    assert isinstance(Compose(Left("a")), Left)


def test_a_member_that_returns_none_is_named_and_passed_by():
    forgetful = Middle("forgetful", lambda value: None)
    with pytest.warns(UserWarning, match="Middle object"):
        assert Compose(Left("a"), forgetful)([]) == ["a"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Compose(forgetful, Left("a"))([]) is None  # the leftmost may


@pytest.mark.parametrize("members, token", [((), "at least one"), ((3,), "3"), ((Left,), r"Left\(\)")])
def test_what_cannot_be_composed(members, token):
    with pytest.raises(TypeError, match=token):
        Compose(*members)
