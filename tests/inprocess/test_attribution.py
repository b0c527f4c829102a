"""Exceptions of the wrapped function: what is freed, and what is read of them."""

import weakref

import pytest

from nvrx_slurm.inprocess.attribution import blame, free_frames

pytestmark = pytest.mark.process


class Unequal(Exception):
    def __eq__(self, other):
        raise AssertionError("exceptions are compared by identity")

    __hash__ = Exception.__hash__


class Tensor:
    pass


def raised(held, *, by=None):
    """An exception whose frame has a Tensor."""
    tensor = Tensor()
    held.append(weakref.ref(tensor))
    try:
        raise Unequal from by
    except Unequal as error:
        return error


def test_the_frames_of_causes_and_contexts_are_freed():
    held = []
    error = raised(held, by=raised(held))
    error.__context__ = raised(held)
    assert len(held) == 3 and all(one() is not None for one in held)
    free_frames(error)
    assert [one() for one in held] == [None] * 3


def test_a_circle_of_exceptions_has_an_end():
    one, other, cause = Unequal(), Unequal(), Unequal()
    one.__cause__, other.__cause__ = other, one
    free_frames(one)
    blame(one, cause)
    assert other.__cause__ is cause
