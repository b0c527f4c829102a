"""Several plug-ins of one kind as one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any


class Compose:
    """Calls its members from right to left, each with what the one before returned, as mathematics composes functions.

    The result is an instance of the members' lowest common base class too, so it goes wherever one of them would go.
    A member that returns None where its value is passed on gets a warning, and its own argument is passed on instead.
    Raises TypeError without members, for one that cannot be called, or for members that cannot be composed with each
    other: each may say so in a method `check_composition(members)`. What a member returned, unless it is None, is given
    to its method `check_result(value)`, where it has one, before anybody else gets it.
    """

    instances: tuple[Callable[..., Any], ...]

    def __new__(cls, *instances: Callable[..., Any]) -> Compose:
        """Instances of a class made for these members."""
        if not instances:
            raise TypeError("Compose needs at least one member")
        for instance in instances:
            if not callable(instance):
                raise TypeError(f"Compose: {instance!r} is not callable (is it a class without __call__?)")
            if isinstance(instance, type):
                raise TypeError(f"Compose needs an instance, not the class: write {instance.__name__}()")
        bases = (cls, _common_base(instances))
        made: type[Compose] = type(f"Composed{bases[1].__name__}", bases, {"__module__": __name__})
        return super().__new__(made)

    def __init__(self, *instances: Callable[..., Any]) -> None:
        self.instances = instances
        members = self.members()
        for member in members:
            check = getattr(member, "check_composition", None)
            if check is not None:
                check(members)

    def __call__(self, *args: Any) -> Any:
        """Value of the leftmost member; a tuple is passed on as several arguments."""
        value: Any = None
        for place, instance in reversed(list(enumerate(self.instances))):
            value = instance(*args)
            if value is not None:
                _check_result(instance, value)
                args = value if isinstance(value, tuple) else (value,)
            elif place:
                warnings.warn(
                    f"{instance!r} returned None; its own argument goes to the next member of Compose", stacklevel=2
                )
        return value

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.instances))})"

    def members(self) -> list[Callable[..., Any]]:
        """All members from left to right, those of a composition within this one in its place."""
        flat: list[Callable[..., Any]] = []
        for instance in self.instances:
            flat += instance.members() if isinstance(instance, Compose) else [instance]
        return flat


def _check_result(instance: Any, value: Any) -> None:
    check = getattr(instance, "check_result", None)
    if check is not None:
        check(value)


def _common_base(instances: tuple[Callable[..., Any], ...]) -> type:
    """Most derived class that all are instances of and that can be derived from (`function` cannot: object)."""
    first, *rest = instances
    for base in type(first).__mro__:
        common = all(isinstance(other, base) for other in rest)
        if common and not issubclass(base, Compose) and _derivable(base):
            return base
    return object


def _derivable(base: type) -> bool:
    """Compose brings `__call__` and nothing else that may be abstract in the base."""
    abstract: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    return bool(base.__flags__ & _TPFLAGS_BASETYPE) and abstract <= {"__call__"}


_TPFLAGS_BASETYPE = 1 << 10  # CPython's object.h; in `__flags__` of every class
