"""Whether an import of the script would do what it did in the template. Part of `journal.py`; standard library only.

The variables that Python code has read are known, with their values. An import that loads shared libraries may have
read any variable, since getenv(3) in C leaves no trace.
"""

import builtins
import os
import sys

from nvrx_effects import loggers

STDLIB = sys.stdlib_module_names


class Hooks:
    """What the owner of a journal does. Names of variables and their values are bytes, None = not set."""

    def c_environ(self):
        """All variables as C code reads them."""
        return dict(os.environ._data)

    def libraries(self):
        """The paths of all shared libraries that are loaded."""
        return set()

    def imported(self, name, changes):
        """The script imports this watched module for the first time; it has changed these variables until now."""

    def sought(self):
        """A module is sought, or modules have become visible: the script may have imported what its owner waits for."""

    def inexact(self, name, why, changes):
        """The import of `name` would not do what it did in the template. Must not return."""
        raise NotImplementedError


class Exact:
    """A worker at its begin, and what its script has changed since then.

    `journal`: has the modules. `env`: all variables at the begin, without those of a rank.
    """

    def __init__(self, journal, hooks, env):
        self._journal = journal
        self._hooks = hooks
        self._env = env
        self._finders = [*sys.meta_path]
        self._path_hooks = [*sys.path_hooks]
        self._import = builtins.__import__
        self._affinity = os.sched_getaffinity(0)
        self._flags = sys.getdlopenflags()
        self._putenv = os.putenv
        if journal.parked.readers:
            os.putenv = self._notice

    def _notice(self, key, value):
        """A variable that a parked module has read is written: the earlier this process ends the better.

        The same is not done for an unset, which is often for a moment (accelerate's clear_environment).
        """
        self._putenv(key, value)
        name = os.fsencode(key)
        new = os.fsencode(value)
        if self._journal.is_replaying or name in self._journal.rank_names:
            return
        expected, listed = self._expected(name)
        if listed and new not in expected:
            self._hooks.inexact(listed, _sets(name), self.changes())

    def _expected(self, name):
        """The values that the parked modules expect, and the import of one of them."""
        expected = set()
        listed = ""
        parked = self._journal.parked
        for entry in [entry for number, entry in parked.readers.items() if parked.hidden[number]]:
            if name in entry.reads:
                expected.add(entry.reads[name])
            elif entry.reads_all:
                expected.add(entry.settings.get(name, self._env.get(name)))
            else:
                continue
            listed = listed or entry.listed
        return expected, listed

    def changes(self):
        """The variables that the script has changed, with their values."""
        now = self._hooks.c_environ()
        before = {**self._env, **self._journal.written}
        names = (now.keys() | before.keys()) - self._journal.rank_names
        return {name: now.get(name) for name in names if now.get(name) != before.get(name)}

    def why_not(self, name, some):
        """Why the execution of `some` modules (numbers in `parked`) for `name` would differ from that in the template;
        "" if it would not."""
        parked = self._journal.parked
        readers = [parked.readers[number] for number in some if number in parked.readers]
        return (
            self._why_not_read(readers)
            or self._why_not_free(name, some)
            or self._why_not_loaded([entry for entry in readers if entry.reads_all])
            or self._why_not_found(
                [parked.names[number] for number in some if parked.is_found[number]]
            )
        )

    def _why_not_read(self, readers):
        known = self._journal.rank_names | self._journal.written.keys()
        for entry in readers:
            for key, value in entry.reads.items():
                if key not in known and os.environ._data.get(key) != value:
                    return _sets(key)
        return ""

    def _why_not_free(self, imported, some):
        """Whether the script has made something itself that the import makes."""
        parked = self._journal.parked
        loggers_taken = {parked.makers[name]: name for name in loggers() if name in parked.makers}
        for number in some:
            name = parked.names[number]
            module = parked.modules[number]
            own = sys.modules.get(name, module)
            if (
                name != imported
                and own is not module
                and not (_is_empty(own) and _is_empty(module))
            ):
                return f"the script has another module {name}"
            if number in loggers_taken:
                return f"the script uses the logger {loggers_taken[number]}"
            if taken := next(
                filter(None, (effect.taken() for effect in parked.guarded.get(number, ()))), ""
            ):
                return f"the script uses {taken}"
        return ""

    def _why_not_loaded(self, loading):
        if not loading:
            return ""
        changes = self.changes()
        for settings in {id(entry.settings): entry.settings for entry in loading}.values():
            for key in sorted(changes.keys() | settings.keys()):
                before = self._env.get(key)
                if changes.get(key, before) != settings.get(key, before):
                    return _sets(key)
        if os.sched_getaffinity(0) != self._affinity:
            return "the script changes its CPU affinity"
        if sys.getdlopenflags() != self._flags:
            return "the script changes how libraries are loaded"
        stems = {_stem(path) for path in self._journal.libraries}
        for path in self._hooks.libraries() - self._journal.libraries:
            if _stem(path) in stems and ".cpython-" not in path:
                return f"the script has loaded {path}"
        return ""

    def _why_not_found(self, names):
        if builtins.__import__ is not self._import or sys.path_hooks != self._path_hooks:
            return "the script changes how modules are imported"
        entries = self._journal.entries
        new = [one for one in sys.meta_path if not any(one is known for known in self._finders)]
        for finder in new:
            for name in names:
                if ask(finder, name, self._journal.search_path(name)) is not None:
                    return f"the script has an import hook for {name}"
        beside = _beside(sys.path[0]) if sys.path else ()
        for name in [name for name in names if name in beside]:
            places = sys.path[0], os.path.join(sys.path[0], name)  # of a module, of a package
            if os.path.dirname(str(entries[name].spec.origin)) not in places:
                return f"the script has a module {name} beside it"
        if sys.path == self._journal.path:
            return ""
        for name in names:
            if "." not in name and name not in STDLIB:
                found = find(self._journal, name, None)
                if found is None or found.origin != entries[name].spec.origin:
                    return f"the script's path has another {name}"
        return ""


def absolute(name, namespace, level):
    """The full name of a module that is imported in this namespace, see PEP 328."""
    if not level:
        return name
    package = namespace.get("__package__")
    if package is None:
        package = namespace.get("__name__", "")
        if "__path__" not in namespace:
            package = package.rpartition(".")[0]
    base = package.rsplit(".", level - 1)[0]
    return f"{base}.{name.lstrip('.')}" if name.lstrip(".") else base


def find(journal, name, path):
    """The spec that Python would find without the journal."""
    for finder in [one for one in sys.meta_path if one is not journal]:
        spec = ask(finder, name, path)
        if spec is not None:
            return spec
    return None


def ask(finder, name, path):
    """What one finder says; old ones have no `find_spec`."""
    find_spec = getattr(finder, "find_spec", None)
    return None if find_spec is None else find_spec(name, path, None)


def _beside(directory):
    """The names of the modules in a directory."""
    try:
        return {name.partition(".")[0] for name in os.listdir(directory or ".")}
    except OSError:
        return ()


def _is_empty(module):
    """Cython's runtime is: each package makes it where it is not there."""
    return all(name.startswith("__") for name in getattr(module, "__dict__", "x"))


def _sets(name):
    return f"the script sets {os.fsdecode(name)}"


def _stem(path):
    """libgomp for /x/libgomp-a34b3233.so.1: two copies of one library, of which the first one counts."""
    return os.path.basename(path).partition(".so")[0].partition("-")[0]
