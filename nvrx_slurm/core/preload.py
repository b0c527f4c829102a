"""Which modules a template imports where the user names none. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

# Slow to import, used by many, and without threads, open files or devices after the import. In the order of imports.
CANDIDATES = ("numpy", "torch", "scipy", "pandas", "triton", "torchvision", "PIL", "safetensors", "tokenizers", "regex")
_LIBRARY = re.compile(rf"/({'|'.join(CANDIDATES)})/\S*\.so[.\d]*$", re.MULTILINE)


def _in_order(found: Iterable[str]) -> tuple[str, ...]:
    names = set(found)
    chosen = [name for name in CANDIDATES if name in names]
    if "torch" in names:
        chosen.append("torch._dynamo")  # the first optimizer of a script imports it, as slow as torch itself
    return tuple(chosen)


def loaded(maps: str) -> tuple[str, ...]:
    """Those that a process has loaded. `maps`: its /proc/PID/maps, see proc(5)."""
    return _in_order(_LIBRARY.findall(maps))


def imported(source: str) -> tuple[str, ...]:
    """Those that the text of a script imports itself; () for what is not Python."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    return _in_order(name.partition(".")[0] for name in names)
