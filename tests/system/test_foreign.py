"""Files of others are read through no link, and nothing stays open."""

import os
from pathlib import Path

import pytest

from nvrx_slurm.system.foreign import last_bytes

pytestmark = pytest.mark.fast


def test_a_directory_instead_of_a_file_is_refused_and_not_left_open(tmp_path):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no regular file"):
        last_bytes(tmp_path, 1)
    assert os.listdir("/proc/self/fd") == before


def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(Path(tmp_path, "pipe"))
    with pytest.raises(OSError, match="no regular file"):
        last_bytes(tmp_path / "pipe", 1)
