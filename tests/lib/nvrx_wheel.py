"""The 0.7.0 wheel of nvidia-resiliency-ext and what its services need: real peers for contract tests.

`scripts/test` runs this file before pytest: it installs both once per machine, and prints a line for what pip cannot
get. Tests skip then.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

_PLACE = Path(tempfile.gettempdir()) / f"nvrx-wheel-0.7.0-{os.getuid()}"
_SERVICES = _PLACE.with_name(f"{_PLACE.name}-services")
_TARGET = ["--python-version", "3.12", "--platform", "manylinux_2_39_x86_64"]  # the only one there is
_WHEEL = ["download", "-q", "nvidia-resiliency-ext==0.7.0", *_TARGET, "--only-binary=:all:", "--no-deps", "-d"]
_NEEDED = ["fastapi", "uvicorn", "slowapi", "pydantic-settings", "httpx"]
_BOUND_S = 300


def unpacked():
    """A directory for PYTHONPATH. Skips the test where `scripts/test` could not install it."""
    return _found(_PLACE)


def services():
    """A directory for PYTHONPATH with what services of the wheel need. Skips the test where it is missing."""
    return _found(_SERVICES)


def _found(place):
    if not place.exists():
        pytest.skip(f"{place} is missing: python {__file__} makes it")
    return place


def _install(place, *words):
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        content = Path(name, "content")
        subprocess.run([sys.executable, "-m", "pip", *words, str(content)], stdout=2, timeout=_BOUND_S, check=True)
        for wheel in content.glob("nvidia_resiliency_ext-*.whl"):
            zipfile.ZipFile(wheel).extractall(content)
        content.rename(place)


if __name__ == "__main__":
    for there, *command in ((_PLACE, *_WHEEL), (_SERVICES, "install", "-q", *_NEEDED, "--target")):
        try:
            if not there.exists():
                _install(there, *command)
        except subprocess.SubprocessError as error:
            print(f"{there.name} ({type(error).__name__} of pip)")
