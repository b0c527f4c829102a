"""`nvrx health bundle` and `nvrx health install`: the hooks and what they need besides Python in one file.

The file is a zip archive that Python executes and imports from: `python3 -I -S FILE` is `nvrx`. It carries the whole
package, the packages of `_CARRIED` with their licences, and the scripts of the hooks.
"""

from __future__ import annotations

import compileall
import os
import sys
import tempfile
import zipapp
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from nvrx_slurm.errors import UsageError

_CARRIED = ("click", "pyyaml", "nvidia-ml-py")
# Folders and levels. Pythons of this version start what is compiled in a third of the time.
_COMPILED = {
    ".": 1,
    **{f"nvrx_slurm/{name}": 9 for name in ("health", "child", "system", "config")},
}
_MAIN = b"from nvrx_slurm.cli.toolbox import main\nmain()\n"
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_SCRIPTS = ("prolog", "epilog", "healthcheck", "hook.sh", "start.py")
_SETTINGS = "hooks.conf"
_FOLDER = "nvrx_slurm/share/prolog"


def write(output: str) -> int:
    """Write the bundle, executable; returns its size in bytes. Raises OSError, UsageError."""
    with tempfile.TemporaryDirectory() as made:
        for name, content in _contents():
            path = Path(made, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for folder, depth in _COMPILED.items():
            how: Any = {"legacy": True, "invalidation_mode": PycInvalidationMode.UNCHECKED_HASH}
            compileall.compile_dir(Path(made, folder), depth, quiet=2, stripdir=made, **how)
        zipapp.create_archive(made, output, compressed=True)
    os.chmod(output, 0o755)
    return os.path.getsize(output)


def install(folder: str) -> None:
    """Write the scripts of the hooks, and a hooks.conf for this Python and package where there is none."""
    place = Path(folder)
    place.mkdir(mode=0o755, parents=True, exist_ok=True)
    for name in _SCRIPTS:
        (place / name).write_bytes(_script(name))
        (place / name).chmod(0o755)
    settings = place / _SETTINGS
    if not settings.exists():
        here = f"PYTHON={sys.executable}\nPACKAGE={os.path.realpath(_ROOT)}\n"
        settings.write_bytes(_script(_SETTINGS) + here.encode())
        settings.chmod(0o644)


def _contents() -> Iterator[tuple[str, bytes]]:
    """Names in the archive, with their bytes."""
    yield "__main__.py", _MAIN
    for name in (*_SCRIPTS, _SETTINGS):
        yield f"{_FOLDER}/{name}", _script(name)
    for path in Path(_ROOT, "nvrx_slurm").rglob("*.*"):
        if path.suffix in (".py", ".txt", ".css") and _FOLDER not in str(path):
            yield str(path.relative_to(_ROOT)), path.read_bytes()
    for project in _CARRIED:
        files = metadata.files(project)
        if not files:
            raise UsageError(f"the files of {project} are not known; install it by pip in a venv")
        for file in files:
            if file.suffix == ".py" or file.name.startswith(("LICENSE", "COPYING")):
                yield str(file), file.read_binary()


def _script(name: str) -> bytes:
    """A file of the hooks, also from within a bundle."""
    loader: Any = __spec__.loader
    return bytes(loader.get_data(f"{_ROOT}/{_FOLDER}/{name}"))
