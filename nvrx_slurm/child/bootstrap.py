"""The command line of a helper program of ours: an interpreter that finds this package, and nothing of the user's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[2])
PROGRAM = (
    f"import sys; sys.path[:0] = sys.argv.pop(1).split({os.pathsep!r});"
    " from {module} import main; sys.exit(main(sys.argv[1:]))"
)


def command(module: str, *arguments: str, libraries: bool = True) -> list[str]:
    """Runs `main(arguments)` of one of our modules.

    `libraries`: with our own import paths, because packages may come by PYTHONPATH; without, it starts faster.
    """
    paths = [_ROOT, *(path for path in sys.path if os.path.isabs(path))] if libraries else [_ROOT]
    flags = ["-I"] if libraries else ["-I", "-S"]
    return [
        sys.executable, *flags, "-c", PROGRAM.format(module=module), os.pathsep.join(dict.fromkeys(paths)), *arguments
    ]  # fmt: skip
