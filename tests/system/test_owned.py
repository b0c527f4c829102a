"""What another user has prepared in a log tree is not written to."""

import os

import pytest

from nvrx_slurm.node.output import strikes
from nvrx_slurm.system.owned import append_to, make

pytestmark = pytest.mark.fast


OTHER = 4242
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def _give(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if path.suffix == "" else path.touch()
    os.chown(path, OTHER, OTHER)


def _open_to_all(path):
    path.mkdir(parents=True)
    path.chmod(0o777)


def _fifo(path):
    path.parent.mkdir(parents=True)
    os.mkfifo(path)


def _link(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("../../../keys" if path.suffix else "/")


@pytest.mark.parametrize(
    "prepare, place, why",
    [
        *[pytest.param(_give, place, "uid 4242", marks=needs_root) for place in ("7", "7/r0", "7/r0/x.log")],
        *[(_open_to_all, place, "every user can change") for place in ("", "7", "7/r0")],
        *[(_link, place, "link") for place in ("7", "7/r0", "7/r0/x.log")],
        (_fifo, "7/r0/x.log", "No such device"),
    ],
)
def test_a_prepared_place_is_refused(tmp_path, prepare, place, why):
    (tmp_path / "keys").write_text("mine\n")
    prepare(tmp_path / "logs" / place)
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    with pytest.raises(OSError, match=why):
        os.write(append_to(tmp_path / "logs/7/r0/x.log", 3), b"ours\n")
    assert (tmp_path / "keys").read_text() == "mine\n"
    assert all(path.lstat().st_size == found.st_size for path, found in before.items() if not path.is_dir())


def test_what_is_ours_is_made_and_appended_to(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs").chmod(0o1777)
    (tmp_path / "latest").symlink_to("logs")  # the user's own word
    before = os.umask(0)
    try:
        for _ in range(2):
            fd = append_to(tmp_path / "latest/7/r0/x.log", 3)
            os.write(fd, b"x\n")
            assert os.get_blocking(fd)
            os.close(fd)
    finally:
        os.umask(before)
    assert (tmp_path / "logs/7/r0/x.log").read_text() == "x\nx\n"
    assert not any(path.stat().st_mode & 0o002 for path in (tmp_path / "logs").rglob("*"))


def test_a_file_system_that_keeps_no_owners_has_no_other_users(tmp_path, monkeypatch):
    """For example a bucket, or NFS where root is nobody: what we make there looks as if another one had made it."""
    stat = os.fstat
    monkeypatch.setattr(os, "fstat", lambda fd: os.stat_result([*stat(fd)[:4], OTHER, *stat(fd)[5:10]]))
    make(tmp_path / "7/r0", 2)
    os.close(append_to(tmp_path / "7/r0/x.log", 3))
    assert [path.name for path in (tmp_path / "7/r0").iterdir()] == ["x.log"]


def test_strikes_follow_no_link(tmp_path):
    (tmp_path / "strikes.jsonl").symlink_to("keys")
    with pytest.raises(OSError, match="symbolic"):
        strikes.add(tmp_path, "n1", "7", "x")
    assert not (tmp_path / "keys").exists()
