"""What is kept on the node: never taken from files that others could write, and written as a whole or not at all."""

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from nvrx_slurm.health import kept
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.system.hardware import Absent

pytestmark = pytest.mark.fast


@pytest.fixture
def node(bare):
    bare.write("/proc/sys/kernel/random/boot_id", "one\n")
    return NodeView(str(bare.root), {})


@pytest.fixture
def file(node, tmp_path):
    """A file with one fact, in a directory of the agent's own: batch jobs have no /run/user/UID."""
    node.state_dir = str(tmp_path / "mine")
    kept.remember(node, "heavy", {"fact": 1})
    assert kept.recall(node, "heavy")["fact"] == 1
    return tmp_path / "mine/heavy.kept"


def _link(file):
    """To a file that would be believed at its own path."""
    file.rename(file.parent / "other")
    file.symlink_to("other")


def _fifo(file):
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    "damage",
    [
        lambda file: file.write_text("{"),
        lambda file: file.write_text("[]"),
        lambda file: file.write_text(json.dumps({"boot": "another", "fact": 1})),
        lambda file: file.chmod(0o666),
        _link,
        _fifo,
        pytest.param(
            lambda file: os.chown(file, 65534, 65534),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="chown needs root"),
        ),
    ],
)
def test_a_file_that_cannot_be_believed_is_ignored_and_replaced(node, file, damage):
    assert file.parent.stat().st_mode & 0o777 == 0o700 and file.stat().st_mode & 0o777 == 0o600
    damage(file)
    assert kept.recall(node, "heavy") == {}
    kept.remember(node, "heavy", {"fact": 2})
    assert kept.recall(node, "heavy")["fact"] == 2


@pytest.mark.parametrize("spoil", ["open", "link", "no /run"])
def test_a_directory_that_others_can_write_to_is_not_used(node, tmp_path, spoil):
    kept.remember(node, "heavy", {})
    (directory,) = Path(node.root).glob("run/**/nvrx-health")
    shutil.rmtree(directory if spoil != "no /run" else Path(node.root, "run"))
    if spoil == "open":
        directory.mkdir()
        directory.chmod(0o777)
    elif spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    for use in (lambda: kept.recall(node, "heavy"), lambda: kept.remember(node, "heavy", {})):
        with pytest.raises((OSError, Absent)):
            use()


def test_two_runs_count_one_after_the_other(node, file):
    """A thread that got through would answer within this time on any machine; one that waits never does."""
    found = []
    with open(f"{file.parent}/errors.kept.lock", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: found.append(kept.rises(node, "errors", {"a": 1}, 60.0)))
        second.start()
        second.join(0.2)
        assert not found and second.is_alive()
    second.join(60.0)
    assert found == [{}]
