"""What runs in a worker's interpreter before its script: the program of templates, and the count of steps."""

from __future__ import annotations

import contextlib
import importlib.util
import marshal  # noqa: TID251 - only written
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path

from nvrx_slurm.system.files import WARM_NAME

_WARM = Path(__file__).parents[2] / "warm"
# nvrx_NAME in a worker
_PROGRAM = ("effects", "exact", "graph", "journal", "process", "rank", "scout", "steps", "store_wait", "template")
_HOOK = "sitecustomize"
_UNCHECKED = (0b01).to_bytes(4, "little") + bytes(8)  # PEP 552: by the hash of a source that nobody compares
_PAGE = "NVRX_PAGE"  # a variable that no script sees, see `warm.steps`


class StartUp:
    """The program's files, in a directory of their own below `private_dir`."""

    def __init__(self, private_dir: Path) -> None:
        self.directory = private_dir / WARM_NAME

    def write(self) -> None:
        """Raises OSError."""
        self.directory.mkdir(exist_ok=True)
        for name in _PROGRAM:
            self._copy(_WARM / f"{name}.py", f"nvrx_{name}")
        self._copy(_WARM / "hook.py", _HOOK)  # the last one: then all are there

    def _copy(self, source: Path, name: str) -> None:
        """Copy a module with its bytecode, if Python may keep that: the first interpreters of each job would compile
        for 40 ms."""
        copy = self.directory / f"{name}.py"
        with contextlib.suppress(OSError):
            # not the file in __pycache__: Python may not be allowed to write it, and that of an older source stays
            code = SourceFileLoader(name, os.fspath(source)).get_code(name)
            compiled = Path(importlib.util.cache_from_source(copy))
            compiled.parent.mkdir(exist_ok=True)
            compiled.write_bytes(importlib.util.MAGIC_NUMBER + _UNCHECKED + marshal.dumps(code))
        copy.write_bytes(source.read_bytes())

    def environment(self, env: dict[str, str], page: str, forked: bool) -> dict[str, str]:
        """`env` of a worker, with what lets its start-up count steps in `page` (see `RankMonitor.page`)."""
        if forked:
            return {**env, _PAGE: page}
        if not self._is_there():
            return env
        others, directory = dict(env), str(self.directory)
        path = others.pop("PYTHONPATH", None)
        return {  # in this order, see `warm.steps`
            **others,
            "PYTHONPATH": f"{directory}{os.pathsep}{path}" if path else directory,
            _PAGE: page,
            "NVRX_TEMPLATE": "executed" if path is None else f"executed={path}",
        }

    def _is_there(self) -> bool:
        """Written again where a cleaner of temporary files has removed it."""
        with contextlib.suppress(OSError):
            if not (self.directory / f"{_HOOK}.py").exists():
                self.write()
            return True
        return False
