"""The rank's own book of sections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.rank.sections import SectionError, Sections

pytestmark = pytest.mark.fast


NAMES = ("a", "step", "b", "warmup")
SLOTS = {"a": 0, "step": 1, "b": 2, "warmup": 3}
WARM_STEP = 4


def test_nested_and_overlapping_sections():
    book = Sections(("a", "b"), 0, now_ns=10)
    assert book.outside_ns == 10
    assert (book.start("a", 20), book.outside_ns) == (0, 0)
    assert (book.start("b", 25), book.open) == (1, ("a", "b"))
    assert (book.end("a", 40), book.outside_ns) == (0, 0)  # overlapping: b goes on
    assert (book.end("b", 45), book.outside_ns) == (1, 45)
    assert book.longest_ns(47) == ({"a": 20, "b": 20}, 10)
    book.start("b", 100)
    assert book.longest_ns(200) == ({"a": 20, "b": 20}, 55)  # an open section is not over, the time outside was


@pytest.mark.parametrize(
    "names, counts", [((), False), (("a",), True), (("step",), False), (NAMES, True), (("step", "a"), False)]
)
def test_time_outside_before_the_first_step_counts_only_where_a_limit_can_fit(names, counts):
    book = Sections(names, 0, now_ns=10)
    assert bool(book.outside_ns) == counts
    if "a" in names:
        book.start("a", 20)
        book.end("a", 30)
        assert book.outside_ns == (30 if counts else 0)
    if "step" in names:
        book.start("step", 40)
        book.end("step", 50)
        assert book.outside_ns == 50


def test_opened_twice_and_closed_unopened_are_errors_that_change_nothing():
    book = Sections(("a", "b"), 0, now_ns=10)
    with pytest.raises(SectionError, match="section 'a' is not open"):
        book.end("a", 15)
    book.start("a", 20)
    with pytest.raises(SectionError, match="section 'a' is already open"):
        book.start("a", 30)
    book.end("a", 45)
    assert book.longest_ns(45) == ({"a": 25, "b": 0}, 10)
    for call in (book.start, book.end):
        with pytest.raises(KeyError):
            call("unknown", 50)


@pytest.mark.parametrize(
    "iteration, warm",
    [((), 2), ((iter([1000, 1000, 1001, 1002, 1003]).__next__,), 3)],  # the training's own iteration, if known, counts
)
def test_the_first_steps_have_a_slot_of_their_own_and_count_as_warmup(iteration, warm):
    book = Sections(NAMES, 2, 1, *iteration)
    assert book.slots == SLOTS
    for n in range(5):
        assert book.start("step", 100 + 10 * n) == (WARM_STEP if n < warm else 1)
        book.end("step", 100 + 10 * n + (9 if n < warm else 3))
    assert book.longest_ns(200)[0] == {"a": 0, "step": 3, "b": 0, "warmup": 9}


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 50)), max_size=60), st.integers(0, 4))
def test_whatever_is_done_the_words_say_what_is_open(actions, warmup):
    book = Sections(NAMES, warmup, now_ns=1)
    words, outside, now, is_open = [0] * 5, book.outside_ns, 1, {}
    for name, took in actions:
        now += took
        if name in is_open:
            slot = book.end(name, now)
            assert slot == is_open.pop(name)
            words[slot] = 0
        else:
            slot = is_open[name] = book.start(name, now)
            assert words[slot] == 0, "two open sections share a word"
            words[slot] = now
        outside = book.outside_ns
        assert set(book.open) == set(is_open)
        assert bool(outside) == (not is_open)
        assert outside in (0, now)
    longest, longest_outside = book.longest_ns(now)
    assert all(0 <= took <= now for took in [*longest.values(), longest_outside])
