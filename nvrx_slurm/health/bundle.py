"""`nvrx health bundle` and `nvrx health install`: the hooks and what they need besides Python in one file.

The file is a zip archive that Python executes and imports from: `python3 -I -S FILE` is `nvrx`. It carries the whole
package, the packages of `_CARRIED` with their licences, and the scripts of the hooks.
"""

from __future__ import annotations

import compileall
import io
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
from nvrx_slurm.system.files import write_atomic

_CARRIED = ("click", "pyyaml", "nvidia-ml-py")
# Folders and levels. Pythons of this version start what is compiled in a third of the time.
_COMPILED = {
    ".": 1,
    **{f"nvrx_slurm/{name}": 9 for name in ("health", "child", "system", "config")},
}
_MAIN = b"""import sys
if sys.version_info < (3, 10):
    sys.exit("nvrx needs Python 3.10 or later, not " + sys.version.split()[0])
from nvrx_slurm.cli.toolbox import main
main()
"""
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_SCRIPTS = ("prolog", "epilog", "healthcheck", "hook.sh", "start.py")
_SETTINGS = "hooks.conf"
_FOLDER = "nvrx_slurm/share/prolog"


def write(output: str) -> int:
    """Write the bundle, executable; returns its size in bytes."""
    with tempfile.TemporaryDirectory() as made:
        for name, content in _contents():
            path = Path(made, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for folder, depth in _COMPILED.items():
            how: Any = {"legacy": True, "invalidation_mode": PycInvalidationMode.UNCHECKED_HASH}
            compileall.compile_dir(Path(made, folder), depth, quiet=2, stripdir=made, **how)
        whole = io.BytesIO()
        zipapp.create_archive(made, whole, compressed=True)
    _write(output, whole.getvalue(), 0o755)
    return len(whole.getvalue())


def install(folder: str) -> bool:
    """Write the scripts of the hooks, and a hooks.conf for this Python and package where there is none. Whether there
    was none. Hooks that run meanwhile keep the script with which they began."""
    for name in _SCRIPTS:
        _write(f"{folder}/{name}", _script(name), 0o755)
    settings = f"{folder}/{_SETTINGS}"
    if os.path.lexists(settings):
        return False
    here = f"PYTHON={sys.executable}\nPACKAGE={os.path.realpath(_ROOT)}\n"
    _write(settings, _script(_SETTINGS) + here.encode(), 0o644)
    return True


def _write(path: str, content: bytes, mode: int) -> None:
    try:
        os.makedirs(os.path.dirname(path) or ".", 0o755, exist_ok=True)
        write_atomic(path, content, mode)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from None


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
