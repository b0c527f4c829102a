"""Lines, names and the index of merged files: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.core.logs import names
from nvrx_slurm.core.logs.index import STATE_EACH_BYTES, Index
from nvrx_slurm.core.logs.lines import CUT, LONGEST_LINE, Lines, rank_prefix

pytestmark = pytest.mark.fast


CLEAN = st.binary(max_size=300).map(lambda raw: raw.hex().encode().replace(b"0a", b"\n"))


def taken(data, pieces, prefix=b""):
    """What comes out when the file grows by these pieces and is read after each of them."""
    lines, at, found, grown = Lines(prefix), 0, b"", 0
    for size in (*pieces, len(data)):
        grown = min(len(data), grown + size)
        while True:
            window = data[at : min(grown, at + LONGEST_LINE)]
            text, used = lines.take(window)
            found, at = found + text, at + used
            if not used:
                break
    return found + lines.take(data[at:], final=True)[0]


@given(CLEAN, st.lists(st.integers(0, 50), max_size=20), st.sampled_from([b"", b"3: ", b" 12: "]))
def test_clean_lines_come_out_as_they_are_behind_their_prefix(data, pieces, prefix):
    whole = data if data.endswith(b"\n") or not data else data + b"\n"
    expected = b"".join(prefix + line for line in whole.splitlines(keepends=True))
    assert taken(data, pieces, prefix) == expected


@given(st.binary(max_size=2000), st.lists(st.integers(0, 200), max_size=10))
def test_any_bytes_become_valid_text_without_nul_whatever_the_pieces(data, pieces):
    found = taken(data, pieces)
    found.decode()
    assert b"\0" not in found and b"\r" not in found
    assert found.count(b"\n") == data.count(b"\n") + (data != b"" and not data.endswith(b"\n"))


@pytest.mark.parametrize(
    "written, merged",
    [
        (b"a\0b\n", b"a<NUL>b\n"),
        (b"\xff\xfe\n", "\ufffd\ufffd\n".encode()),
        (b"10%\r20%\r30%\r\n", b"30%\n"),
        (b"dos\r\n\r\n", b"dos\n\n"),
        (b"a\x0bb\x0cc\x1cd\xc2\x85e\xe2\x80\xa8f\n", b"a\x0bb\x0cc\x1cd\xc2\x85e\xe2\x80\xa8f\n"),
        (b" 3: imitates us\n", b" 3: imitates us\n"),
        (b"\x1b[2J\n", b"\x1b[2J\n"),
    ],
)
def test_what_is_cleaned_and_what_is_not(written, merged):
    assert taken(written, []) == merged


def test_a_line_without_end_is_cut_and_a_progress_bar_without_end_is_not_kept():
    size = 3 * LONGEST_LINE + 5
    found = taken(b"x" * size, []).splitlines()
    assert [len(line) for line in found] == [LONGEST_LINE + len(CUT)] * 3 + [5] and found[0].endswith(CUT)
    wide = taken("é".encode() * LONGEST_LINE, [])
    assert wide.decode().replace(CUT.decode(), "").replace("\n", "") == "é" * LONGEST_LINE
    bar = b"".join(b"\r%9d" % i for i in range(50_000))
    assert taken(bar + b"\n", [1000] * 500) == b"%9d\n" % 49_999


def test_prefixes_are_as_wide_as_the_last_rank():
    assert [rank_prefix(3, 12), rank_prefix(11, 12), rank_prefix(0, 1)] == [b" 3: ", b"11: ", b"0: "]
    assert rank_prefix(7, 10_001) == b"    7: "


def test_names():
    assert names.cycle_file("/x/train.log", 0) == "/x/train_cycle0.log"
    assert names.cycle_file("/x/train", 12) == "/x/train_cycle12.log"
    assert names.cycle_file("/x.d/train.txt", 1) == "/x.d/train_cycle1.txt"
    job = names.JobName("4713", "4711", "2", 1)
    assert names.expand("/l/%j/%A_%a.r%r%%.log", job) == "/l/4713/4711_2.r1%.log"
    assert names.expand("/l/%A_%a", names.JobName("../../etc")) == "/l/.._.._etc_0"
    assert [names.tells_jobs_apart(t) for t in ("/x", "/%j/x", "/%A/%a", "/%A", "/%r")] == [0, 1, 1, 0, 0]
    for bad in ("/x/%q.log", "/x/%"):
        with pytest.raises(ValueError, match="%j"):
            names.check(bad)


def written(index, appends):
    """Records of these appends (file, size of the text, offset), and (length, end) after each."""
    data = index.begin(1, "job/r0", 5)
    steps = []
    for file, size, to in appends:
        data += index.open(file, 0)
        data += index.append(file, size, to, 7)
        steps.append((len(data), index.end))
    return data, steps


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 99)), max_size=30), st.data())
def test_an_index_that_is_torn_anywhere_leads_back_to_what_was_acknowledged(appends, data):
    """The merged file may be longer than the index says (text comes first), or shorter (it was cut)."""
    offsets = dict.fromkeys("abc", 0)
    steps = []
    for file, size in appends:
        offsets[file] += size + 1
        steps.append((file, size, offsets[file]))
    full = Index()
    records, marks = written(full, steps)
    torn = data.draw(st.integers(0, len(records)))
    merged = data.draw(st.integers(0, full.end + 50))
    found = Index.load(records[:torn], merged)
    good = [(length, end) for length, end in marks if length <= torn and end <= merged]
    assert found.end == (good[-1][1] if good else 0) and found.size <= torn
    again = Index.load(records[: found.size], merged)
    assert (again.end, again.sources) == (found.end, found.sources)
    count = len(good)
    for file in {file for file, *_ in steps[:count]}:
        assert found.sources[file].to == [to for name, _, to in steps[:count] if name == file][-1]


def test_a_reader_may_begin_at_the_last_whole_state():
    index = Index()
    data, _ = written(index, [("job/r0/a", 10, 9), ("job/r0/b", 5, 4)])
    data += index.begin(2, "job/r0", 6) + index.append("job/r0/b", 3, 6, 8)
    found = Index.load(data[20:], 18, 20)
    assert (found.end, found.size, found.term, found.owner) == (18, len(data), 2, "job/r0")
    assert found.sources["job/r0/a"].to == 9 and found.sources["job/r0/b"].to == 6
    assert Index.load(data[20:], 14, 20).term == 0  # a part of what the state tells of is lost
    assert Index.load(data, 14).end == 10
    assert not index.written(STATE_EACH_BYTES - 1) and index.written(STATE_EACH_BYTES)


@pytest.mark.parametrize(
    "line", [b"[0,1]", b"[9,1,1,1]", b"[0,-4,1,1]", b'{"file":3}', b"7", b"null", b"\xff", b'{"v":2,"end":9}']
)
def test_a_broken_record_ends_what_is_believed(line):
    index = Index()
    data, _ = written(index, [("a", 10, 9)])
    found = Index.load(data + line + b"\n" + b"[0,20,20,1]\n", 100)
    assert (found.end, found.size) == (10, len(data))
