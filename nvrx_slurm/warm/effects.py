"""What the import of a module changes outside of modules, and how a worker does it again.

Variables, functions for the end, filters of warnings, lists of the interpreter, loggers, the folder for temporary
files. Part of `journal.py`; standard library only.
"""

import _warnings
import atexit
import itertools
import os
import sys


def change(variables):
    """Set these environment variables (bytes), or unset those whose value is None."""
    for name, value in variables.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value


def become(variables):
    """Have these variables (bytes), and no others."""
    names = {*os.environb, *variables}
    change(
        {
            name: variables.get(name)
            for name in names
            if variables.get(name) != os.environb.get(name)
        }
    )


def known():
    """The keys of what is there before the first import."""
    return {("logging", name) for name in loggers()}


class World:
    """What an import may change outside of modules, before it."""

    def __init__(self):
        self._lists = [list(get()) for _, get in _LISTS]
        self._tables = [set(_of({}, *place)) for place in _TABLES]
        self._hooks = {name: vars(sys)[name] for name in _HOOKS}
        self._finalizes = _finalizes()
        self._loggers = len(loggers())
        self._tempdir = _tempdir()

    def effects(self):
        """Key and effect for all that is different now, also by what was executed meanwhile."""
        for number, ((owner, get), before) in enumerate(zip(_LISTS, self._lists, strict=True)):
            if get() != before:
                for item, is_first in _new_items(get(), before):
                    yield (owner, number, id(item)), _Item(get, item, is_first)
        for place, had in zip(_TABLES, self._tables, strict=True):
            table = _of({}, *place)
            row = _Finalizer if place[-1] in _OF_FINALIZERS else _TableRow
            for key in [key for key in table if key not in had] if len(table) != len(had) else ():
                yield (*place, key), row(table, key)
        for name, before in self._hooks.items():
            now = vars(sys)[name]
            if now is not before:
                yield ("sys", name, id(now)), _Patch(vars(sys), name, before)
        if _finalizes() != self._finalizes:
            yield "finalize", _Finalize()
        if len(loggers()) != self._loggers:
            for name in loggers():
                yield ("logging", name), _Logger(name)
        if _tempdir() != self._tempdir:
            yield "tempdir", _TempDir()


def _new_items(now, before):
    """The new items: those in front of the old ones, from the last to the first, then the others."""
    are_new = [not any(item is old for old in before) for item in now]
    front = [*are_new, False].index(False) if before else 0
    yield from ((item, True) for item in reversed(now[:front]))
    yield from (
        (item, False) for item, is_new in zip(now[front:], are_new[front:], strict=True) if is_new
    )


class _Effect:
    logger = None  # the name of the logger that it makes
    taken = None  # a method: what the script has made itself; "" if nothing
    _numbers = itertools.count()

    def __new__(cls, *_):
        one = super().__new__(cls)
        one.number = next(cls._numbers)
        return one

    def is_there(self):
        """Whether it is still there when the import has ended."""
        return True


class Variable(_Effect):
    """An environment variable that was set, or unset (None)."""

    def __init__(self, name, value, written):
        self._change = {name: value}
        self._written = written

    def redo(self):
        change(self._change)
        self._written.update(self._change)

    def undo(self):
        """Done by `Journal.record` for all variables."""


class AtExit(_Effect):
    """A function that was registered for the end of the process."""

    def __init__(self, register, function, args, kwargs):
        self._register = register
        self._function = function
        self._args = args
        self._kwargs = kwargs

    def redo(self):
        self._register(self._function, *self._args, **self._kwargs)

    def undo(self):
        atexit.unregister(self._function)


class _Item(_Effect):
    """An item that was added to a list of the interpreter."""

    def __init__(self, get, item, is_first):
        self._get = get
        self._item = item
        self._is_first = is_first

    def is_there(self):
        return any(item is self._item for item in self._get())

    def redo(self):
        self.undo()
        found = self._get()
        found.insert(0 if self._is_first else len(found), self._item)
        _tell_warnings()

    def undo(self):
        found = self._get()
        found[:] = [item for item in found if item is not self._item]
        _tell_warnings()


class _TableRow(_Effect):
    """A row that was added to a table of the standard library."""

    def __init__(self, table, key):
        self._table = table
        self._key = key
        self._value = table[key]

    def is_there(self):
        return self._key in self._table

    def redo(self):
        self._table[self._key] = self._value

    def undo(self):
        self._table.pop(self._key, None)


class _Finalizer(_TableRow):
    """A function that is called when this process ends, the last one first."""

    def redo(self):
        super().redo()
        # a finalizer of multiprocessing: other processes do not call it
        if hasattr(self._value, "_pid"):
            self._value._pid = os.getpid()
        else:
            self._value.index = next(self._key._index_iter)


class _Finalize(_Effect):
    """The first finalizer of a process registers one function for the end of all."""

    def __init__(self):
        self._finalize = sys.modules["weakref"].finalize

    def redo(self):
        if not self._finalize._registered_with_atexit:
            self._finalize._registered_with_atexit = True
            atexit.register(self._finalize._exitfunc)

    def undo(self):
        self._finalize._registered_with_atexit = False
        atexit.unregister(self._finalize._exitfunc)


class _Patch(_Effect):
    """A function or class of a module that another import has replaced."""

    def __init__(self, names, name, before):
        self._names = names
        self._name = name
        self._before = before
        self._after = names[name]

    def redo(self):
        self._names[self._name] = self._after

    def undo(self):
        if self._names.get(self._name) is self._after:  # else it is replaced again
            self._names[self._name] = self._before


def patches(namespaces, entries):
    """Patches for all that is not as it was in these namespaces of modules. Values that are no code may be caches."""
    for name, before in namespaces.items():
        now = getattr(entries[name].module, "__dict__", before) if name in entries else before
        for key, value in before.items():
            if now.get(key) is not value and callable(value) and callable(now.get(key)):
                yield _Patch(now, key, value)


class _Logger(_Effect):
    def __init__(self, name):
        self.logger, self._loggers = name, loggers()

    def redo(self):
        self._loggers[self.logger] = self._made

    def undo(self):
        # when it is made: there may have been only a place for it
        self._made = self._loggers.pop(self.logger)
        getattr(self._made, "_cache", {}).clear()  # cached levels: the script may change the root's


class _TempDir(_Effect):
    def __init__(self):
        self._tempfile = sys.modules["tempfile"]
        self._value = self._tempfile.tempdir

    def taken(self):
        return (
            ""
            if self._tempfile.tempdir in (None, self._value)
            else "another folder for temporary files"
        )

    def redo(self):
        self._tempfile.tempdir = self._value

    def undo(self):
        self._tempfile.tempdir = None


def loggers():
    """What is in the place of each name of a logger: the logger, or a place for it."""
    logging = sys.modules.get("logging")
    return (
        {} if logging is None or not hasattr(logging, "root") else logging.root.manager.loggerDict
    )


def _tempdir():
    return getattr(sys.modules.get("tempfile"), "tempdir", None)


def _filters():
    return getattr(sys.modules.get("warnings"), "filters", _warnings.filters)


def _tell_warnings():
    getattr(_warnings, "_filters_mutated", getattr(_warnings, "_filters_mutated_lock_held", int))()


def _of(default, module, *names):
    """What is there in a module of the standard library, or the default."""
    found = sys.modules.get(module)
    for name in names:
        found = getattr(found, name, None)
    return default if found is None else found


def _finalizes():
    return _of(False, "weakref", "finalize", "_registered_with_atexit")


_OF_FINALIZERS = ("_registry", "_finalizer_registry")
_HOOKS = ("excepthook", "displayhook", "unraisablehook")
# The module that owns it comes first: what is there after its import is its own.
_LISTS = (
    ("warnings", _filters),
    ("sys", lambda: sys.path),
    ("sys", lambda: sys.meta_path),
    ("sys", lambda: sys.path_hooks),
    ("threading", lambda: _of([], "threading", "_threading_atexits")),
    ("logging", lambda: _of([], "logging", "_handlerList")),
)
_TABLES = (
    ("copyreg", "dispatch_table"),
    ("multiprocessing.reduction", "ForkingPickler", "_extra_reducers"),
    ("multiprocessing.util", "_finalizer_registry"),
    ("multiprocessing.util", "_afterfork_registry"),
    ("linecache", "cache"),
    ("logging", "_handlers"),
    ("logging", "_nameToLevel"),
    ("logging", "_levelToName"),
    ("warnings", "onceregistry"),
    ("weakref", "finalize", "_registry"),
)
