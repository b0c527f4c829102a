"""Damaged bytes make no parser fail in another way than its own; `tests/fuzz.py` gives more of them, by hand."""

import subprocess
import sys

import fuzz
import pytest

pytestmark = pytest.mark.fast


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::SyntaxWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", fuzz.PARSERS)
def test_a_parser_raises_its_own_error_only_and_soon(name):
    assert fuzz.run(name, 300, seed=1) == []


def test_it_runs_by_hand():
    words = [sys.executable, fuzz.__file__, "--inputs", "2", next(iter(fuzz.PARSERS))]
    assert subprocess.run(words, stdout=subprocess.PIPE, check=True, cwd="/").stdout.count(b"2 inputs") == 1
