"""Each field of the cores has one writer: the class that declares it. Others read it, or call a method."""

import ast
from pathlib import Path

import pytest

from nvrx_slurm import core

pytestmark = pytest.mark.fast

CORE = Path(core.__file__).parent
TREES = {path: ast.parse(path.read_text()) for path in sorted(CORE.rglob("*.py"))}
COLLECTIONS = {"Counter", "defaultdict", "deque", "dict", "field", "list", "set"}
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "update",
}  # fmt: skip


def is_self(node):
    """Whether a field of this object is a field of the class that the code stands in."""
    return isinstance(node, ast.Name) and node.id == "self"


def is_collection(value):
    """Whether a field that begins with this value is a plain collection, so that its methods write the field."""
    made_by = value.func if isinstance(value, ast.Call) else value
    named = made_by.value if isinstance(made_by, ast.Subscript) else made_by
    return isinstance(value, (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)) or (
        isinstance(named, ast.Name) and named.id in COLLECTIONS
    )


def declared(tree):
    """The fields of the classes in a module, and whether they are plain collections."""
    found = {}
    for node in ast.walk(tree):
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            name = getattr(target, "attr", "") if is_self(getattr(target, "value", target)) else ""
            if isinstance(node, ast.AnnAssign) and isinstance(target, ast.Name):
                name = target.id
            if name:
                found[name] = found.get(name, False) or is_collection(getattr(node, "value", None))
    return found


ALL = {name for tree in TREES.values() for name, plain in declared(tree).items() if plain}


def writes(tree):
    """Where a module changes a field of an object whose class is declared elsewhere."""
    own = declared(tree)
    found = []
    for node in ast.walk(tree):
        field = node
        stores = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            field = node.func.value
            stores = getattr(field, "attr", "") in ALL
        elif isinstance(node, ast.Subscript):
            field = node.value
        if stores and isinstance(field, ast.Attribute) and not is_self(field.value) and field.attr not in own:
            found.append(ast.unparse(field))
    return found


def test_each_field_is_written_by_the_class_that_declares_it():
    found = {str(path.relative_to(CORE)): writes(tree) for path, tree in TREES.items()}
    assert {path: fields for path, fields in found.items() if fields} == {}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("self._job.cycle = 1", "self._job.cycle"),
        ("a, job.fresh = 1, 2", "job.fresh"),
        ("quorum.dead |= some", "quorum.dead"),
        ("del roster.job.before", "roster.job.before"),
        ("self._quorum.fences[key] = 1.0", "self._quorum.fences"),
        ("del quorum.fences[key]", "quorum.fences"),
        ("self.running.broken.add(1)", "self.running.broken"),
    ],
)
def test_each_form_of_a_write_is_seen(text, field):
    assert writes(ast.parse(text)) == [field]
