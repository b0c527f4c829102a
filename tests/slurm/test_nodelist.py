"""Host lists: examples from scontrol(1), properties, and bad input that must name its place."""

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm.nodelist import MAX_HOSTS, counts, different_counts, expand

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []), ("  ", []), ("(null)", []), ("n1", ["n1"]), ("n1,n2", ["n1", "n2"]), ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[01-03,7]-ib[0-1]", ["n01-ib0", "n01-ib1", "n02-ib0", "n02-ib1", "n03-ib0", "n03-ib1", "n7-ib0", "n7-ib1"]),
        ("a[08-11],b,c[9-10]x", ["a08", "a09", "a10", "a11", "b", "c9x", "c10x"]),
        ("[1-2]", ["1", "2"]), ("n[1,1]", ["n1", "n1"]), ("gpu-a.b_c[0001]", ["gpu-a.b_c0001"]),
    ],
)  # fmt: skip
def test_expand(text, hosts):
    assert expand(text) == hosts


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("n[1-3", "'n[1-3'"), ("n1]", "'n1]'"), ("n[1-[2]]", "'n[1-[2]]'"), ("n1,,n2", "''"), ("n1,", "''"),
        ("n[3-1]", "'3-1'"), ("n[1,x]", "'x'"), ("n[]", "''"), ("n[1-2-3]", "'1-2-3'"), ("n[٣]", "'٣'"),
        ("n1 n2", "'n1 n2'"),
        ("n[0-65536]", "65536 names"), ("n[0-255]x[0-256]", "65536 names"), ("n[0-65535],m", "65536 names"),
    ],
)  # fmt: skip
def test_expand_refuses(text, why):
    with pytest.raises(UsageError, match="host list") as caught:
        expand(text)
    assert why in str(caught.value) and "\n" not in str(caught.value)
    assert len(expand("n[0-255]x[0-255]")) == MAX_HOSTS  # the bound itself is allowed


@pytest.mark.parametrize(
    ("text", "found"),
    [("1", [(1, 1)]), ("2(x3),1", [(2, 3), (1, 1)]), ("1(x4)", [(1, 4)]), ("3,2(x1)", [(3, 1), (2, 1)])],
)
def test_counts(text, found):
    assert counts(text) == found and different_counts(text) == {count for count, _ in found}


@pytest.mark.parametrize("bad", ["x", "1(x)", "1,,2", "1(2)", "-1", ""])
def test_counts_refused(bad):
    with pytest.raises(UsageError, match="count list"):
        different_counts(bad)
