"""What is kept on the node: never taken from files that others could write, and written as a whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import BOUND_S, Node

from nvrx_slurm.child import bounded_process
from nvrx_slurm.health import cache
from nvrx_slurm.health.check import NodeView
from nvrx_slurm.health.checks import counters

UID = os.geteuid()


@pytest.fixture
def node(bare: Node) -> NodeView:
    bare.write("/proc/sys/kernel/random/boot_id", "one\n")
    return NodeView(str(bare.root), {})


@pytest.fixture
def kept(node: NodeView) -> Path:
    """A file with one fact."""
    counters.remember(node, "heavy", {"fact": 1})
    assert counters.recall(node, "heavy")["fact"] == 1
    return Path(cache.private_directory(node), "heavy.kept")


def _link(file: Path) -> None:
    """To a file that would be believed at its own path."""
    file.rename(file.parent / "other")
    file.symlink_to("other")


def _fifo(file: Path) -> None:
    file.unlink()
    os.mkfifo(file, 0o600)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: file.write_text("{"), "damaged"),
        (lambda file: file.chmod(0o666), "only its owner"),
        (_link, "symbolic links"),
        (_fifo, "only its owner"),
        pytest.param(
            lambda file: os.chown(file, 65534, 65534),
            "only its owner",
            marks=pytest.mark.skipif(UID != 0, reason="chown needs root"),
        ),
    ],
)
def test_a_file_that_cannot_be_trusted_is_ignored_and_replaced(
    node: NodeView, kept: Path, damage: Callable[[Path], object], said: str
) -> None:
    assert kept.parent.stat().st_mode & 0o777 == 0o700 and kept.stat().st_mode & 0o777 == 0o600
    damage(kept)
    with pytest.raises(cache.Unusable, match=said):
        cache.read_private(str(kept))
    assert counters.recall(node, "heavy") == {}
    counters.remember(node, "heavy", {"fact": 2})
    assert counters.recall(node, "heavy")["fact"] == 2


def test_nothing_of_another_boot_is_recalled(node: NodeView, kept: Path) -> None:
    for text in ("[]", json.dumps({"boot": "another", "fact": 1})):
        kept.write_text(text)
        assert counters.recall(node, "heavy") == {}


@pytest.mark.parametrize("spoil", ["open", "link", "gone"])
def test_a_directory_that_others_can_write_to_is_not_used(node: NodeView, tmp_path: Path, spoil: str) -> None:
    directory = Path(cache.private_directory(node))
    directory.rmdir()
    if spoil == "open":
        directory.mkdir()
        directory.chmod(0o777)
    elif spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(tmp_path / "elsewhere")
    else:
        shutil.rmtree(directory.parent)
    with pytest.raises(cache.Unusable):
        cache.private_directory(node)


def test_an_agent_has_a_directory_of_its_own(node: NodeView, tmp_path: Path) -> None:
    """Batch jobs have no /run/user/UID."""
    node.state_dir = str(tmp_path / "mine")
    counters.remember(node, "heavy", {"fact": 1})
    assert [file.name for file in (tmp_path / "mine").iterdir()] == ["heavy.kept"]


def test_one_that_waits_for_another_look_says_so(node: NodeView, kept: Path) -> None:
    def hold(pipe: int) -> None:
        with counters.alone(node, "heavy"):
            os.write(pipe, b"held")
            signal.pause()

    holder = bounded_process.fork(hold, BOUND_S)
    bounded_process.wait([holder.stdout.fd], float("inf"))
    waiter = bounded_process.fork(lambda pipe: counters.alone(node, "heavy").__enter__(), 0.3)
    assert waiter.finish().code is None
    holder.end()
    with counters.alone(node, "heavy"):
        assert counters.recall(node, "heavy")["fact"] == 1


def test_a_file_is_written_whole_or_not_at_all(node: NodeView, kept: Path) -> None:
    """RLIMIT_FSIZE takes a part of the file and refuses the rest, as a full disk does."""

    def limited(pipe: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        counters.remember(node, "heavy", {"fact": "x" * 5000})

    assert bounded_process.fork(limited, BOUND_S).finish().code == 1
    assert counters.recall(node, "heavy")["fact"] == 1
    assert kept in list(kept.parent.iterdir()) and not list(kept.parent.glob(".*"))
