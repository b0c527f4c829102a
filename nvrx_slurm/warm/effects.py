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
    return {("logger", name) for name in _loggers()}


class World:
    """What an import may change outside of modules, before it."""

    def __init__(self):
        self._lists = [list(one()) for one in _LISTS]
        self._loggers = len(_loggers())
        self._tempdir = _tempdir()

    def effects(self):
        """Key and effect for all that is different now, also by what was executed meanwhile."""
        for number, (get, before) in enumerate(zip(_LISTS, self._lists, strict=True)):
            now = get()
            if now != before:
                for item in [item for item in reversed(now) if not any(item is old for old in before)]:
                    yield (number, id(item)), _Item(get, item, item is now[0])
        if len(_loggers()) != self._loggers:
            for name in _loggers():
                yield ("logger", name), _Logger(name)
        if _tempdir() != self._tempdir:
            yield "tempdir", _TempDir()


class _Effect:
    def is_there(self):
        """Whether it is still there when the import has ended."""
        return True

    def is_taken(self):
        """Whether the script has made its own."""
        return False


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


class _Logger(_Effect):
    def __init__(self, name):
        self._name, self._loggers = name, _loggers()
        self._logger = self._loggers[name]

    def is_taken(self):
        return self._name in self._loggers

    def redo(self):
        self._loggers[self._name] = self._logger
        getattr(self._logger, "_cache", {}).clear()  # of levels: the script may have changed the root's

    def undo(self):
        self._logger = self._loggers.pop(self._name)  # the logger, where there was only a place for it


class _TempDir(_Effect):
    def __init__(self):
        self._tempfile = sys.modules["tempfile"]
        self._value = self._tempfile.tempdir

    def redo(self):
        self._tempfile.tempdir = self._value

    def undo(self):
        self._tempfile.tempdir = None


def _loggers():
    logging = sys.modules.get("logging")
    return {} if logging is None or not hasattr(logging, "root") else logging.root.manager.loggerDict


def _tempdir():
    return getattr(sys.modules.get("tempfile"), "tempdir", None)


def _filters():
    return getattr(sys.modules.get("warnings"), "filters", _warnings.filters)


def _tell_warnings():
    getattr(_warnings, "_filters_mutated", getattr(_warnings, "_filters_mutated_lock_held", int))()


_LISTS = (_filters, lambda: sys.path, lambda: sys.meta_path, lambda: sys.path_hooks)
