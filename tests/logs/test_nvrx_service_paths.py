"""To which files a foreign client of the gRPC log service may append."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nvrx_slurm.logs.nvrx_service import Service


def opened(root: Path, name: str) -> bool:
    files: dict[str, int] = {}
    try:
        Service([str(root)])._open(str(root / name), files)
    except ValueError:
        return False
    finally:
        for fd in files.values():
            os.close(fd)
    return True


@pytest.mark.parametrize("name", [".ssh/authorized_keys", ".bashrc", "slurm.sh", "rank_0.err", ".x/a.log", "../a.log"])
def test_only_logs_are_written(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    assert not opened(root, name)
    assert list(root.rglob("*")) == []


def test_a_file_that_was_there_before_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.log").write_text("mine")
    assert not opened(tmp_path, "mine.log")
    assert opened(tmp_path, "theirs/a.log") and opened(tmp_path, "theirs/a.log")  # also after a restart of the service
    (tmp_path / "link.log").symlink_to(tmp_path / "mine.log")
    assert not opened(tmp_path, "link.log")
