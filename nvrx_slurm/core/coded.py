"""Records as values of JSON, which carry the names of their types. It knows no core, so it takes little to import.

Decoding makes only objects of the types in TYPES.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from typing import Any, get_type_hints

from nvrx_slurm import types as records
from nvrx_slurm.errors import ProtocolError

_PLAIN = frozenset({type(None), bool, int, float, str})  # as JSON has them
TYPES: dict[str, type] = {}  # by name; `core.record` adds those that only event logs hold
_hints = cache(get_type_hints)  # resolving annotations is slow


def register(found: Iterable[object]) -> None:
    """Add the dataclasses among them."""
    TYPES.update({cls.__name__: cls for cls in found if isinstance(cls, type) and is_dataclass(cls)})


register(vars(records).values())


def encode(value: Any) -> Any:
    """JSON value of a record of the cores; dataclasses carry their name as "type"."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is tuple:  # most of a log: the type of an item is asked here, which halves the time
        return [item if type(item) in _PLAIN else encode(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    name = kind.__name__
    if TYPES.get(name) is not kind:
        raise ProtocolError(f"{name} is not a record of the cores and cannot be logged")
    fields = ((field, getattr(value, field)) for field in _hints(TYPES[name]))
    return {"type": name, **{field: one if type(one) in _PLAIN else encode(one) for field, one in fields}}


def decode(value: Any) -> Any:
    """The record that `encode` made this of. Raises ProtocolError, one sentence, for an object of another kind."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    name = value.get("type")
    cls = TYPES.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"unknown record type {name!r:.80}")
    try:
        return cls(**{key: _decode(item, _hints(cls).get(key)) for key, item in value.items() if key != "type"})
    except (TypeError, ValueError) as error:  # a field that is missing or unknown, or no member of an Enum
        raise ProtocolError(f"{name}: {error}") from None


def _decode(value: Any, hint: Any) -> Any:
    """A field; an Enum is logged as its value."""
    return hint(value) if isinstance(hint, type) and issubclass(hint, Enum) else decode(value)
