"""What the import of a module changes outside of modules, and how a worker does it again.

Variables, functions for the end, filters of warnings, lists of the interpreter, loggers, the folder for temporary
files. Part of `journal.py`; standard library only.
"""

import _warnings
import atexit
import os
import sys


def change(variables):
    """Set these environment variables (bytes), or unset those whose value is None."""
    for name, value in variables.items():
        if value is None:
            os.environb.pop(name, None)
        else:
            os.environb[name] = value


def known():
    """The keys of what is there before the first import."""
    return {("logger", name) for name in loggers()}


class World:
    """What an import may change outside of modules, before it."""

    def __init__(self):
        self._lists = [list(one()) for one in _LISTS]
        self._tables = [set(one()) for one in _TABLES]
        self._finalizes = _finalizes()
        self._loggers = len(loggers())
        self._tempdir = _tempdir()

    def effects(self):
        """Key and effect for all that is different now, also by what was executed meanwhile."""
        for number, (get, before) in enumerate(zip(_LISTS, self._lists, strict=True)):
            now = get()
            if now != before:
                are_new = [not any(item is old for old in before) for item in now]
                front = [*are_new, False].index(False)
                for item in reversed(now[:front]):  # each was put in front of those before
                    yield (number, id(item)), _Item(get, item, True)
                for item in [item for item, is_new in zip(now, are_new, strict=True) if is_new][front:]:
                    yield (number, id(item)), _Item(get, item, False)
        for number, (get, had) in enumerate(zip(_TABLES, self._tables, strict=True)):
            for key in [key for key in get() if key not in had] if len(get()) != len(had) else ():
                yield ("table", number, key), _TableRow(get(), key)
        if _finalizes() != self._finalizes:
            yield "finalize", _Finalize()
        if len(loggers()) != self._loggers:
            for name in loggers():
                yield ("logger", name), _Logger(name)
        if _tempdir() != self._tempdir:
            yield "tempdir", _TempDir()


class _Effect:
    logger = None  # the name of the logger that it makes

    def is_there(self):
        """Whether it is still there when the import has ended."""
        return True


class Variable(_Effect):
    """An environment variable that was set, or unset (None)."""

    def __init__(self, name, value, written):
        self._change, self._written = {name: value}, written

    def redo(self):
        change(self._change)
        self._written.update(self._change)

    def undo(self):
        """Done by `Journal.record` for all variables."""


class AtExit(_Effect):
    """A function that was registered for the end of the process."""

    def __init__(self, register, function, args, kwargs):
        self._register, self._function, self._args, self._kwargs = register, function, args, kwargs

    def redo(self):
        self._register(self._function, *self._args, **self._kwargs)

    def undo(self):
        atexit.unregister(self._function)


class _Item(_Effect):
    """One more in a list of the interpreter."""

    def __init__(self, get, item, is_first):
        self._get, self._item, self._is_first = get, item, is_first

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
    """One more in a table of the standard library."""

    def __init__(self, table, key):
        self._table, self._key, self._value = table, key, table[key]

    def is_there(self):
        return self._key in self._table

    def redo(self):
        self._table[self._key] = self._value

    def undo(self):
        self._table.pop(self._key, None)


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
        self._names, self._name, self._before, self._after = names, name, before, names[name]

    def redo(self):
        self._names[self._name] = self._after

    def undo(self):
        if self._names.get(self._name) is self._after:  # else it is replaced again
            self._names[self._name] = self._before


def patches(namespaces, entries):
    """For all that is not as it was in these namespaces of modules. Values that are no code may be caches."""
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
        self._made = self._loggers.pop(self.logger)  # when it is made: there may have been only a place for it
        getattr(self._made, "_cache", {}).clear()  # of levels: the script may change the root's


class _TempDir(_Effect):
    def __init__(self):
        self._tempfile = sys.modules["tempfile"]
        self._value = self._tempfile.tempdir

    def redo(self):
        self._tempfile.tempdir = self._value

    def undo(self):
        self._tempfile.tempdir = None


def loggers():
    """What is in the place of each name of a logger: the logger, or a place for it."""
    logging = sys.modules.get("logging")
    return {} if logging is None or not hasattr(logging, "root") else logging.root.manager.loggerDict


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


_LISTS = (
    _filters,
    lambda: sys.path,
    lambda: sys.meta_path,
    lambda: sys.path_hooks,
    lambda: _of([], "threading", "_threading_atexits"),
)
_TABLES = (
    lambda: _of({}, "copyreg", "dispatch_table"),
    lambda: _of({}, "multiprocessing.reduction", "ForkingPickler", "_extra_reducers"),
)
