"""The imports of a template, noted module by module, and done again in a worker without executing anything.

A worker must be as a process that imports by itself. So `park` takes the modules of a template out of `sys.modules`,
and takes back what their imports changed elsewhere. The journal stays, as a finder in front of `sys.meta_path`.
When the script imports a module, the journal compares what the import has read with what it would read now:

- Equal: the module, and all that its import executed, come back in the same order with the same changes (`_replay`).
- Not equal: nothing of the module has been visible yet. `Hooks.inexact` is called, which must not return.

What is compared: the variables that Python code has read; for an import that loads shared libraries all variables,
since reads in C cannot be seen; where the modules would be found; and who else takes part in imports.

Run in the workers' interpreter without this package on its path. Standard library only.
"""

import _frozen_importlib
import atexit
import builtins
import os
import sys

from nvrx_effects import AtExit, Variable, World, become, change, known, patches
from nvrx_exact import STDLIB, Exact, absolute, find
from nvrx_graph import Graph, fill, namespace

_Spec = type(sys.__spec__)
_Module = type(sys)
_ROW = 512  # modules whose memory is taken at once


class Unfit(Exception):
    """Workers must not be forked from this process."""


class Entry:
    """A module that was executed in the template."""

    def __init__(self, name, listed, settings):
        self.name = name
        self.listed = listed  # the module whose import executed it
        self.settings = settings  # the variables as the import found them
        # no spec: the code of another module has put it into sys.modules
        self.module = self.spec = None
        # names that were imported while it was executed, in their order; not all are modules
        self.needs = {}
        self.reads = {}  # variables that Python code has read, with their values
        self.loads = False  # it is a shared library of a package
        # and the import of that package began with it: any variable may have been read
        self.reads_all = False
        self.effects = []  # changes outside of modules, in their order
        self.is_bound = False  # its parent package has it as an attribute


class Journal:
    """The finder. Invariant: all of `entries` that is not in `parked` is visible."""

    def __init__(self):
        # all that was executed here or in the template, by name, as in sys.modules
        self.entries = {}
        self.parked = Graph({}, None)  # the hidden part of it
        self.rank_reads = set()  # variables of a rank that imports have read
        self.rank_names = set()  # variables that differ from rank to rank
        self._hooks = self._exact = None  # set in a worker
        self.path, self.libraries = [], set()
        self._stack = []  # what is being executed
        self._is_recording = False
        self._blanks = []  # modules without a name
        self.is_replaying = False
        self._namespaces = {}  # the parked modules' namespaces before the import that is recorded
        self._seen = set(sys.modules)  # names of modules that belong to an entry, or to nobody
        self._count = len(sys.modules)  # when they were looked at
        self._noted = known()  # effects that belong to an entry, or to nobody
        self.written = {}  # variables that imports of this process have written
        self._watched = set()
        self.entries["atexit"] = own = Entry("atexit", "", {})
        own.module, own.spec = atexit, atexit.__spec__

    # --- in the template --------------------------------------------------------------------------------------

    def record(self, name, names, settings):
        """Import the module `name` (and take `names` from it) under these changes of variables."""
        self._stack = [Entry("", name, settings)]
        before, known = dict(os.environ._data), set(self.entries)
        replaced = [
            (os._Environ, "__getitem__", self._noting),
            (os, "putenv", self._writing),
            (os, "unsetenv", self._writing),
            (os, "execv", lambda real: _refuse),
            (os, "execve", lambda real: _refuse),
            (atexit, "register", self._registering),
            (builtins, "__import__", self._importing),
            (_frozen_importlib, "_gcd_import", self._importing_by_name),
        ]
        real = [getattr(owner, own_name) for owner, own_name, _ in replaced]
        self._namespaces = {
            one: dict(namespace(entry.module)) for one, entry in self.entries.items()
        }
        self._is_recording, self._count = True, len(sys.modules)
        change(settings)
        for (owner, own_name, make), one in zip(replaced, real, strict=True):
            setattr(owner, own_name, make(one))
        try:
            __import__(name, fromlist=names)
            self._note_extras(self.entries.get(name, self._stack[0]))
        finally:
            for (owner, own_name, _), one in zip(replaced, real, strict=True):
                setattr(owner, own_name, one)
            self._is_recording = False
            become(before)
            for entry in self.entries.values():
                if entry.loads and entry.name not in known:
                    entry.reads_all = _root(name) not in known

    def park(self):
        """Hide all modules that are visible, and take their effects back."""
        visible = [entry for entry in self.entries.values() if entry.name not in self.parked]
        for entry in visible:
            package, _, child = entry.name.rpartition(".")
            names = namespace(self.module(package))
            if names.get(child, self) is entry.module:
                entry.is_bound = True
                del names[child]
        for entry in reversed(visible):
            entry.effects = [effect for effect in entry.effects if effect.is_there()]
            for effect in reversed(entry.effects):
                effect.undo()
        for patch in patches(self._namespaces, self.entries):
            visible[-1].effects.append(patch)  # the module that was recorded is the last one
            patch.undo()
        for name in self.entries:
            sys.modules.pop(name, None)
        self.parked = Graph(self.entries, self.module)
        self._namespaces.clear()
        self.written.clear()

    def module(self, name):
        """The module, also a parked one; None if it was never imported."""
        entry = self.entries.get(name)
        return entry.module if entry is not None else sys.modules.get(name)

    def modules(self):
        """Names and modules of all that was executed."""
        return [(entry.name, entry.module) for entry in self.entries.values()]

    def forget(self, prefix):
        """The modules of the template's own program, which the script shall not find."""
        for found in (self.entries, sys.modules):
            for name in [name for name in found if name.startswith(prefix)]:
                del found[name]
        self.parked = Graph(self.entries, self.module)

    def forget_all(self):
        """The process ends."""
        self.entries.clear()
        self._namespaces.clear()
        self.parked = Graph({}, None)

    def search_path(self, name):
        """Where the package of this module looks for it; None: the module is in no package."""
        return getattr(self.module(name.rpartition(".")[0]), "__path__", None)

    def _noting(self, getitem):
        def note(environ, key):
            value = environ._data.get(environ.encodekey(key))
            name = os.fsencode(key)
            if name in self.rank_names:
                self.rank_reads.add(os.fsdecode(name))
            if name not in self.written:
                self._stack[-1].reads.setdefault(name, value)
            return getitem(environ, key)

        return note

    def _writing(self, real):
        def noted(key, *value):
            real(key, *value)
            name = os.fsencode(key)
            self.written[name] = os.fsencode(value[0]) if value else None
            self._stack[-1].effects.append(Variable(name, self.written[name], self.written))

        return noted

    def _registering(self, register):
        def noted(function, *args, **kwargs):
            # The standard library registers a function once, for all modules (weakref.finalize): it has to stay.
            # Shared libraries are loaded by importlib, which registers nothing itself.
            caller = _root(sys._getframe(1).f_globals.get("__name__", ""))
            if caller not in STDLIB - {_root(self._stack[-1].name), "importlib"}:
                self._stack[-1].effects.append(AtExit(register, function, args, kwargs))
            return register(function, *args, **kwargs)

        return noted

    def _importing(self, real):
        """The statement does not ask finders for what is there already."""

        def noted(name, globals=None, locals=None, fromlist=(), level=0):
            full = absolute(name, globals or {}, level)
            self._need(full)
            module = real(name, globals, locals, fromlist, level)
            for one in fromlist or ():
                self._stack[-1].needs.setdefault(f"{full}.{one}")
            return module

        return noted

    def _importing_by_name(self, real):
        def noted(name, package=None, level=0):
            self._need(absolute(name, {"__package__": package}, level))
            return real(name, package, level)

        return noted

    def _need(self, name):
        """Packages come first; before them what is there already."""
        self._note_extras(self._stack[-1])
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            self._stack[-1].needs.setdefault(".".join(parts[:end]))

    def begin(self, name):
        self._note_extras(self._stack[-1])
        self._seen.add(name)
        self._count += 1  # importlib makes it visible now
        entry = Entry(name, self._stack[0].listed, self._stack[0].settings)
        entry.world = World()
        self._stack.append(entry)
        return entry

    def blank(self, name):
        """A new module, beside others: each worker writes to its reference count."""
        self._blanks = self._blanks or [_Module.__new__(_Module) for _ in range(_ROW)]
        module = self._blanks.pop()
        module.__init__(name)
        return module

    def end(self, entry, module):
        """`module`: None if its execution failed."""
        while self._stack.pop() is not entry:
            pass
        outer = self._stack[-1]
        self._note_extras(entry)
        if module is None:
            outer.needs |= entry.needs
            return
        for key, effect in entry.world.effects():
            if key not in self._noted:  # else it belongs to a module that was executed meanwhile
                self._noted.add(key)
                if key[0] != entry.name:  # else it is a part of this module
                    entry.effects.append(effect)
        del entry.world
        entry.module = sys.modules.get(entry.name, module)
        self.entries.pop(entry.name, None)
        self.entries[entry.name] = entry
        outer.needs.setdefault(entry.name)

    def _note_extras(self, entry):
        """Modules that no finder has seen come with the module whose code is executed when they appear."""
        if len(sys.modules) == self._count:
            return
        for name, module in list(sys.modules.items()):
            if name in self.parked:  # C code makes it where it is not there, as Cython's runtime
                entry.needs.setdefault(name)
            elif name not in self._seen:
                self._seen.add(name)
                own = self.entries[name] = Entry(
                    name, self._stack[0].listed, self._stack[0].settings
                )
                own.module = module
                spec = getattr(module, "__spec__", None)
                # a namespace package
                if getattr(spec, "submodule_search_locations", None) and spec.name == name:
                    own.spec = spec
                entry.needs.setdefault(name)
        self._count = len(sys.modules)

    # --- in a worker ------------------------------------------------------------------------------------------

    def settle(self, path, libraries):
        """The last import is done. Where the template has found modules, and what it has loaded."""
        self.path, self.libraries = path, libraries
        self._filler = fill()  # comes first: the graph is walked by all workers
        self.parked = Graph(self.entries, self.module)

    def begin_worker(self, hooks, watched, env):
        """Bring the script's imports back as they are needed, from now on. `env`: all variables at this moment."""
        self._hooks, self._watched = hooks, set(watched)
        self._exact = Exact(
            self, hooks, {name: value for name, value in env.items() if name not in self.rank_names}
        )

    def _replay(self, name):
        """Make the module visible with all that its execution has made."""
        some = self.parked.closure(name)
        if not self._is_recording and (why := self._exact.why_not(name, some)):
            self._hooks.inexact(self.entries[name].listed or name, why, self._exact.changes())
        self.is_replaying = True
        effects = []
        try:
            for number in some:
                if self.parked.show(number, name):
                    effects.extend(self.parked.effects.get(number, ()))
            # a module may do something before it imports others
            for effect in sorted(effects, key=_number):
                effect.redo()
        finally:
            self.is_replaying = False
        if self._is_recording:
            self._stack[-1].needs.setdefault(name)
        else:
            self._hooks.sought()

    # --- the protocol of finders, see importlib.abc.MetaPathFinder --------------------------------------------

    def find_spec(self, name, path=None, target=None):
        if self._hooks is not None:
            self._hooks.sought()
        if name in self._watched and not self._is_recording:
            self._watched.discard(name)
            # torch tries triton, which may be missing
            if name in self.parked or find(self, name, path) is not None:
                self._hooks.imported(name, self._exact.changes())
        entry = self.entries[name] if name in self.parked else None
        if entry is not None and entry.spec is not None and target is None:
            found = _Spec(name, _Replay(self, entry), origin=entry.spec.origin)
            found.submodule_search_locations = entry.spec.submodule_search_locations
            found.has_location = entry.spec.has_location
            found.cached = entry.spec.cached
            return found
        if not self._is_recording or target is not None:
            return None
        spec = find(self, name, path)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Record(self, spec)
        return spec


class _Record:
    """The loader of a module that is executed in the template: notes what happens meanwhile."""

    def __init__(self, journal, spec):
        self._journal = journal
        self._spec = spec
        self._loader = spec.loader
        self._entry = None

    def __getattr__(self, name):
        return getattr(self._loader, name)

    def create_module(self, spec):
        entry = self._entry = self._journal.begin(spec.name)
        entry.loads = str(spec.origin).endswith(".so") and _root(spec.name) not in STDLIB
        entry.spec = spec
        try:
            module = self._loader.create_module(spec)  # loads a shared library
            return self._journal.blank(spec.name) if module is None else module
        except BaseException:
            self._journal.end(entry, None)
            raise

    def exec_module(self, module):
        self._spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        if self._entry is None:  # the module was made by the caller, see importlib.util.LazyLoader
            return self._loader.exec_module(module)
        done = None
        try:
            self._loader.exec_module(module)
            done = module
        finally:
            self._journal.end(self._entry, done)


class _Replay:
    """The loader of a module that was executed in the template."""

    def __init__(self, journal, entry):
        self._journal, self._entry = journal, entry

    def __getattr__(self, name):
        return getattr(self._entry.spec.loader, name)

    def create_module(self, spec):
        # importlib writes attributes of the module that it is given here, so it gets an empty one
        return None

    def exec_module(self, module):
        self._journal._replay(self._entry.name)
        sys.modules[self._entry.name] = self._entry.module  # importlib returns what is there


# --- small things -----------------------------------------------------------------------------------------------


def _refuse(*args):
    raise Unfit("it executes another program, which would be the script")


def _root(name):
    return name.partition(".")[0]


def _number(one):
    return one.number
