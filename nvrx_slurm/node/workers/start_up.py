"""What runs in a worker's interpreter before its script: the program of templates, and the count of steps."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from nvrx_slurm.system.files import WARM_NAME

_WARM = Path(__file__).parents[2] / "warm"
_PROGRAM = ("effects", "exact", "graph", "journal", "process", "rank", "steps", "template")  # nvrx_NAME in a worker
_HOOK = "sitecustomize.py"
_PAGE = "NVRX_PAGE"  # a variable that no script sees, see `warm.steps`


class StartUp:
    """The program's files, in a directory of their own below `private_dir`."""

    def __init__(self, private_dir: Path) -> None:
        self.directory = private_dir / WARM_NAME

    def write(self) -> None:
        """Raises OSError."""
        self.directory.mkdir(exist_ok=True)
        for name in _PROGRAM:
            (self.directory / f"nvrx_{name}.py").write_bytes((_WARM / f"{name}.py").read_bytes())
        (self.directory / _HOOK).write_bytes((_WARM / "hook.py").read_bytes())  # the last one: then all are there

    def environment(self, env: dict[str, str], page: str, forked: bool) -> dict[str, str]:
        """`env` of a worker, with what lets its start-up count steps in `page` (see `RankMonitor.page`)."""
        if forked:
            return {**env, _PAGE: page}
        if not self._is_there():
            return env
        path, directory = env.get("PYTHONPATH"), str(self.directory)
        others = {name: value for name, value in env.items() if name != "PYTHONPATH"}
        return {  # in this order, see `warm.steps`
            **others,
            "PYTHONPATH": f"{directory}{os.pathsep}{path}" if path else directory,
            _PAGE: page,
            "NVRX_TEMPLATE": "executed" if path is None else f"executed={path}",
        }

    def _is_there(self) -> bool:
        """Written again where a cleaner of temporary files has removed it."""
        with contextlib.suppress(OSError):
            if not (self.directory / _HOOK).exists():
                self.write()
            return True
        return False
