"""The agent's private directory: unguessable, ours alone, and cleared away after an owner that was killed."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import files
from nvrx_slurm.system.files import PrivateDir

OWNER = """
import os, socket, sys
from nvrx_slurm.system.files import PrivateDir
made = PrivateDir()
socket.socket(socket.AF_UNIX).bind(str(made.path / "socket"))
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="nvrx-fs-") as short:  # pytest's own are too long for a socket
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(short)


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def test_it_is_private_and_goes_with_its_owner(base: Path) -> None:
    made = PrivateDir()
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert made.path.parent == base
    made.remove()
    assert list(base.iterdir()) == []


def test_a_killed_owners_directory_is_swept_and_a_living_ones_is_not(base: Path) -> None:
    living, kept = start_owner()
    killed, left = start_owner()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=10)
        assert left.is_dir()
        mine = PrivateDir()
        assert not left.exists()
        assert (kept / "socket").exists()
        mine.remove()
    finally:
        living.communicate("", timeout=10)


def test_what_others_could_have_put_there_is_left_alone(base: Path) -> None:
    (base / "nvrx-agent-file").write_text("not a directory")
    (base / "nvrx-agent-open").mkdir(mode=0o777)
    (base / "nvrx-agent-open").chmod(0o777)
    (base / "target").mkdir(mode=0o700)
    (base / "nvrx-agent-link").symlink_to(base / "target")
    names = {"nvrx-agent-file", "nvrx-agent-link", "nvrx-agent-open", "target"}
    # A person's own, also of mode 0700: data is never taken for ours, whatever the directory is called.
    for mine in ("nvrx-experiment", "nvrx-agent-results", "nvrx-mc-x"):
        (base / mine).mkdir(mode=0o700)
        (base / mine / "weights.pt").write_text("precious")
    PrivateDir().remove()
    assert {p.name for p in base.iterdir()} == names | {"nvrx-experiment", "nvrx-agent-results", "nvrx-mc-x"}
    assert len(list(base.rglob("weights.pt"))) == 3


def test_a_tmpdir_too_long_for_a_socket_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    made = PrivateDir()
    try:
        assert made.path.parent in (Path("/tmp"), Path("/dev/shm"))
        assert stat.S_IMODE(made.path.stat().st_mode) == 0o700 and list(long.iterdir()) == []
    finally:
        made.remove()
    monkeypatch.setattr(files, "_SHORT", (str(base / "missing"), "/dev/shm"))
    second = PrivateDir()
    second.remove()
    assert second.path.parent == Path("/dev/shm")
    monkeypatch.setattr(files, "_SHORT", (str(base / "missing"),))
    with pytest.raises(UsageError, match="too long for a Unix socket.*set a TMPDIR that is short"):
        PrivateDir()
