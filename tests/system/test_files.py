"""Atomic writes, bounded calls, and the agent's private directory, which is swept after its owner was killed."""

import asyncio
import errno
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import bounded, files
from nvrx_slurm.system.files import PrivateDir, write_atomic

pytestmark = pytest.mark.fast


OWNER = """
import os, socket, sys
from nvrx_slurm.system.files import PrivateDir
made = PrivateDir()
socket.socket(socket.AF_UNIX).bind(str(made.path / "socket"))
(made.path / "warm").mkdir()
(made.path / "warm" / "sitecustomize.py").touch()
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path_factory):
    tmp_path_factory.getbasetemp()  # pytest makes it once, in TMPDIR
    with tempfile.TemporaryDirectory(prefix="nvrx-fs-") as short:  # pytest's own are too long for a socket
        monkeypatch.setenv("TMPDIR", short)
        monkeypatch.setattr("tempfile.tempdir", None)
        yield Path(short)


def start_owner():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return owner, Path(owner.stdout.readline().strip())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_not_replaced(tmp_path):
    """As root, nvrx report -o /dev/null would leave the machine without it."""
    os.mknod(tmp_path / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    with pytest.raises(OSError, match="device"):
        files.write_atomic(tmp_path / "null", b"x")
    assert (tmp_path / "null").is_char_device() and len(list(tmp_path.iterdir())) == 1


def test_a_killed_owners_directory_is_swept_and_a_living_ones_is_not(base):
    living, kept = start_owner()
    killed, left = start_owner()
    try:
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate(timeout=10)
        assert left.is_dir()
        mine = PrivateDir()
        assert mine.path.parent == base and stat.S_IMODE(mine.path.stat().st_mode) == 0o700
        assert not left.exists() and (kept / "socket").exists()
        mine.remove()
        assert not mine.path.exists()
    finally:
        living.communicate("", timeout=10)


def test_what_others_could_have_put_there_is_left_alone(base):
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


def test_a_tmpdir_too_long_for_a_socket_is_not_used(base, monkeypatch):
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    made = PrivateDir()
    try:
        assert made.path.parent in (Path("/tmp"), Path("/dev/shm"))
        assert list(long.iterdir()) == []
    finally:
        made.remove()
    monkeypatch.setattr(files, "_SHORT", (str(base / "missing"),))
    with pytest.raises(UsageError, match="too long for a Unix socket"):
        PrivateDir()


def test_a_tmpdir_in_which_any_user_renames_what_is_there_goes_last(base, monkeypatch):
    (base / "own").mkdir(0o700)
    base.chmod(0o777)
    for place in (base, base / "own"):
        monkeypatch.setenv("TMPDIR", str(place))
        made = PrivateDir()
        made.remove()
        assert made.path.parent == Path("/tmp")
    monkeypatch.setenv("TMPDIR", str(base))
    base.chmod(0o1777)
    made = PrivateDir()
    made.remove()
    assert made.path.parent == base
    base.chmod(0o777)
    monkeypatch.setattr(files, "_SHORT", ())
    made = PrivateDir()
    made.remove()
    assert made.path.parent == base


def test_a_file_system_without_flock_is_passed_over(base, monkeypatch):
    """As on Lustre that is mounted without -o flock: $TMPDIR there is not usable, /dev/shm is."""
    refused = []

    def no_flock(path):
        if path.is_relative_to(base):
            refused.append(path)
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path)

    real = files.lock_directory
    monkeypatch.setattr(files, "lock_directory", no_flock)
    made = PrivateDir()
    made.remove()
    assert len(refused) == 1 and not made.path.is_relative_to(base) and list(base.iterdir()) == []
    monkeypatch.setattr(files, "_SHORT", ())
    with pytest.raises(UsageError, match="not supported"):
        PrivateDir()


def test_a_file_is_replaced_as_a_whole(base):
    path = base / "file"
    write_atomic(path, b"old", mode=0o600)
    with path.open("rb") as reader:
        write_atomic(path, b"new" * 100_000)
        assert reader.read() == b"old"
    assert path.read_bytes() == b"new" * 100_000 and stat.S_IMODE(path.stat().st_mode) == 0o644
    with pytest.raises(OSError):
        write_atomic(base, b"a directory is in the way")
    assert list(base.iterdir()) == [path]  # no temporary file is left


def test_a_call_that_does_not_return_is_abandoned():
    release = threading.Event()

    async def three():
        slow = asyncio.ensure_future(bounded.call_async(release.wait, 0.05, "slow"))
        quick = await bounded.call_async(lambda: 7, 10.0, "quick")
        with pytest.raises(KeyError):
            await bounded.call_async(lambda: {}["x"], 10.0, "broken")
        return [quick, *await asyncio.gather(slow, return_exceptions=True)]

    quick, slow = asyncio.run(three())
    assert quick == 7 and isinstance(slow, bounded.Overrun)
    with pytest.raises(bounded.Overrun, match="slow"):
        bounded.call(release.wait, 0.05, "slow")
    release.set()
