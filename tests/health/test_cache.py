"""Results of heavy checks: shared by runs side by side, aged, and never taken from what is not ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import BOUND_S, Node

from nvrx_slurm.health import cache

UID = os.geteuid()


class Heavy:
    """A node with an own check that counts how often it really runs, with a result that may be an hour old."""

    def __init__(self, dgx: Node, tmp_path: Path, code: int = 0, seconds: float = 0) -> None:
        self.dgx, self.runs = dgx, tmp_path / "runs"
        file = tmp_path / "heavy.sh"
        file.write_text(f"#!/bin/sh\necho run >> {self.runs}\nsleep {seconds}\necho fine; exit {code}\n")
        file.chmod(0o755)
        own = {"name": "heavy", "run": str(file), "reuse": 3600, "budget": BOUND_S}
        self.config = dgx.site(own=[own], deadlines={"manual": BOUND_S})
        self.directory = dgx / ("/run/nvrx-health" if UID == 0 else f"/run/user/{UID}/nvrx-health")
        self.file = self.directory / "heavy.json"

    def run(self) -> tuple[str, float, list[str]]:
        """(text, age, notes)."""
        _, report = self.dgx.program("--only", "heavy", "--config", self.config)
        return report.findings[0].text, report.findings[0].age_s, report.notes

    def count(self) -> int:
        return len(self.runs.read_text().splitlines())


@pytest.fixture
def heavy(dgx: Node, tmp_path: Path) -> Heavy:
    return Heavy(dgx, tmp_path)


def test_a_result_is_used_again_and_has_an_age(heavy: Heavy) -> None:
    assert heavy.run() == ("fine", 0.0, [])
    text, age_s, notes = heavy.run()
    assert (text, notes, heavy.count()) == ("fine", [], 1)
    assert 0 < age_s < 3600
    assert heavy.directory.stat().st_mode & 0o777 == 0o700
    assert heavy.file.stat().st_mode & 0o777 == 0o600


def test_of_many_runs_at_once_one_does_the_work(dgx: Node, tmp_path: Path) -> None:
    heavy = Heavy(dgx, tmp_path, seconds=1)
    processes = [dgx.start("--only", "heavy", "--config", heavy.config) for _ in range(16)]
    outputs = [process.communicate(timeout=2 * BOUND_S) for process in processes]
    assert {process.returncode for process in processes} == {0}, outputs
    assert heavy.count() == 1


def test_unknown_is_kept_only_for_those_who_waited(dgx: Node, tmp_path: Path) -> None:
    heavy = Heavy(dgx, tmp_path, code=2, seconds=1)
    processes = [dgx.start("--only", "heavy", "--config", heavy.config) for _ in range(2)]
    for process in processes:
        process.communicate(timeout=BOUND_S)
        assert process.returncode == 3
    once = heavy.count()
    heavy.run()
    assert heavy.count() == once + 1


def test_a_holder_that_dies_lets_the_lock_go(heavy: Heavy) -> None:
    heavy.run()
    heavy.file.unlink()
    lock = os.open(heavy.directory / "heavy.lock", os.O_WRONLY)
    import fcntl

    fcntl.flock(lock, fcntl.LOCK_EX)
    _, report = heavy.dgx.program("--only", "heavy", "--config", heavy.config, "--deadline", "0.5")
    assert report.findings[0].text.endswith("waiting for another run of it to end")
    os.close(lock)
    assert heavy.run()[0] == "fine"


def _edited(**new: object) -> Callable[[Heavy], None]:
    def edit(heavy: Heavy) -> None:
        kept = json.loads(heavy.file.read_text())
        heavy.file.write_text(json.dumps(kept | new))

    return edit


def _text(text: str) -> Callable[[Heavy], None]:
    return lambda heavy: heavy.file.write_text(text) and None


def _link(heavy: Heavy) -> None:
    """To a file that would do, were it there itself."""
    heavy.file.rename(heavy.directory / "other.json")
    heavy.file.symlink_to("other.json")


def _owned(heavy: Heavy) -> None:
    os.chown(heavy.file, 65534, 65534)


def _fifo(heavy: Heavy) -> None:
    heavy.file.unlink()
    os.mkfifo(heavy.file, 0o600)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_text("{"), "it is damaged"),
        (_text(""), "it is damaged"),
        (_text("[]"), "it is damaged"),
        (_text("[" * 5000), "it is damaged"),
        (_text("\0" * 70000), "it is longer than 65536 bytes"),
        (_edited(verdict="well"), "it is damaged"),
        (_edited(at_s="soon"), "it is damaged"),
        (_edited(at_s=float("nan")), "it is from the future"),
        (_edited(at_s=1e12), "it is from the future"),
        (_edited(boot="another"), ""),
        (_edited(asked="something else"), ""),
        (_edited(at_s=-7200.0), ""),  # two hours before boot: too old
        (lambda heavy: heavy.file.chmod(0o666), "not a file that only its owner"),
        (_link, "Too many levels of symbolic links"),
        (_fifo, "not a file that only its owner"),
        pytest.param(
            _owned, "not a file that only its owner", marks=pytest.mark.skipif(UID != 0, reason="chown needs root")
        ),
    ],
)
def test_what_cannot_be_trusted_is_ignored_said_once_and_replaced(
    heavy: Heavy, damage: Callable[[Heavy], None], said: str
) -> None:
    heavy.run()
    damage(heavy)
    text, age_s, notes = heavy.run()
    assert (text, age_s, heavy.count()) == ("fine", 0.0, 2)
    assert len(notes) == bool(said) and said in "".join(notes)
    assert heavy.run()[2] == []
    assert heavy.count() == 2, "it was not replaced by a good one"


def test_a_directory_that_others_can_write_to_is_not_used(heavy: Heavy) -> None:
    heavy.directory.mkdir()
    heavy.directory.chmod(0o777)
    text, _, (note,) = heavy.run()
    assert text == "fine"
    assert "not a directory that only its owner" in note
    assert list(heavy.directory.iterdir()) == []


def test_a_directory_that_is_a_link_is_not_used(heavy: Heavy, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    heavy.directory.symlink_to(tmp_path / "elsewhere")
    _, _, (note,) = heavy.run()
    assert "not a directory that only its owner" in note
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_without_a_place_everybody_runs_and_it_is_said(heavy: Heavy) -> None:
    shutil.rmtree(heavy.directory.parent)
    assert heavy.run()[0] == "fine"
    _, _, (note,) = heavy.run()
    assert "results are not kept on this node" in note
    assert heavy.count() == 2


def test_a_place_of_ones_own(heavy: Heavy, tmp_path: Path) -> None:
    """Agents have one: batch jobs have no /run/user/UID."""
    args = ("--only", "heavy", "--config", heavy.config, "--state-dir", str(tmp_path / "mine"))
    for _ in range(2):
        heavy.dgx.program(*args)
    assert heavy.count() == 1
    assert (tmp_path / "mine" / "heavy.json").exists() and not heavy.file.exists()
    (tmp_path / "mine").chmod(0o777)
    _, report = heavy.dgx.program(*args)
    assert "not a directory that only its owner" in report.notes[0]


def test_a_full_disk_costs_only_the_reuse(heavy: Heavy, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full takes nothing: a real "No space left on device"."""
    heavy.directory.mkdir(mode=0o700)
    with pytest.raises(OSError, match="No space left"):
        real_open = os.open
        monkeypatch.setattr(os, "open", lambda path, *rest: real_open("/dev/full", os.O_WRONLY))
        cache.write_private(str(heavy.file), {"a": 1})
    monkeypatch.undo()
    assert not heavy.file.exists()


_NEARLY_FULL = """
import os, resource, sys
from nvrx_slurm.health import cache
path = sys.argv[1]
cache.write_private(path, "good")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    cache.write_private(path, "x" * 5000)
except OSError as error:
    print("refused:", error.strerror)
print(cache.read_private(path), os.listdir(os.path.dirname(path)))
"""


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """Of what has no room the kernel takes a part, and refuses the rest."""
    argv = [sys.executable, "-c", _NEARLY_FULL, str(tmp_path / "kept")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=BOUND_S, check=True)
    assert done.stdout == "refused: File too large\ngood ['kept']\n"
