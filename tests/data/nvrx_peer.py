"""NVRx 0.7.0 as a real peer: its wheel unpacked, with what its services need, in a folder that is made once.

The wheel is for Python 3.12, but the services run on others: the native module is not imported. NVRX_PEER names the
folder; without it, it is below ~/.cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from nvrx_slurm.system.files import file_lock

VERSION = "0.7.0"
_WHEEL = (f"nvidia-resiliency-ext=={VERSION}", "--no-deps", "--only-binary=:all:", "--python-version=3.12",
          "--platform=manylinux_2_39_x86_64")  # fmt: skip
_NEEDS = ("fastapi", "uvicorn", "slowapi", "pydantic-settings", "httpx", "grpcio", "protobuf")
_DONE = "complete"


def folder() -> Path:
    """The folder for PYTHONPATH, of a run in its own interpreter. Raises LookupError with the reason."""
    home = Path(os.environ.get("NVRX_PEER") or Path.home() / ".cache" / "nvrx_slurm" / f"peer-{VERSION}")
    try:
        home.mkdir(parents=True, exist_ok=True)
        with file_lock(home / "lock", 600.0):
            if not (home / _DONE).exists():
                _make(home)
    except (OSError, subprocess.SubprocessError) as error:
        raise LookupError(f"the wheel of NVRx {VERSION} cannot be had: {error}") from None
    return home


def _make(home: Path) -> None:
    _pip("download", "-d", str(home), *_WHEEL)
    (wheel,) = home.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home)
    _pip("install", "--target", str(home), *_NEEDS)
    (home / _DONE).touch()


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
