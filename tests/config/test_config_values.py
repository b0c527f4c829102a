"""Single values: what each kind takes and refuses, and that showing and reading again changes nothing."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nvrx_slurm.config import NodeRange, RendezvousConfig, Std, Streams
from nvrx_slurm.config import values as v


@pytest.mark.parametrize("word", ["true", "TRUE", "1", "yes", "On", " on ", True, 1])
def test_true_words(word: object) -> None:
    assert v.parse_bool(word) is True


@pytest.mark.parametrize("word", ["false", "False", "0", "NO", "off", False, 0])
def test_false_words(word: object) -> None:
    assert v.parse_bool(word) is False


@pytest.mark.parametrize("word", ["", "2", "y", "maybe", None, 2, 1.0, [], "true false"])
def test_other_words_are_no_booleans(word: object) -> None:
    with pytest.raises(ValueError, match="must be true or false"):
        v.parse_bool(word)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4", (4, 4)), ("2:3", (2, 3)), (5, (5, 5)), ("1:1000000", (1, 1000000)), (" 2 : 3 ", (2, 3))],
)
def test_node_ranges(text: object, expected: tuple[int, int]) -> None:
    assert v.NNODES.parse(text) == expected


@pytest.mark.parametrize(
    "text", ["3:2", "0", "a:b", "", ":", "1:", ":2", "1:2:3", "-1", "1.5", "9" * 40, None, True, [1], "٣"]
)
def test_bad_node_ranges(text: object) -> None:
    if text == "٣":  # another script's digits are numbers to Python, and harmless
        assert v.NNODES.parse(text) == (3, 3)
        return
    with pytest.raises(ValueError, match="must be MIN or MIN:MAX"):
        v.NNODES.parse(text)


@pytest.mark.parametrize(("text", "expected"), [("8", 8), (8, 8), ("GPU", "gpu"), ("auto", "auto"), ("cpu", "cpu")])
def test_nproc(text: object, expected: object) -> None:
    assert v.NPROC.parse(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "tpu", "1025", 2.5, True, ""])
def test_bad_nproc(text: object) -> None:
    with pytest.raises(ValueError, match="gpu, cpu or auto"):
        v.NPROC.parse(text)


@pytest.mark.parametrize("raw", ["nan", "inf", "-1", -0.001, "1e99", True, "5s", [], {}, "", "9" * 5000])
def test_bad_seconds(raw: object) -> None:
    with pytest.raises(ValueError, match="must be a number of seconds"):
        v.SECONDS.parse(raw)


def test_zero_is_no_timeout_but_none_is() -> None:
    assert v.SECONDS.parse("0") == 0
    assert [v.TIMEOUT.parse(raw) for raw in ("none", "NULL", None, "1e3")] == [None, None, None, 1000.0]
    with pytest.raises(ValueError, match="> 0"):
        v.TIMEOUT.parse(0)


@pytest.mark.parametrize("raw", [True, 2.5, "2.5", "x", None, 2**40, -1])
def test_bad_whole_numbers(raw: object) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        v.integer(0).parse(raw)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h:1", ("h", 1)),
        ("h", ("h", 29400)),
        ("[::1]:5", ("::1", 5)),
        ("[::1]", ("::1", 29400)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_endpoints(text: str, expected: tuple[str, int]) -> None:
    assert v.split_endpoint(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:x", "h:65536", "h:-1", "::1", "[::1", "[::1]x", "http://h:1", "a b:1"])
def test_bad_endpoints(text: str) -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        v.split_endpoint(text)


def test_streams_follow_torchruns_grammar() -> None:
    assert v.STREAMS.parse("3").of(7) is Std.ALL
    assert v.STREAMS.parse(0) == Streams()
    some = v.STREAMS.parse("0:1,1:2")
    assert [some.of(rank) for rank in (0, 1, 2)] == [Std.OUT, Std.ERR, Std.NONE]
    assert v.STREAMS.parse("12:3,") == Streams(Std.NONE, ((12, Std.ALL),))


@pytest.mark.parametrize("text", ["4", "", "0:4", "a:1", "0:1,0:2", "0:1;1:2", "1:", None, "3,3"])
def test_bad_streams(text: object) -> None:
    with pytest.raises(ValueError, match="must be 0"):
        v.STREAMS.parse(text)


def test_local_ranks() -> None:
    assert v.RANKS.parse("3,0,3") == (0, 3)
    for bad in ("", "a", "-1", "0;1", 7, [], [True]):
        with pytest.raises(ValueError, match="must be local ranks"):
            v.RANKS.parse(bad)


@pytest.mark.parametrize("raw", [9, "9", "SIGKILL", "sigkill", "KILL", signal.SIGKILL])
def test_signals(raw: object) -> None:
    assert v.SIGNAL.parse(raw) is signal.SIGKILL


@pytest.mark.parametrize("raw", [0, 999, "SIGFOO", "", True, None, 9.0])
def test_bad_signals(raw: object) -> None:
    with pytest.raises(ValueError, match="must be a signal"):
        v.SIGNAL.parse(raw)
    with pytest.raises(ValueError, match="did you mean SIGUSR1"):
        v.SIGNAL.parse("SIGUSR11")


def test_log_levels() -> None:
    names = ["DEBUG", "dbg", "INFO", "WARN", "warning", "ERROR", "CRITICAL", 10, "15"]
    assert [v.LOG_LEVEL.parse(name) for name in names] == [10, 10, 20, 30, 30, 40, 50, 10, 15]
    for bad in ("LOUD", -1, 51, True, None):
        with pytest.raises(ValueError, match="must be DEBUG"):
            v.LOG_LEVEL.parse(bad)


def test_sections_fit_into_one_message() -> None:
    many = {f"section {n}": 1.0 for n in range(v.MAX_SECTIONS)}
    assert v.SECTION_TIMEOUTS.parse(many) == many
    for bad in (many | {"one more": 1.0}, {"x" * 5000: 1.0}):
        with pytest.raises(ValueError, match="must be at most 128 sections with 4096 bytes of names"):
            v.SECTION_TIMEOUTS.parse(bad)
    for bad in ({"two\nlines": 1.0}, "\udc80:3"):
        with pytest.raises(ValueError, match="must be NAME:SECONDS"):
            v.SECTION_TIMEOUTS.parse(bad)


def test_section_timeouts() -> None:
    text = "setup:600, step:30,idle:none,eval:"
    expected = {"setup": 600.0, "step": 30.0, "idle": None, "eval": None}
    assert v.SECTION_TIMEOUTS.parse(text) == expected
    assert v.SECTION_TIMEOUTS.parse({"setup": 600, "step": 30.0, "idle": None, "eval": "none"}) == expected
    for bad in ("step", "step:x", "step:-1", "step:1,step:2", {1: 2}, ["step:1"], 5, {"step": True}):
        with pytest.raises(ValueError, match="must be NAME:SECONDS"):
            v.SECTION_TIMEOUTS.parse(bad)


def test_storage_paths_from_text_or_list() -> None:
    assert v.ABSOLUTE_PATHS.parse(" ,/a,, /b,") == "/a,/b"
    assert v.ABSOLUTE_PATHS.parse("/a, /b") == v.ABSOLUTE_PATHS.parse(["/a", "/b"]) == "/a,/b"
    for bad in ("a", "/a,b", [], 5, ",", " , ", "", ["/a", ""], ["/a\nb"]):
        with pytest.raises(ValueError, match="must be"):
            v.ABSOLUTE_PATHS.parse(bad)


def test_rendezvous_keys() -> None:
    assert v.RDZV_CONF.parse("join_timeout=600,is_host=1") == RendezvousConfig(join_timeout=600.0, is_host=True)
    assert v.RDZV_CONF.parse("") == RendezvousConfig()
    assert v.RDZV_CONF.parse({"read_timeout": 5}).read_timeout == 5.0


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("join_timout=3", "did you mean join_timeout"),
        ("zzz=3", "known: is_host"),
        ("join_timeout=x", "join_timeout must be a number"),
        ("join_timeout", "must be KEY=VALUE"),
        ("join_timeout=1,join_timeout=2", "each key once"),
        ("segment=4", "segment is not built yet"),
        ("is_host=maybe", "is_host must be true or false"),
    ],
)
def test_bad_rendezvous_keys(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        v.RDZV_CONF.parse(text)


def test_words_are_split_as_a_shell_does() -> None:
    assert v.WORDS.parse("--a 'b c'") == ("--a", "b c")
    for bad in ("'", ["a\nb"], 5):
        with pytest.raises(ValueError, match="must be|No closing"):
            v.WORDS.parse(bad)


NODE_RANGES = st.tuples(st.integers(1, 1000), st.integers(0, 1000)).map(lambda pair: NodeRange(pair[0], sum(pair)))
SOME_STREAMS = st.dictionaries(st.integers(0, 99), st.sampled_from(Std), max_size=4).map(
    lambda d: Streams(Std.NONE, tuple(sorted(d.items())))
)


@given(NODE_RANGES)
def test_node_range_reads_back(value: NodeRange) -> None:
    assert v.NNODES.parse(v.NNODES.show(value)) == value


@given(SOME_STREAMS | st.sampled_from(Std).map(Streams))
def test_streams_read_back(value: Streams) -> None:
    assert v.STREAMS.parse(str(value)) == value


@given(st.floats(0.001, v.MAX_SECONDS), st.booleans() | st.none())
def test_rendezvous_reads_back(timeout: float, is_host: bool | None) -> None:
    value = RendezvousConfig(join_timeout=timeout, is_host=is_host)
    assert v.RDZV_CONF.parse(str(value)) == value


KINDS = [v.BOOL, v.SECONDS, v.TIMEOUT, v.NNODES, v.NPROC, v.STREAMS, v.RANKS, v.SIGNAL, v.LOG_LEVEL, v.SECTION_TIMEOUTS]
KINDS += [v.RDZV_CONF, v.WORDS, v.TEXT, v.PATH, v.ABSOLUTE_PATHS, v.ENDPOINT, v.integer(0), v.choice("a", "b")]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(KINDS), JUNK)
def test_junk_is_a_value_or_a_value_error_and_parsing_twice_changes_nothing(kind: v.Kind, junk: object) -> None:
    try:
        value = kind.parse(junk)
    except ValueError:
        return
    assert kind.parse(value) == value
