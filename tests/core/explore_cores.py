"""Cores that never change: what they do is remembered, and those that differ in nothing that they can tell are one."""

from collections import deque
from enum import Enum
from functools import cache
from typing import Any

from nvrx_slurm import types as t
from nvrx_slurm.declared import Record

LEASE_S = 10.0
_OLDEST_S = 2 * LEASE_S  # what is longer past is all the same
_AGES = {"_led_at", "missed_at", "lost_at", "started_at"}  # other times that are past are all the same
_SKIPPED = {"_handlers", "owners", "follower", "started", "out", "_out", "settings", "_s"}
_SKIPPED |= {"ledger", "_ledger", "suspects"}  # for what is said
_SKIPPED |= {"_pauses"}  # all are equal here
_SKIPPED |= {"number", "chain"}  # for the log
_UNTOLD = {"reason", "why", "text", "port", "faults", "master_port", "world_size", "counted", "node"}
_LISTS = {list, deque}
_PLAIN = (int, float, str, type(None), Enum, frozenset)
_told = {}  # by the id of a record, which is kept so long
_MOST_TOLD = 100_000


class Handlers(dict[Any, Any]):
    """The methods of a copy's rows, each bound when it is needed first. As `Machine.bind` does, but fast."""

    def __init__(self, core):
        self.core, self.owners = core, {type(owner): owner for owner in core.owners}

    def __missing__(self, key):
        core = self.core
        found = self[key] = getattr(self.owners[core.homes[key]], core.table[key].do)
        return found


@cache
def fields(kind):
    """The fields of a record; None: it is something else."""
    return kind.__struct_fields__ if issubclass(kind, Record) else None


@cache
def shared(kind):
    """Whether no instance ever changes."""
    called = any("__call__" in vars(base) for base in kind.__mro__)
    return called or issubclass(kind, _PLAIN) or fields(kind) is not None


@cache
def slots(kind):
    """Attributes that are not in `__dict__`."""
    return tuple(name for name in getattr(kind, "__slots__", ()) if name != "__dict__")


def clone(core):
    """A copy of a core; records are shared."""
    made = {}

    def copy(one):
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
def _names(kind):
    return tuple(name for name in fields(kind) or () if name not in _UNTOLD)


def _plan(plan):
    who = plan.leader and plan.leader.key, plan.electors, plan.dead, plan.returned
    successors = tuple([peer.key for peer in plan.successors])
    return plan.term, plan.cycle, plan.group_rank, plan.history.restarts_used, who, successors


def told(record):
    """What a record tells, as far as a core may decide by it."""
    kind = type(record)
    if kind is tuple:
        return tuple([told(item) for item in record])
    if issubclass(kind, Enum):
        return record.name
    if fields(kind) is None:
        return record
    known = _told.get(id(record))
    if known is None:
        if len(_told) > _MOST_TOLD:
            _told.clear()
        what = [_plan(record)] if kind is t.Plan else [told(getattr(record, name)) for name in _names(kind)]
        known = _told[id(record)] = record, (kind.__name__, *what)
    return known[1]


def _when(at, name, now):
    if at >= now or not at:
        return round(at - now, 2) if at else None
    return round(min(now - at, _OLDEST_S), 2) if name in _AGES else "past"


def key_of(core, now):
    """Equal for cores that decide alike. Times count from now."""
    seen = set()

    def key(one, name):
        kind = type(one)
        if kind is float:
            return _when(one, name, now)
        if kind is str or kind is int or kind is bool or one is None:
            return one % 12 if name == "_failures" else one
        if kind is tuple or kind in _LISTS:
            return tuple([key(item, name) for item in one])
        if shared(kind):
            return told(one)
        if kind is set:
            return frozenset(one)
        if id(one) in seen:
            return None
        seen.add(id(one))
        found = []
        if isinstance(one, dict):
            found = [(of, key(value, name)) for of, value in one.items()]
            if name != "_held":  # those are handled in this order
                found.sort(key=repr)
        if hasattr(one, "__dict__"):
            found += [key(value, of) for of, value in one.__dict__.items() if of not in _SKIPPED]
        found += [key(getattr(one, of), of) for of in slots(kind)]
        return tuple(found)

    return hash((key(core, ""), getattr(core.settings, "last_leader", "")))


class Steps:
    """The cores that were found. One is known by its id: it is kept."""

    def __init__(self):
        self._one = {}  # name, key, time -> the core that stands for all such
        self.keys = {}
        self._later = {}
        self._done = {}
        self._due = {}

    def unite(self, name, core, now):
        """The core that stands for all that decide alike."""
        key = key_of(core, now)
        one = self._one.setdefault((name, key, now), core)
        self.keys[id(one), now] = key
        return one

    def later(self, name, core, now):
        """The same for one that is kept already, as time goes by."""
        at = id(core), now
        if at in self.keys:
            return core
        if at not in self._later:
            self._later[at] = self.unite(name, core, now)
        return self._later[at]

    def begin(self, name, core, now):
        """A new core. Whose methods handle its events is noted for `clone`."""
        core.owners = [*{id(method.__self__): method.__self__ for method in core._handlers.values()}.values()]
        return self.unite(name, core, now)

    def step(self, name, core, event, now):
        """The core after one event, and its commands."""
        at = id(core), event, now
        found = self._done.get(at)
        if found is None:
            new = clone(core)
            commands = new.step(event, now)
            new.validate()
            found = self._done[at] = self.unite(name, new, now), commands
        return found

    def deadline(self, core):
        """Its timer."""
        if id(core) not in self._due:
            self._due[id(core)] = core.deadline()
        return self._due[id(core)]
