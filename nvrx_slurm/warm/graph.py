"""The hidden modules of a template, by number, in few large objects. Part of `journal.py`; standard library only.

A worker shares the memory of its template, page by page, until it writes. To look at an object writes to its reference
count, and 2,000 modules with their names and needs are on as many pages. So here is what a worker looks at: numbers are
in arrays, names are beside each other, and lists are read for those modules only that become visible.
"""

import sys


class Graph:
    """Invariant: a hidden module is neither in sys.modules nor bound to its package."""

    def __init__(self, entries, loaded):
        """`entries`: of the modules that were executed, in this order, by name. `loaded`: returns the module NAME."""
        self.entries = [*entries.values()]
        self.modules = [entry.module for entry in self.entries]
        self.names = [name[:1] + name[1:] for name in entries]  # copies, one after the other
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self.hidden = bytearray(b"\1") * len(self.names)
        needs = [[self._numbers[name] for name in entry.needs if name in entries] for entry in self.entries]
        ends = [0]
        for some in needs:
            ends.append(ends[-1] + len(some))
        self._needs = _array([number for some in needs for number in some])
        self._ends = _array(ends)  # those of module N are between number N and number N + 1
        self._packages = [
            namespace(loaded(entry.name.rpartition(".")[0])) if entry.is_bound else None for entry in self.entries
        ]
        self.is_found = bytes(entry.spec is not None for entry in self.entries)
        self.effects = {number: entry.effects for number, entry in enumerate(self.entries) if entry.effects}
        self.readers = {
            number: entry for number, entry in enumerate(self.entries) if entry.reads or entry.reads_all
        }  # of variables

    def __contains__(self, name):
        number = self._numbers.get(name)
        return number is not None and bool(self.hidden[number])

    def get(self, name):
        """The entry of a hidden module, or None."""
        return self.entries[self._numbers[name]] if name in self else None

    def closure(self, name):
        """The hidden modules that come with this one, in the order in which their execution would end."""
        first, waits, found = self._numbers[name], bytearray(self.hidden), []
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
        """Make a module visible. `imported`: the name of the one that importlib itself makes visible."""
        name, module, package = self.names[number], self.modules[number], self._packages[number]
        if name != imported:
            sys.modules[name] = module
        for effect in self.effects.get(number, ()):
            effect.redo()
        if package is not None:
            package[name.rpartition(".")[2]] = module


def namespace(module):
    """The variables of a module; what is in sys.modules may have none."""
    return getattr(module, "__dict__", {})


def _array(numbers):
    """Numbers in one object, without an object for each."""
    packed = memoryview(bytearray(4 * len(numbers))).cast("i")
    for place, number in enumerate(numbers):
        packed[place] = number
    return packed
