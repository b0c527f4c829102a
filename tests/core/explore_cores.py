"""Copies of cores, and keys by which states are merged that differ in nothing that a core can tell."""

from __future__ import annotations

from collections import deque
from enum import Enum
from functools import cache
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.core.machine import Machine
from nvrx_slurm.declared import Record

LEASE_S = 10.0
_SKIPPED = {"_handlers", "owners", "follower", "started", "out", "_out", "settings", "_s"}
_SKIPPED |= {"ledger", "_ledger", "suspects"}  # for what is said
_UNTOLD = {"reason", "why", "message", "text", "port", "faults", "master_port", "world_size", "counted", "node"}
_LISTS = {list, deque}
_told: dict[int, tuple[Any, Any]] = {}  # by the id of a record, which is kept so long
_MOST_TOLD = 100_000


class Handlers(dict[Any, Any]):
    """The methods of a copy's rows, each bound when it is needed first. As `Machine.bind` does, but fast."""

    def __init__(self, core: Any) -> None:
        self.core, self.owners = core, {type(owner): owner for owner in core.owners}

    def __missing__(self, key: Any) -> Any:
        core = self.core
        found = self[key] = getattr(self.owners[core.homes[key]], core.table[key].do)
        return found


def bind(core: Any) -> Any:
    """Note whose methods handle its events; `clone` needs it."""
    core.owners = [*{id(method.__self__): method.__self__ for method in core._handlers.values()}.values()]
    return core


@cache
def shared(kind: type) -> bool:
    """Whether no instance ever changes."""
    frozen = issubclass(kind, Record)
    plain = issubclass(kind, (int, float, str, type(None), Enum, frozenset))
    return frozen or plain or any("__call__" in vars(base) for base in kind.__mro__)


@cache
def slots(kind: type) -> tuple[str, ...]:
    """Attributes that are not in `__dict__`."""
    return tuple(name for name in getattr(kind, "__slots__", ()) if name != "__dict__")


def clone(core: Any) -> Any:
    """A copy of a core; records are shared."""
    made: dict[int, Any] = {}

    def copy(one: Any) -> Any:
        kind = type(one)
        if shared(kind):
            return one
        if kind is tuple:
            return tuple([copy(item) for item in one]) if one else one
        new = made.get(id(one))
        if new is not None:
            return new
        made[id(one)] = new = kind.__new__(kind)
        if isinstance(one, dict):
            new.update([(name, copy(value)) for name, value in one.items()] if one else ())
        elif kind is set:
            new |= one
            return new
        elif isinstance(one, (list, deque)):
            new.extend([copy(item) for item in one])
        if hasattr(one, "__dict__"):
            into = new.__dict__
            for name, value in one.__dict__.items():
                if name != "_handlers":
                    into[name] = value if shared(type(value)) else copy(value)
        for name in slots(kind):
            setattr(new, name, copy(getattr(one, name)))
        return new

    new = copy(core)
    new._handlers = Handlers(new)
    return new


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name not in _UNTOLD)  # type: ignore[attr-defined]


def told(record: Any) -> Any:
    """What a record tells, as far as a core may decide by it."""
    kind = type(record)
    if kind is t.Plan:
        who = record.leader and record.leader.key, record.electors, record.dead, record.returned
        return record.term, record.cycle, record.group_rank, record.history.restarts_used, who, len(record.successors)
    if kind is tuple:
        return tuple([told(item) for item in record])
    if isinstance(record, Enum):
        return record.name
    if not issubclass(kind, Record):
        return record
    known = _told.get(id(record))
    if known is None:
        if len(_told) > _MOST_TOLD:
            _told.clear()
        known = _told[id(record)] = record, (kind.__name__, *[told(getattr(record, name)) for name in _names(kind)])
    return known[1]


def key_of(core: Machine, now: float) -> int:
    """Equal for cores that decide alike. Times count from now; what is long past is all the same."""
    seen = set[int]()

    def key(one: Any) -> Any:
        kind = type(one)
        if kind is float:
            return round(min(max(one - now, -LEASE_S), 1e6), 2) if one else None
        if kind is str or kind is int or kind is bool or one is None:
            return one
        if kind is tuple or kind in _LISTS:
            return tuple([key(item) for item in one])
        if shared(kind):
            return told(one)
        if kind is set:
            return frozenset(one)
        if id(one) in seen:
            return None
        seen.add(id(one))
        found = [key(value) for value in one.values()] if isinstance(one, dict) else []
        if hasattr(one, "__dict__"):
            found += [key(value) for name, value in one.__dict__.items() if name not in _SKIPPED]
        found += [key(getattr(one, name)) for name in slots(kind)]
        return tuple(found)

    return hash(key(core))
