"""The base of plug-ins, and Compose: several plug-ins of one kind as one."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from nvrx_slurm.inprocess.state import FrozenState


class PlugIn(ABC):
    """Base of the plug-ins that get the current state. `RankAssignment` has a base of its own."""

    @abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Do this plug-in's work; returns `state`. What follows from an exception is said in the class."""


class Compose:
    """Call the members from right to left, each with the result of the one before: `Compose(a, b)(x) == a(b(x))`.

    The result is an instance of the members' lowest common base class too, so it is accepted wherever one member is.
    A member that returns None passes its own argument on, with a warning. A tuple is passed on as several arguments.
    Raises TypeError without members, or for one that is not callable.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        """An instance of a class made for these members."""
        if not instances:
            raise TypeError("Compose needs at least one member")
        for instance in instances:
            if not callable(instance):
                raise TypeError(
                    f"Compose: {instance!r} is not callable (is it a class without __call__?)"
                )
            if isinstance(instance, type):
                raise TypeError(
                    f"Compose needs an instance, not the class: write {instance.__name__}()"
                )
        bases = (cls, _common_base(instances))
        made: type[Compose] = type(f"Composed{bases[1].__name__}", bases, {"__module__": __name__})
        return super().__new__(made)

    def __init__(self, *instances: Callable[..., Any]) -> None:
        self.instances = instances

    def __call__(self, *args: Any) -> Any:
        """The result of the leftmost member."""
        value: Any = None
        for place, instance in reversed(list(enumerate(self.instances))):
            value = instance(*args)
            if value is not None:
                args = value if isinstance(value, tuple) else (value,)
            elif place:
                warnings.warn(
                    f"{instance!r} returned None; its own argument goes to the next member of Compose",
                    stacklevel=2,
                )
        return value

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"

    def members(self) -> list[Callable[..., Any]]:
        """All members from left to right; those of a composition within this one take its place."""
        flat: list[Callable[..., Any]] = []
        for instance in self.instances:
            flat += instance.members() if isinstance(instance, Compose) else [instance]
        return flat


def _common_base(instances: tuple[Callable[..., Any], ...]) -> type:
    """The most derived common class that a class may derive from (`function` forbids it: then object)."""
    first, *rest = instances
    for base in type(first).__mro__:
        common = all(isinstance(other, base) for other in rest)
        abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
        # Compose implements `__call__` only.
        derivable = base.__flags__ & _TPFLAGS_BASETYPE and abstract <= {"__call__"}
        if common and derivable and not issubclass(base, Compose):
            return base
    return object


_TPFLAGS_BASETYPE = 1 << 10  # CPython's object.h; in `__flags__` of every class
