"""Results of heavy checks: shared by runs side by side, aged, and never taken from files that others could write."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from recorded import BOUND_S, Node, P, U

from nvrx_slurm.health import cache
from nvrx_slurm.health.check import Check, NodeView, Verdict
from nvrx_slurm.health.runner import run as run_checks
from nvrx_slurm.system import bounded_process, files

UID = os.geteuid()


class Heavy:
    """A check that counts how often it really runs, with a result that may be an hour old."""

    def __init__(self, bare: Node) -> None:
        self.node = NodeView(str(bare.root), {})
        self.directory = bare / ("/run/nvrx-health" if UID == 0 else f"/run/user/{UID}/nvrx-health")
        self.file = self.directory / "heavy.json"
        self.runs = 0
        self.verdict = P
        self.check = Check("heavy", "nothing", "Never.", lambda *_: 0, lambda *_: (P, ""), reuse_s=3600.0)

    def run(self) -> tuple[str, float, list[str]]:
        """(text, began_s, notes)."""

        def work() -> tuple[Verdict, str]:
            self.runs += 1
            return self.verdict, "fine"

        kept = cache.through(self.check, self.node, {}, work)
        return kept.text, kept.began_s, kept.notes


@pytest.fixture
def heavy(bare: Node) -> Heavy:
    bare.write("/proc/sys/kernel/random/boot_id", "one\n")
    return Heavy(bare)


def test_a_result_is_used_again_until_it_is_too_old(heavy: Heavy, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr(cache, "now_s", lambda: now_s[0])
    assert heavy.run() == ("fine", 1000.0, [])
    for at_s, runs in ((1001.0, 1), (4600.0, 1), (4601.0, 2), (4700.0, 2)):
        now_s[0] = at_s
        assert heavy.run()[2] == [] and heavy.runs == runs, at_s
    assert heavy.directory.stat().st_mode & 0o777 == 0o700
    assert heavy.file.stat().st_mode & 0o777 == 0o600
    heavy.check = heavy.check._replace(reuse_s=0.0)
    heavy.run()
    assert heavy.runs == 3


def test_its_age_is_in_the_finding(heavy: Heavy) -> None:
    for _ in range(2):
        (finding,) = run_checks([heavy.check], heavy.node, {}, BOUND_S).findings
    assert finding.verdict is P and 0 < finding.age_s < BOUND_S


def test_of_many_runs_at_once_one_does_the_work(heavy: Heavy, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")

    def work() -> tuple[Verdict, str]:
        (tmp_path / "runs").open("a").write("run\n")
        (tmp_path / "go").read_text()
        return P, "fine"

    children = [
        bounded_process.fork(lambda pipe: cache.through(heavy.check, heavy.node, {}, work), BOUND_S) for _ in range(8)
    ]
    with (tmp_path / "go").open("w"):  # one reads it; the others wait for the lock, or have not begun
        pass
    assert [child.finish().code for child in children] == [0] * 8
    assert (tmp_path / "runs").read_text() == "run\n"


def test_unknown_is_kept_only_for_those_who_waited(heavy: Heavy, monkeypatch: pytest.MonkeyPatch) -> None:
    heavy.verdict = U
    now_s = [1000.0]
    monkeypatch.setattr(cache, "now_s", lambda: now_s[0])
    heavy.run()
    heavy.run()  # came before it began
    assert heavy.runs == 1
    now_s[0] = 1000.1
    heavy.run()
    assert heavy.runs == 2


def test_a_holder_that_dies_releases_the_lock(heavy: Heavy) -> None:
    heavy.run()
    heavy.file.unlink()

    def hold(pipe: int) -> None:
        with files.file_lock(heavy.directory / "heavy.lock", BOUND_S):
            os.write(pipe, b"held")
            signal.pause()

    holder = bounded_process.fork(hold, BOUND_S)
    bounded_process.wait([holder.stdout.fd], time.monotonic() + BOUND_S)
    (finding,) = run_checks([heavy.check], heavy.node, {}, 0.5).findings
    assert finding.verdict is U and finding.text.endswith("waiting for another run of it to end")
    holder.end()
    assert heavy.run()[0] == "fine"


def _edited(**new: object) -> Callable[[Heavy], object]:
    return lambda heavy: heavy.file.write_text(json.dumps(json.loads(heavy.file.read_text()) | new))


def _text(text: str) -> Callable[[Heavy], object]:
    return lambda heavy: heavy.file.write_text(text)


def _link(heavy: Heavy) -> None:
    """To a file that would be believed at its own path."""
    heavy.file.rename(heavy.directory / "other.json")
    heavy.file.symlink_to("other.json")


def _fifo(heavy: Heavy) -> None:
    heavy.file.unlink()
    os.mkfifo(heavy.file, 0o600)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_text("{"), "damaged"),
        (_text(""), "damaged"),
        (_text("[]"), "damaged"),
        (_text("[" * 5000), "damaged"),
        (_text("\0" * (cache.MAX_FILE_BYTES + 1)), "longer than"),
        (_edited(verdict="well"), "damaged"),
        (_edited(began_s="soon"), "damaged"),
        (_edited(began_s=float("nan")), "from the future"),
        (_edited(began_s=1e12), "from the future"),
        (_edited(boot="another"), ""),
        (_edited(asked="something else"), ""),
        (_edited(began_s=-7200.0), ""),  # two hours before boot: too old
        (lambda heavy: heavy.file.chmod(0o666), "only its owner"),
        (_link, "symbolic links"),
        (_fifo, "only its owner"),
        pytest.param(
            lambda heavy: os.chown(heavy.file, 65534, 65534),
            "only its owner",
            marks=pytest.mark.skipif(UID != 0, reason="chown needs root"),
        ),
    ],
)
def test_a_file_that_cannot_be_trusted_is_ignored_said_once_and_replaced(
    heavy: Heavy, damage: Callable[[Heavy], object], said: str
) -> None:
    heavy.run()
    damage(heavy)
    text, _, notes = heavy.run()
    assert (text, heavy.runs) == ("fine", 2)
    assert len(notes) == bool(said) and said in "".join(notes)
    assert heavy.run()[2] == []
    assert heavy.runs == 2, "it was not replaced by a good one"


@pytest.mark.parametrize("spoil", ["open", "link", "gone", "file"])
def test_without_a_usable_directory_each_process_runs(heavy: Heavy, tmp_path: Path, spoil: str) -> None:
    if spoil == "open":
        heavy.directory.mkdir()
        heavy.directory.chmod(0o777)
    elif spoil == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        heavy.directory.symlink_to(tmp_path / "elsewhere")
    elif spoil == "gone":
        shutil.rmtree(heavy.directory.parent)
    else:
        heavy.directory.write_text("")
    for runs in (1, 2):
        text, _, (note,) = heavy.run()
        assert (text, heavy.runs) == ("fine", runs) and "are not kept" in note
    assert not list(tmp_path.glob("elsewhere/*")) and not list(heavy.directory.glob("*"))


def test_an_agent_has_a_directory_of_its_own(heavy: Heavy, tmp_path: Path) -> None:
    """Batch jobs have no /run/user/UID."""
    heavy.node.state_dir = str(tmp_path / "mine")
    for _ in range(2):
        assert heavy.run()[2] == []
    assert heavy.runs == 1 and (tmp_path / "mine/heavy.json").exists() and not heavy.file.exists()


def test_a_file_is_written_whole_or_not_at_all(heavy: Heavy) -> None:
    """A disk without room costs only the reuse; RLIMIT_FSIZE takes a part of the file and refuses the rest."""
    heavy.run()

    def limited(pipe: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        kept = cache.through(heavy.check._replace(reads="x" * 5000), heavy.node, {}, lambda: (P, "fine"))
        os.write(pipe, json.dumps(kept.notes).encode())

    (note,) = json.loads(bounded_process.fork(limited, BOUND_S).finish().stdout)
    assert "cannot be kept" in note
    heavy.run()
    assert heavy.runs == 1 and {file.name for file in heavy.directory.iterdir()} == {"heavy.json", "heavy.lock"}
