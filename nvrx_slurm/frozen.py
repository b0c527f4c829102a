"""`frozen`: what `dataclass(frozen=True)` makes, in a quarter of its time.

A launcher makes 140 records when it starts. `dataclasses` compiles six methods for each of them. `frozen` lets it
compile one, `__init__`, and shares the others.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Of type checkers only; Python 3.10 has none."""
        return lambda function: function


T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """Make a class a dataclass whose attributes are set once. A method that the class itself defines stays."""
    made = dataclass(repr=False, eq=False)(cls)
    for method in (_setattr, _delattr, _eq, _hash, _repr):
        name = f"__{method.__name__[1:]}__"
        if name not in vars(cls):
            setattr(made, name, method)
    return made


def _setattr(self: Any, name: str, value: Any) -> None:
    if name in self.__dict__ or name not in self.__dataclass_fields__:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")
    self.__dict__[name] = value


def _delattr(self: Any, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _eq(self: Any, other: object) -> bool:
    return self.__dict__ == other.__dict__ if other.__class__ is self.__class__ else NotImplemented


def _hash(self: Any) -> int:
    return hash(tuple(self.__dict__.values()))


def _repr(self: Any) -> str:
    shown = (name for name, one in self.__dataclass_fields__.items() if one.repr)
    return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"
