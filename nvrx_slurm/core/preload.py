"""Which modules a template imports where the user names none. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

# Slow to import, used by many, and without threads, open files or devices after the import. In the order of imports.
CANDIDATES = ("numpy", "torch", "scipy", "pandas", "triton", "torchvision", "PIL", "safetensors", "tokenizers", "regex")
_DYNAMO = "torch._dynamo"
# Slow to import, written in Python, so that only the script tells that they are wanted.
_FROM_TEXT = frozenset({"accelerate", "torchmetrics", "transformers"})
_PATCHES = frozenset({"unsloth"})  # have to be imported before the libraries that they patch
_USERS_OF_TORCH = frozenset({*_FROM_TEXT, "lightning", "pytorch_lightning", "torchvision"})
_MENTIONS_TORCH = re.compile("torch|lightning|accelerate|transformers")
_DYNAMO_SOON = re.compile(r"\b(optim|compile)\b")
_LIBRARY = re.compile(r"/\S*\.so[.\d]*$", re.MULTILINE)


def _in_order(found: Iterable[str]) -> tuple[str, ...]:
    names = set(found)
    chosen = [name for name in CANDIDATES if name in names]
    if "torch" in names:
        chosen.append(_DYNAMO)  # the first optimizer of a script imports it, as slow as torch itself
    return tuple(chosen)


def loaded(maps: str) -> tuple[tuple[str, ...], frozenset[str]]:
    """Those that a process has loaded, and its shared libraries. `maps`: its /proc/PID/maps, see proc(5)."""
    libraries = frozenset(_LIBRARY.findall(maps))
    return _in_order(part for library in libraries for part in library.split("/")), libraries


def imported(source: str) -> tuple[str, ...]:
    """Those that the text of a script imports itself; () for what is not Python."""
    return _in_order(name.partition(".")[0] for name, _ in _imports(ast.walk(_parsed(source))))


def at_start(source: str, nproc: int, is_local: Callable[[str], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those that `nproc` workers import before anything else: what they wait for, and what has time.

    Workers wait only for what can be forked on each machine. Without torch there is none: the others are quick. What
    comes after a statement, or after an import of a module beside the script (`is_local`), does not count: these may
    set a variable or a path that the import reads.
    """
    if not _MENTIONS_TORCH.search(source):
        return (), ()

    def is_harmless(node: ast.AST) -> bool:
        modules = {name.partition(".")[0] for name, _ in _imports([node])}
        return _is_plain(node) and not any(name in _PATCHES or is_local(name) for name in modules)

    found = list(_imports(takewhile(is_harmless, _statements(_parsed(source).body))))
    names = {name.partition(".")[0] for name, _ in found}
    if not names & {"torch", *_USERS_OF_TORCH}:
        return (), ()
    first = _in_order(names & {"numpy", "torch"} | {"torch"})
    # One worker reaches its first optimizer as fast by itself.
    if nproc == 1 or not (names & _USERS_OF_TORCH or _DYNAMO_SOON.search(source)):
        first = first[:-1]
    entries = [
        ":".join([name, ",".join(taken)] if taken else [name])
        for name, taken in found
        if name.partition(".")[0] in _FROM_TEXT
    ]
    return first, (*_in_order(names | {"torch"}), *entries)


def _parsed(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.AST]:
    """Those that run when the module does, also under conditions, in their order."""
    for node in body:
        if isinstance(node, (ast.If, ast.Try)):
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
                yield from _statements(node.body)
            yield from _statements(node.orelse)
        else:
            yield node


def _is_plain(node: ast.AST) -> bool:
    """Whether a statement changes nothing but names of the script."""
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(isinstance(target, ast.Name) for target in targets) and not any(
            isinstance(part, (ast.Call, ast.NamedExpr)) for part in ast.walk(node)
        )
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Pass))


def _imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(module, names that are taken from it) of each import of a module that is not relative."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or "", tuple(alias.name for alias in node.names if alias.name != "*")
