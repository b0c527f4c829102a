"""NVRx's package name for what nvrx_slurm has of it; see `nvrx_slurm.compat`.

`nvidia_resiliency_ext.NAME` is the module object of nvrx_slurm, so that no class exists twice. The import of what is
not here raises ModuleNotFoundError: a program that can do without it catches that, as it does without NVRx.
"""

from __future__ import annotations

import sys
from importlib import import_module, util
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

__version__ = "0.7.0"  # whose names these are; Megatron-LM compares it

_HERE = {name: name for name in ("fault_tolerance", "inprocess", "ptl_resiliency")}
_HERE["shared_utils"] = "testing"  # for inject_fault; the rest is NVRx's inside
_HERE["straggler"] = "attribution.straggler"  # until 0.4; later `attribution.straggler`
_HERE["attribution"] = "attribution"


class _Alias(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != __name__:
            return None
        first, dot, rest = name.partition(".")
        ours = f"nvrx_slurm.{_HERE.get(first, '')}{dot}{rest}"
        # ours, but not for others
        is_inside = first == "attribution" and rest not in ("", "straggler")
        if first not in _HERE or is_inside or util.find_spec(ours) is None:
            raise ModuleNotFoundError(
                f"{fullname} is not here: by --nvrx-compat, nvrx_slurm answers to this name, and it has "
                f"{', '.join(_HERE)} only (nvrx_slurm's migration guide from NVRx says what is in them)",
                name=fullname,
            )
        return ModuleSpec(fullname, self, origin=ours)

    def create_module(self, spec: ModuleSpec) -> Any:
        module = import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state  # the import has put in the alias's


sys.meta_path.insert(0, _Alias())
