"""What records are made of: their base, and the types of their fields with bounds. `codec` encodes records.

A record is declared once. Its fields, their types and their bounds hold in memory, on the wire and in event logs.
Bounds are checked where bytes are decoded; see https://jcristharif.com/msgspec/constraints.html.
"""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from msgspec import Meta, Struct, structs
from msgspec import field as field

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform


if TYPE_CHECKING:  # type checkers do not see that subclasses inherit `frozen`

    @dataclass_transform(frozen_default=True, field_specifiers=(field,))
    class Record:  # noqa: D101
        def __init_subclass__(cls, kw_only: bool = False) -> None: ...

        __struct_fields__: ClassVar[tuple[str, ...]]

else:

    class Record(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
        """Base of records: fields are set once, equal fields make equal records. Encoded, its class name is "type"."""


T = TypeVar("T")

Name = Annotated[str, Meta(max_length=256)]
Line = Annotated[str, Meta(max_length=300)]  # one line of a rank's output
Cause = Annotated[str, Meta(max_length=400)]
Sentence = Annotated[str, Meta(max_length=2000)]
Reason = Annotated[str, Meta(max_length=4000)]
Path = Annotated[str, Meta(max_length=4096)]
Traceback = Annotated[str, Meta(max_length=16_000)]
Credential = Annotated[str, Meta(max_length=16_000)]  # of MUNGE

Count = Annotated[int, Meta(ge=-1, le=10_000_000)]  # ranks, cycles, terms: far above anything real
Big = Annotated[int, Meta(ge=-1, le=1 << 62)]  # iterations, sequence numbers, steps; -1 = not known
Place = Annotated[int, Meta(ge=0)]  # in an order; up to 64 bits
Port = Annotated[int, Meta(ge=0, le=65535)]  # 0 = none
Workers = Annotated[int, Meta(ge=1, le=4096)]  # of a node
ExitStatus = Annotated[int, Meta(ge=0, le=255)]
Ended = Annotated[int, Meta(ge=-255, le=255)]  # as subprocess reports it: negative = by that signal
Signum = Annotated[int, Meta(ge=0, le=64)]
Seconds = Annotated[float, Meta(ge=-1e10, le=1e10)]  # also Unix time; not NaN

# of the environment; None = not set
Variables = Annotated[dict[str, str | None], Meta(max_length=1000)]

# The sender cuts what is longer, see `codec.fitted`.
AtMost8 = Annotated[tuple[T, ...], Meta(max_length=8)]
AtMost16 = Annotated[tuple[T, ...], Meta(max_length=16)]
AtMost32 = Annotated[tuple[T, ...], Meta(max_length=32)]
AtMost64 = Annotated[tuple[T, ...], Meta(max_length=64)]
OneTo64 = Annotated[tuple[T, ...], Meta(min_length=1, max_length=64)]
AtMost256 = Annotated[tuple[T, ...], Meta(max_length=256)]
AtMost4096 = Annotated[tuple[T, ...], Meta(max_length=4096)]


def replace(one: T, /, **changes: Any) -> T:
    """A copy of a record, or of a dataclass, with other values in these fields."""
    how: Any = structs.replace if isinstance(one, Record) else dataclasses.replace
    changed: T = how(one, **changes)
    return changed


def plain(value: Any) -> Any:
    """The value with dictionaries for records, without their types. For files that people and other programs read."""
    if isinstance(value, Record):
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value
