"""The 0.7.0 wheel of nvidia-resiliency-ext, unpacked once per machine: real peers for contract tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import pytest

_PLACE = Path(tempfile.gettempdir()) / f"nvrx-wheel-0.7.0-{os.getuid()}"
_TARGET = ["--python-version", "3.12", "--platform", "manylinux_2_39_x86_64"]  # the only one there is
_DOWNLOAD = ["download", "-q", "nvidia-resiliency-ext==0.7.0", *_TARGET]


@cache
def unpacked() -> Path:
    """A directory for PYTHONPATH. Skips the test, with the reason, where the wheel cannot be had."""
    if not _PLACE.exists():
        with tempfile.TemporaryDirectory(dir=_PLACE.parent) as name:
            command = [sys.executable, "-m", "pip", *_DOWNLOAD, "--only-binary=:all:", "--no-deps", "-d", name]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            except subprocess.TimeoutExpired:
                pytest.skip("pip does not get the 0.7.0 wheel of nvidia-resiliency-ext within 60 s")
            wheels = list(Path(name).glob("*.whl"))
            if not wheels:
                pytest.skip(f"pip cannot get the 0.7.0 wheel of nvidia-resiliency-ext: {done.stderr[-200:]}")
            content = Path(name) / "content"
            zipfile.ZipFile(wheels[0]).extractall(content)
            if not _PLACE.exists():  # another worker was faster
                content.rename(_PLACE)
    return _PLACE


@cache
def needs(*packages: str) -> Path:
    """A directory for PYTHONPATH with what services of the wheel need. Skips the test where that cannot be had."""
    place = _PLACE.with_name(f"{_PLACE.name}-{'-'.join(packages)}")
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as name:
            command = [sys.executable, "-m", "pip", "install", "-q", "--target", f"{name}/content", *packages]
            try:
                subprocess.run(command, capture_output=True, timeout=300, check=True)
            except subprocess.SubprocessError as error:
                pytest.skip(f"pip cannot get {packages} for the services of the wheel: {error}")
            if not place.exists():
                Path(name, "content").rename(place)
    return place
