"""Single values: what each kind takes and refuses, and that showing and reading again changes nothing."""

import signal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config import values as v
from nvrx_slurm.config.values import RendezvousConfig, Streams

pytestmark = pytest.mark.fast


SECTIONS = {"setup": 600.0, "step": 30.0, "idle": None, "eval": None}
MANY = {f"section {n}": 1.0 for n in range(v.MAX_SECTIONS)}

# kind, what is taken for which value
TAKEN = [
    (k.BOOL, ["true", "TRUE", "1", "yes", "On", " on ", True, 1], True),
    (k.BOOL, ["false", "False", "0", "NO", "off", False, 0], False),
    (k.SECONDS, ["0", 0], 0.0),
    (k.TIMEOUT, ["none", "NULL", None], None),
    (k.SIZE, ["64G", " 64 g ", "65536M", 64 << 30], 64 << 30),
    (k.SIZE, ["1048577"], 1048577),
    (k.TIMEOUT, ["1e3", 1000], 1000.0),
    (k.WORDS, ["--a 'b c'"], ("--a", "b c")),
    (k.ABSOLUTE_PATHS, [" ,/a,, /b,", "/a, /b", ["/a", "/b"]], "/a,/b"),
    (v.NNODES, ["4", 4, "4:4", " 4 : 4 ", "٤"], (4, 4)),  # digits of any script are numbers to Python
    (v.NNODES, ["1:1000000"], (1, 1000000)),
    (v.NPROC, ["8", 8], 8),
    (v.NPROC, ["GPU", "gpu"], "gpu"),
    (v.STREAMS, [0, "0"], Streams()),
    (v.STREAMS, ["12:3,", "12:3"], Streams(0, ((12, 3),))),
    (v.RANKS, ["0,3", [0, 3]], (0, 3)),
    (v.SIGNAL, [9, "9", "SIGKILL", "sigkill", "KILL", signal.SIGKILL], signal.SIGKILL),
    (v.USER_SIGNAL, ["none", None], None),
    (v.LOG_LEVEL, ["DEBUG", "dbg", 10, "10"], 10),
    (v.LOG_LEVEL, ["WARN", "warning"], 30),
    (v.SECTION_TIMEOUTS, ["setup:600, step:30,idle:none,eval:", SECTIONS | {"eval": "none"}], SECTIONS),
    (v.SECTION_TIMEOUTS, [MANY], MANY),
    (v.PREFLIGHT_FAILURES, ["1:0, 2:3", "2:3,1:0,"], frozenset({(1, 0), (2, 3)})),
    (v.RDZV_CONF, ["join_timeout=600,is_host=1"], RendezvousConfig(join_timeout=600.0, is_host=True)),
    (v.RDZV_CONF, ["timeout=600", "'timeout=600'", '"timeout=600"'], RendezvousConfig(join_timeout=600.0)),
    (v.RDZV_CONF, ["timeout=9,join_timeout=8"], RendezvousConfig(join_timeout=8.0)),
    (v.RDZV_CONF, [""], RendezvousConfig()),
    (v.RDZV_CONF, [{"read_timeout": 5}], RendezvousConfig(ignored=("read_timeout",))),
]
# kind, a word of the sentence, what is refused
REFUSED = [
    (k.BOOL, "true or false", ["", "2", "y", "maybe", None, 2, 1.0, [], "true false"]),
    (k.SECONDS, "number of seconds", ["nan", "inf", "-1", -0.001, "1e99", True, "5s", [], {}, "", "9" * 5000]),
    (k.TIMEOUT, "> 0", [0]),
    (k.SIZE, "for example 64G", ["", "64", "G", "1.5G", "-1G", "64GB", "1023K", "9" * 15 + "T", True, None, 64.0, []]),
    (k.integer(0), "a whole number", [True, 2.5, "2.5", "x", None, 2**40, -1]),
    (k.WORDS, "must be|No closing", ["'", ["a\nb"], 5]),
    (k.ABSOLUTE_PATHS, "must be", ["a", "/a,b", [], 5, ",", " , ", "", ["/a", ""], ["/a\nb"]]),
    (v.NNODES, "MIN or MIN:MAX",
     ["3:2", "0", "a:b", "", ":", "1:", ":2", "1:2:3", "-1", "1.5", "9" * 40, None, True, [1]]),
    (v.NPROC, "gpu, cpu or auto", ["0", "-1", "tpu", "1025", 2.5, True, ""]),
    (v.STREAMS, "must be 0", ["4", "", "0:4", "a:1", "0:1,0:2", "0:1;1:2", "1:", None, "3,3"]),
    (v.RANKS, "must be", ["a", "-1", "0;1", 7, [True]]),
    (v.SIGNAL, "a signal", [0, 999, "SIGFOO", "", True, None, 9.0]),
    (v.SIGNAL, "did you mean SIGUSR1", ["SIGUSR11"]),
    (v.USER_SIGNAL, "SIGUSR1, SIGUSR2", ["TERM"]),
    (v.LOG_LEVEL, "DEBUG", ["LOUD", -1, 51, True, None]),
    (v.SECTION_TIMEOUTS, "NAME:SECONDS",
     ["step", "step:x", "step:-1", "step:0", "step:1,step:2", {1: 2}, ["step:1"], 5, {"step": True},
      {"two\nlines": 1.0}, "\udc80:3"]),
    (v.SECTION_TIMEOUTS, "at most 128", [MANY | {"one more": 1.0}, {"x" * 5000: 1.0}]),
    (v.PATTERN, "regular expression", ["step_", "("]),
    (v.RESTARTS_BY_FAULT, "FAULT:N", ["hung:2", "hang:-1", "hang:1,hang:2", "hang", 5]),
    (v.PREFLIGHT_FAILURES, "CYCLE:INFRA_RANK", ["1", "1:x", "-1:0", "1:2:3"]),
    (v.ENDPOINTS, "HOST:PORT", [":1", "h:x", "h:65536", "h:-1", "::1", "[::1", "[::1]x", "http://h:1", "a b:1"]),
    (v.ENDPOINTS, "HOST:PORT", ["h:1,", ",h:1"]),
    (v.RDZV_CONF, "did you mean join_timeout", ["join_timout=3"]),
    (v.RDZV_CONF, "known: is_host", ["zzz=3"]),
    (v.RDZV_CONF, "join_timeout must be", ["join_timeout=x"]),
    (v.RDZV_CONF, "KEY=VALUE", ["join_timeout", "join_timeout=1,join_timeout=2"]),
    (v.RDZV_CONF, "segment is not supported", ["segment=4"]),
    (v.RDZV_CONF, "is_host must be", ["is_host=maybe"]),
]  # fmt: skip


@pytest.mark.parametrize("kind, raws, value", TAKEN)
def test_what_a_kind_takes(kind, raws, value):
    for raw in raws:
        parsed = kind.parse(raw)
        assert parsed == value and type(parsed) is type(kind.parse(parsed)), raw


@pytest.mark.parametrize("kind, sentence, raws", REFUSED)
def test_what_a_kind_refuses(kind, sentence, raws):
    for raw in raws:
        with pytest.raises(ValueError, match=sentence):
            kind.parse(raw)
            pytest.fail(f"{raw!r} was taken")


def test_endpoints_and_streams():
    ends = {"h:1": ("h", 1), "h": ("h", 29400), "[::1]:5": ("::1", 5), "[::1]": ("::1", 29400), "h:0": ("h", 0)}
    assert {text: v.split_endpoint(text) for text in ends} == ends
    assert v.STREAMS.parse("3").of(7) == 3
    assert [v.STREAMS.parse("0:1,1:2").of(rank) for rank in (0, 1, 2)] == [1, 2, 0]


KINDS = [k.BOOL, k.SECONDS, k.TIMEOUT, v.NNODES, v.NPROC, v.STREAMS, v.RANKS, v.SIGNAL, v.LOG_LEVEL, v.SECTION_TIMEOUTS]
KINDS += [v.RDZV_CONF, k.WORDS, k.TEXT, k.PATH, k.ABSOLUTE_PATHS, v.ENDPOINTS, k.integer(0), k.choice("a", "b")]
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None)
@given(st.sampled_from(KINDS), JUNK)
def test_junk_is_a_value_or_a_value_error_and_what_is_shown_reads_back(kind, junk):
    try:
        value = kind.parse(junk)
    except ValueError:
        return
    assert kind.parse(value) == value == kind.parse(kind.show(value))


def test_what_is_shown_reads_back():
    for kind, raws, value in TAKEN:
        assert kind is v.RDZV_CONF or kind.parse(kind.show(kind.parse(raws[0]))) == value
