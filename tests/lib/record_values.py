"""Any value of a type that records have, within its bounds. For hypothesis."""

from __future__ import annotations

import functools
import operator
import types
import typing

from hypothesis import strategies as st
from msgspec import Meta

from nvrx_slurm.declared import Record


@functools.cache
def values(hint: typing.Any) -> st.SearchStrategy[typing.Any]:
    """Values of the type; no NaN, which no record has."""
    if typing.get_origin(hint) is typing.Annotated:
        bare, *metas = typing.get_args(hint)
        return _bounded(bare, next(one for one in metas if isinstance(one, Meta)))
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if hint is int:
        return st.integers(-(1 << 63), (1 << 63) - 1)
    if hint is str:
        return st.text(max_size=40)
    if isinstance(hint, typing.TypeVar):
        hint = hint.__bound__ or functools.reduce(operator.or_, hint.__constraints__)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of([values(option) for option in typing.get_args(hint)])
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Record):
        hints = typing.get_type_hints(hint, include_extras=True)
        return st.builds(hint, **{name: values(hints[name]) for name in hint.__struct_fields__})
    return st.from_type(hint)


def _bounded(bare: typing.Any, bounds: Meta) -> st.SearchStrategy[typing.Any]:
    if bare is str:
        return st.text(max_size=40) | st.just("x" * (bounds.max_length or 0))
    if bare is int:
        return st.integers(bounds.ge, (1 << 63) - 1 if bounds.le is None else bounds.le)  # type: ignore[arg-type]
    if bare is float:
        return st.floats(bounds.ge, bounds.le)
    least = bounds.min_length or 0
    return st.lists(values(typing.get_args(bare)[0]), min_size=least, max_size=3).map(tuple)
