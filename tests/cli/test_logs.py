"""`nvrx logs`: merged files and bare trees, filters, bad input, and lines that would act on a terminal."""

import os

import pytest
from toolbox import nvrx

from nvrx_slurm.logs.merged import Batch, MergedFile

pytestmark = pytest.mark.fast


HOSTILE = b"\x1b]0;owned\x07 \x1b[2J \xc2\x9b31m \x7f \r \xe2\x80\xae"


def lines(*words):
    result = nvrx("logs", *words)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def write(run, cycle, texts):
    """A merged file of (rank, stream, text, time), found from `run`."""
    path = run.parent / f"train_cycle{cycle}.log"
    merged = MergedFile(str(path), 1, "4711/r0")
    offsets = {}
    for rank, stream, text, at in texts:
        file = f"4711/r0/cycle_{cycle}/node_0_n/rank_{rank}.{stream}"
        merged.open(file, rank)
        offsets[file] = offsets.get(file, 0) + len(text)
        merged.append([Batch(file, b"%d: " % rank + text, offsets[file], at)])
    merged.close()
    (run / "merged").mkdir(parents=True, exist_ok=True)
    os.symlink(path, run / "merged" / f"cycle_{cycle}.log")
    return path


@pytest.fixture
def run(tmp_path):
    """Cycles 0 and 1 have a merged file, cycle 2 the files of its ranks only."""
    found = tmp_path / "r0"
    write(found, 0, [(0, "out", b"zero\n", 1000), (1, "err", b"one\n", 2000), (0, "out", b"two\n", 3000)])
    texts = [(0, "out", b"a\n", 1000), (1, "out", b"b\n", 2000), (1, "out", b"c\n", 3000)]
    write(found, 1, [*texts, (0, "out", b"d\n", 9_000_000_000_000)])
    for rank in (2, 10):
        tree = found / "cycle_2" / f"node_{rank}_n" / f"rank_{rank}.out"
        tree.parent.mkdir(parents=True)
        tree.write_bytes(b"from %d\nlast" % rank)
    return found


def test_lines_of_merged_files_and_trees(run):
    assert lines(run, "--cycle", 0) == ["0: zero", "1: one", "0: two"]
    assert lines(run, "--cycle", 1) == ["0: a", "1: b", "1: c", "0: d"]
    assert lines(run) == [" 2: from 2", " 2: last", "10: from 10", "10: last"]
    assert len(lines(run, "--cycle", "all")) == 11
    assert lines(run.parent / "train_cycle0.log", "--rank", 1) == ["1: one"]


def test_filters(run):
    assert lines(run, "--cycle", 0, "--rank", "1-9") == ["1: one"]
    assert lines(run, "--cycle", 0, "--stream", "err") == ["1: one"]
    assert lines(run, "--cycle", 1, "--since", "1h") == ["0: d"]
    assert lines(run, "--cycle", 1, "--until", "2020-01-01T00:00") == ["0: a", "1: b", "1: c"]
    assert lines(run, "--rank", "0,10") == ["10: from 10", "10: last"]


def test_no_byte_of_a_rank_acts_on_the_terminal_unless_it_is_asked_for(tmp_path):
    path = write(tmp_path / "r0", 0, [(0, "out", HOSTILE + b"\n", 1)])
    shown = nvrx("logs", path)
    assert shown.exit_code == 0
    assert all(char.isprintable() or char == "\n" for char in shown.output) and r"\x1b[2J" in shown.output
    assert r"\x9b31m" in shown.output and r"\u202e" in shown.output
    assert HOSTILE in nvrx("logs", path, "--raw").stdout_bytes


@pytest.mark.parametrize(
    "words, tokens",
    [
        (["nowhere"], ["nowhere", "job id"]),
        (["RUN", "--cycle", "7"], ["no cycle 7", "0, 1, 2"]),
        (["RUN", "--cycle", "x"], ["--cycle", "number"]),
        (["RUN", "--rank", "3-1"], ["3-1", "0,3-5"]),
        (["RUN", "--since", "soon"], ["soon", "10m"]),
        (["RUN/cycle_2"], ["no cycle"]),
    ],
)
def test_bad_input(run, words, tokens):
    result = nvrx("logs", *(word.replace("RUN", str(run)) for word in words))
    assert result.exit_code == 2 and all(token in result.output for token in tokens), result.output


def test_a_broken_index_shows_what_is_good(run):
    index = run.parent / "train_cycle0.log.idx"
    with index.open("ab") as file:
        file.write(b'garbage\n[99,5,5,5]\n{"file":7}\n[0,torn')
    assert lines(run, "--cycle", 0) == ["0: zero", "1: one", "0: two"]
