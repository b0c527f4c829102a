"""Which modules a template imports, and under which variables. Pure.

The text of a script only guesses what is worth an early import. Whether a fork is exact is checked when the script
imports (`warm.journal`), and what ranks tell then is what later templates are made of.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

# Slow to import, used by many, and without threads, open files or devices after the import. In the order of imports.
CANDIDATES = (
    "numpy",
    "torch",
    "scipy",
    "pandas",
    "triton",
    "torchvision",
    "PIL",
    "safetensors",
    "tokenizers",
    "regex",
)
_DYNAMO = "torch._dynamo"  # the first optimizer of a script imports it, as slow as torch itself
# slow, too, and without a library that /proc shows
_PYTHON_ONLY = ("accelerate", "torchmetrics", "transformers")
WATCHED = (*CANDIDATES, _DYNAMO, *_PYTHON_ONLY)
_LIGHTNING = frozenset({"lightning", "pytorch_lightning"})  # they import torchmetrics
_USERS_OF_TORCH = frozenset({"torch", "torchvision", *_PYTHON_ONLY, *_LIGHTNING})
_DYNAMO_SOON = re.compile(r"\b(optim|compile)\b")
_LIBRARY = re.compile(r"/\S*\.so[.\d]*$", re.MULTILINE)
_WRITERS = frozenset({"setdefault", "update", "pop", "clear"})  # methods of os.environ
_SETTERS = frozenset({"putenv", "unsetenv", "load_dotenv"})
_MOST_FILES = 64  # of the script's own modules that are read
MAX_MISSES = 2  # a module whose variables are others at each start is left out

Changes = Mapping[str, str | None]  # variables that the script has changed; None = not set
Module = tuple[str, Changes]  # what to import, and under which changes


def loaded(maps: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """The modules that a process has loaded, and its shared libraries. `maps`: its /proc/PID/maps, see proc(5)."""
    libraries = frozenset(_LIBRARY.findall(maps))
    return in_order(part for library in libraries for part in library.split("/")), libraries


def in_order(found: Iterable[str]) -> tuple[str, ...]:
    """Candidates among these names; torch comes with its second part."""
    names = set(found)
    if "torch" in names:
        names.add(_DYNAMO)
    return tuple(name for name in (*CANDIDATES[:2], _DYNAMO, *CANDIDATES[2:]) if name in names)


class Guess(NamedTuple):
    """What the text of a script says."""

    first: tuple[str, ...] = ()  # what the first workers wait for
    later: tuple[str, ...] = ()  # what they import soon, and what may turn out to be unfit
    next: tuple[str, ...] = ()  # modules that import one of these, and are fit, too
    scout: str = ""  # what imports torch, and may set variables before; "" = the script itself


def guess(source: str, nproc: int, read: Callable[[str], str]) -> Guess:
    """What `nproc` workers of this script import before anything else.

    `read(module)`: the text of a module beside the script, "" if there is none. Workers wait for torch, numpy and what
    they take from libraries above torch; and not where a variable is set before torch is imported, since then they
    would be executed in the end.
    """
    texts, sets, first_user = [source], False, ""
    for kind, text in _at_import(source, read, set()):
        if kind is _TEXT:
            texts.append(text)
        elif kind is _SETS:
            sets = True
        elif text.partition(".")[0] in _USERS_OF_TORCH:
            first_user = text
            break
    trees = [_parsed(text) for text in texts]
    found = [one for tree in trees for one in _imports(ast.walk(tree))]
    names = {name.partition(".")[0] for name, _ in found}
    if not names & _USERS_OF_TORCH:
        return Guess()
    sets_later = any(_sets(node) for tree in trees for node in ast.walk(tree))
    entries = [
        ":".join([name, ",".join(taken)] if taken else [name])
        for name, taken in dict.fromkeys(found)
        if name.partition(".")[0] in _PYTHON_ONLY
    ]
    if names & _LIGHTNING:
        entries.append("torchmetrics")
    later = (*in_order(names | {"torch"}), *entries)
    if sets or (sets_later and not first_user):
        return Guess((), later)
    root = first_user.partition(".")[0]
    is_own = root in ("", "torch") or bool(read(root))  # nothing of the user's runs early
    scout = "" if is_own else first_user
    soon = names & (_USERS_OF_TORCH - {"torch"}) or any(_DYNAMO_SOON.search(text) for text in texts)
    first = in_order((names & {"numpy"}) | {"torch"})
    # One worker reaches its first optimizer as fast by itself.
    if nproc > 1 and soon and not sets_later:
        return Guess(first, later, tuple(entries), scout)
    return Guess(tuple(name for name in first if name != _DYNAMO), later, scout=scout)


_TEXT, _SETS, _IMPORT = "text", "sets", "import"


def _at_import(
    source: str, read: Callable[[str], str], seen: set[str], package: str = ""
) -> Iterator[tuple[str, str]]:
    """What happens while this text is executed as a module, in order, also in modules beside the script.

    What a function sets counts where the module calls one of its own; and at the end of a module beside the script,
    since then others may call it.
    """
    tree = _parsed(source)
    functions = [
        node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    setting = any(_sets(part) for function in functions for part in ast.walk(function))
    callable_here = {function.name for function in functions} if setting else set()
    for node in _statements(tree.body):
        parts = [] if node in functions else [*ast.walk(node)]
        if any(_sets(part) or _called(part) in callable_here for part in parts):
            yield _SETS, ""
        for name, taken in _imports([node], package):
            for module in dict.fromkeys((name, *(f"{name}.{one}" for one in taken))):
                text = read(module) if module not in seen and len(seen) < _MOST_FILES else ""
                if text:
                    seen.add(module)
                    yield _TEXT, text
                    yield from _at_import(text, read, seen, module)
            yield _IMPORT, name
    if package and setting:
        yield _SETS, ""


def _called(node: ast.AST) -> str:
    """The last part of the name of what it calls; "" for anything else."""
    return _name(node.func) if isinstance(node, ast.Call) else ""


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """The statements that run when the module does, also under conditions, in their order."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
                yield from _statements(node.body)
            yield from _statements(node.orelse)
        else:
            yield node


def _sets(node: ast.AST) -> bool:
    """Whether it may set an environment variable."""
    if isinstance(node, ast.Subscript):
        return not isinstance(node.ctx, ast.Load) and _name(node.value) == "environ"
    if not isinstance(node, ast.Call):
        return False
    called = _called(node)
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    return called in _SETTERS or (called in _WRITERS and _name(owner) == "environ")


def _name(node: ast.AST | None) -> str:
    """The last part of a dotted name; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _imports(nodes: Iterable[ast.AST], package: str = "") -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names that are taken from it) of each import. `package`: the module that relative imports are in.

    A relative import counts twice, since the text does not tell whether it is that of a package or of a module.
    """
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            taken = tuple(alias.name for alias in node.names if alias.name != "*")
            parts = package.split(".") if node.level else []
            bases = (
                [parts[: len(parts) + 1 - node.level], parts[: len(parts) - node.level]]
                if node.level
                else [parts]
            )
            for base in bases:
                if name := ".".join([*base, *filter(None, [node.module])]):
                    yield name, taken


class Learned:
    """What the ranks of this node have told about their imports."""

    def __init__(self, named: Sequence[str] = ()) -> None:
        self._named = tuple(named)  # by the user; () = what the ranks import
        self._told: dict[str, dict[int, Changes]] = {}  # by module and local rank
        # starts with another value: of the second part of torch, of all
        self._misses: Counter[bool] = Counter()
        self._missed: set[bool] = set()  # in this start
        # names that come from elsewhere: the script's text, loaded libraries
        self._found: dict[str, None] = {}
        self._last: Changes = {}
        self._hinted: tuple[Module, ...] = ()  # by other nodes, until this one has ranks
        self._has_begun = False

    def imported(self, local_rank: int, module: str, changes: Changes) -> None:
        """A rank imports this module, after it has changed these variables."""
        self._told.setdefault(module, {})[local_rank] = self._last = changes

    def missed(self, module: str) -> None:
        """A template had it, and a rank had other variables."""
        is_second_part = module.startswith(_DYNAMO)
        self._misses[is_second_part] += is_second_part not in self._missed
        self._missed.add(is_second_part)

    def hinted(self, modules: tuple[Module, ...]) -> None:
        """The ranks of other nodes import these. A node that has had ranks knows it from them."""
        if not self._has_begun:
            self._hinted = modules

    def began(self) -> None:
        """All ranks start."""
        self._has_begun = True
        self._missed.clear()
        self.found(name for name, _ in self._hinted)

    def found(self, modules: Iterable[str]) -> None:
        """The ranks import these, or will soon."""
        self._found.update(dict.fromkeys(modules))

    def has(self, module: str) -> bool:
        """Whether a rank imports it."""
        return module in self._told or module in self._found

    def by_rank(self) -> Iterator[tuple[str, ...]]:
        """Variables that differ from rank to rank, so that no template imports what comes after them."""
        for told in self._told.values():
            times = Counter(change for changes in told.values() for change in changes.items())
            if names := {name for (name, _), count in times.items() if count < len(told)}:
                yield tuple(sorted(names))

    def modules(self) -> tuple[Module, ...]:
        """What the next template imports, in this order."""
        names = self._named or (
            *in_order((*self._told, *(name for name in self._found if ":" not in name))),
            *(
                name
                for name in self._found
                if name.partition(":")[0].partition(".")[0] in _PYTHON_ONLY
            ),
        )
        if self._misses[False] >= MAX_MISSES:
            return ()
        if self._hinted and not self._has_begun:
            return self._hinted
        hinted = {name: {-1: changes} for name, changes in self._hinted}
        chosen: list[Module] = []
        left_out = {_DYNAMO} if self._misses[True] >= MAX_MISSES else set()
        for name in names:
            module = name.partition(":")[0]
            root = module.partition(".")[0]
            by_rank_told = self._told.get(module) or hinted.get(name) or self._told.get(root, {})
            told = [*by_rank_told.values()]
            by_rank = any(changes != told[0] for changes in told)
            needs_it = root in left_out or (root in _USERS_OF_TORCH and "torch" in left_out)
            if by_rank or needs_it or module in left_out:
                left_out.add(module)
            else:
                chosen.append((name, told[0] if told else self._last))
        return tuple(chosen)
