"""NVRx's package name for what nvrx_slurm has of it, before an installed NVRx; see `nvrx_slurm.compat`.

`nvidia_resiliency_ext.NAME` is the module object of nvrx_slurm, so that no class exists twice. Modules that
nvrx_slurm lacks come from the installed NVRx. The import of what neither has raises ModuleNotFoundError: a program
that can do without it catches that, as it does without NVRx.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

__version__ = "0.7.0"  # whose names these are; Megatron-LM compares it

_OURS = {name: name for name in ("fault_tolerance", "inprocess", "ptl_resiliency")}
_OURS["attribution.straggler"] = "attribution.straggler"
_OURS["straggler"] = "attribution.straggler"  # its name until 0.4
_OURS["shared_utils.inject_fault"] = "testing.inject_fault"
# packages of NVRx with a module of ours in them: NVRx's own where it is installed
_PARENTS = {"attribution": "attribution", "shared_utils": "testing"}


def _installed() -> list[str]:
    """The folders that Python would import as this package, were nvrx_slurm's not first."""
    others = [place for place in sys.path if os.path.join(place, __name__) not in __path__]
    specs = (finder.find_spec(__name__, others) for finder in sys.meta_path)
    found = [place for spec in specs if spec for place in spec.submodule_search_locations or ()]
    return [place for place in found if place not in __path__]


class _Alias(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __name__:
            return None
        spec = _ours(fullname, name, _OURS) or _theirs(fullname, name)
        if spec := spec or _ours(fullname, name, _PARENTS):
            return spec
        raise ModuleNotFoundError(
            f"{fullname} is not here: by --nvrx-compat, nvrx_slurm answers to this name. It has {', '.join(_OURS)}; "
            f"other modules come from an installed nvidia-resiliency-ext, and "
            f"{'that has no such module' if _THEIRS else 'none is installed'}",
            name=fullname,
        )

    def create_module(self, spec: ModuleSpec) -> Any:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state  # the import has put in the alias's


def _ours(fullname: str, name: str, known: dict[str, str]) -> ModuleSpec | None:
    for theirs, ours in known.items():
        rest = name.removeprefix(theirs)
        is_inside = known is _OURS and rest.startswith(".")
        if theirs + rest == name and (not rest or is_inside):
            place = f"nvrx_slurm.{ours}{rest}"
            return ModuleSpec(fullname, _ALIAS, origin=place) if util.find_spec(place) else None
    return None


def _theirs(fullname: str, name: str) -> ModuleSpec | None:
    parents = name.split(".")[:-1]
    return PathFinder.find_spec(fullname, [os.path.join(place, *parents) for place in _THEIRS])


_THEIRS = _installed()
__path__ += _THEIRS
_ALIAS = _Alias()
sys.meta_path.insert(0, _ALIAS)
