"""Shift, fill and groups against implementations that write the world down."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.inprocess import renumbering

pytestmark = pytest.mark.process


@st.composite
def worlds(draw):
    size = draw(st.integers(1, 40))
    return size, draw(st.sets(st.integers(0, size - 1)))


def slow_fill(size, terminated):
    """The picture of the seed: a row of boxes, cut at the new size; what is cut off falls into the gaps."""
    boxes = [None if rank in terminated else rank for rank in range(size)]
    new_size = size - len(terminated)
    kept, cut = boxes[:new_size], [rank for rank in boxes[new_size:] if rank is not None]
    for place, rank in enumerate(kept):
        if rank is None:
            kept[place] = cut.pop(0)
    assert cut == []
    return {rank: place for place, rank in enumerate(kept) if rank is not None}


@settings(max_examples=50)
@given(worlds())
def test_shift(world):
    size, terminated = world
    got = [renumbering.shifted(rank, size, terminated) for rank in range(size) if rank not in terminated]
    assert got == list(range(size - len(terminated)))


@settings(max_examples=50)
@given(worlds())
def test_fill(world):
    size, terminated = world
    got = {rank: renumbering.filled(rank, size, terminated) for rank in range(size) if rank not in terminated}
    assert got == slow_fill(size, terminated)
    assert sorted(got.values()) == list(range(size - len(terminated)))
    assert all(new == old for old, new in got.items() if old < size - len(terminated))


@settings(max_examples=30)
@given(st.sets(st.integers(0, 60)))
def test_runs(some):
    text = renumbering.to_runs(some)
    assert renumbering.from_runs(text) == some
    assert len(text.split()) == sum(rank - 1 not in some for rank in some)
    assert renumbering.to_runs({9, 3, 4, 5}) == "3-5 9"
