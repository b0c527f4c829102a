"""JSON of others: what no program of ours writes is refused, and soon."""

import pytest

from nvrx_slurm.core.bounded_json import MOST_DEPTH, first_value, parsed

pytestmark = pytest.mark.fast


NESTED = "[" * MOST_DEPTH + "]" * MOST_DEPTH


@pytest.mark.parametrize(
    "text", [f"[{NESTED}]", "[" * 100_000, "NaN", "[-Infinity]", "1e999", "9" * 19, "[1," * 10**6, "[] 1"]
)
def test_it_is_refused(text):
    with pytest.raises(ValueError):
        parsed(text)


def test_the_rest_is_json():
    assert parsed(b' {"a": [1, -2.5e3, "\\u00e9", null]}\n') == {"a": [1, -2500.0, "\u00e9", None]}
    assert parsed(NESTED) and first_value('{"a": 1}, 2') == ({"a": 1}, 8)
