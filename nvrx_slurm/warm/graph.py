"""The hidden modules of a template, by number, as a worker walks them. Part of `journal.py`; standard library only.

A worker shares the memory of its template, page by page, until it writes there. To look at an object writes to its
reference count, and what belongs to 2,000 modules is on as many pages. So here is all that a worker looks at: flags in
one object, small objects beside each other, and large lists, of which it takes only what becomes visible.
"""

import sys

_POOL = 1 << 14  # bytes that Python has in one row for objects of one size
_ROWS = 64  # at most so many: another allocator may never give neighbours


class Graph:
    """Invariant: a hidden module is neither in sys.modules nor bound to its package."""

    def __init__(self, entries, loaded):
        """`entries`: of all modules that were executed, by name. `loaded`: returns the module of a name."""
        self.modules = [entry.module for entry in entries.values()]
        self.names = [name[:1] + name[1:] for name in entries]  # copies, beside each other
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.hidden = bytearray(b"\1") * len(entries)
        self.is_found = bytes(entry.spec is not None for entry in entries.values())
        self.readers = {}  # entries of those that have read variables
        self.effects = {}  # by name, for modules that have some
        self.makers = {}  # which module made a logger, by the logger's name
        self.guarded = {}  # other effects for which the script may have made something itself
        needs = []
        ends = [0]
        self._packages = []  # namespaces to which they are bound
        for number, entry in enumerate(entries.values()):
            # other names are no modules
            entry.needs = [name for name in entry.needs if name in entries]
            needs += [self._numbers[name] for name in entry.needs]
            ends.append(len(needs))
            package = loaded(entry.name.rpartition(".")[0])
            self._packages.append(namespace(package) if entry.is_bound else None)
            if entry.reads or entry.reads_all:
                self.readers[number] = entry
            if entry.effects:
                self.effects[number] = entry.effects
                self.makers.update({effect.logger: number for effect in entry.effects})
                if guarded := [effect for effect in entry.effects if effect.taken]:
                    self.guarded[number] = guarded
        self._needs, self._ends = _array(needs), _array(ends)

    def __contains__(self, name):
        number = self._numbers.get(name)
        return number is not None and bool(self.hidden[number])

    def closure(self, name):
        """The hidden modules that come with this one, in the order in which their execution would end."""
        first = self._numbers[name]
        waits = bytearray(self.hidden)
        found = []
        waits[first] = False
        todo = [(first, self._needed(first))]
        while todo:
            number, needs = todo[-1]
            new = next((one for one in needs if waits[one]), None)
            if new is None:
                found.append(number)
                todo.pop()
            else:
                waits[new] = False
                todo.append((new, self._needed(new)))
        return found

    def _needed(self, number):
        return iter(self._needs[self._ends[number] : self._ends[number + 1]])

    def show(self, number, imported):
        """Make a module visible, without its effects; importlib does a part of it for the one that is `imported`.

        Returns False if another thread was first.
        """
        if not self.hidden[number]:
            return False
        self.hidden[number] = False
        name = self.names[number]
        module = self.modules[number]
        package = self._packages[number]
        if name != imported:
            sys.modules.setdefault(name, module)
        if package is not None:
            package[name.rpartition(".")[2]] = module
        return True


def namespace(module):
    """The variables of a module; what is in sys.modules may have none."""
    return getattr(module, "__dict__", {})


def fill():
    """Objects in all free places between others. While they live, new objects are beside each other."""
    filler = []
    for size in range(48, 513, 16):
        for _ in range(_ROWS):
            row = [bytes(size - 33) for _ in range(_POOL // size - 2)]
            filler.append(row)
            places = [*map(id, row)]
            if max(places) - min(places) < 2 * _POOL:
                break
    return filler


def _array(numbers):
    """Numbers in one object, without an object for each."""
    found = memoryview(bytearray(4 * len(numbers))).cast("i")
    for place, number in enumerate(numbers):
        found[place] = number
    return found
