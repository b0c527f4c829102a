"""The rules against texts of the world and hard negatives: what is said with confidence is right."""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path

import cases as first
import pytest
import world

from nvrx_slurm.core.attribution.evidence import examine
from nvrx_slurm.core.attribution.matches import BETWEEN_LINES
from nvrx_slurm.core.attribution.places import PLACES, place_of
from nvrx_slurm.core.attribution.rules import named
from nvrx_slurm.core.attribution.said import what_to_do
from nvrx_slurm.core.attribution.signatures import SIGNATURES
from nvrx_slurm.core.attribution.verdict import judge
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Blame, Confidence, FaultKind, RankFault, Remedy

pytestmark = pytest.mark.fast

WHERE = RankFault(FaultKind.SPAWN, "n1", 1, 3, 1, 4711)


def _case(name: str) -> first.Case:
    return next(case for part in world.PARTS for case in world.cases(part) if case.id == name)


def _found(name: str, folder: Path, code: int | None = None) -> RankFault:
    case = _case(name)
    return first.fault_of(case if code is None else case._replace(code=code), (), WHERE, folder)


def _bare(code: int, text: bytes = b"") -> RankFault:
    """A rank that ended with `code`, without an exception."""
    kind = FaultKind.SIGNAL if code < 0 else FaultKind.EXIT
    fault = RankFault(kind, "n1", 1, 3, 1, 4711, code, "")
    return RankFault(kind, "n1", 1, 3, 1, 4711, code, "", finding=examine(fault, text))


def test_the_corpus_is_large_and_from_many_projects() -> None:
    texts = [case for part in ("seen", "aside") for case in world.cases(part)]
    negatives = world.cases("negatives")
    names = [case.id for case in (*texts, *negatives, *first.singles())]
    assert len(names) == len(set(names))
    assert len(texts) >= 150 and len(negatives) >= 60
    assert len({case.source.partition(" (")[0].partition("/issues")[0] for case in texts}) >= 20
    assert 0.4 < len(world.cases("aside")) / len(texts) < 0.6


@pytest.mark.parametrize("part", world.PARTS)
def test_what_is_said_with_confidence_is_right(part: str) -> None:
    """`python tests/attribution/world.py seen` shows what is wrong, but not of the part that is put aside."""
    found = world.scores(part)
    assert found.right >= 0.9 and found.precision >= 0.97, found
    assert found.misleading <= 0.03 and found.wrong_exclusions == 0, found


def test_likely_is_earned() -> None:
    """No rule says likely or certain of a case of another class, in either corpus: else its words are a guess."""
    seen = [case for case in first.singles() if not first.is_aside(case.id)]
    done = [*first.tries((*seen, *world.cases("seen"), *world.cases("negatives")))]
    wrong = [f"{one.id}: {one.found}, not {one.topic}" for one in done if one.confident and not one.right]
    assert not wrong
    told = [one for one in done if one.blame != Blame.UNKNOWN.value]  # an echo has no owner
    assert sum(one.confident for one in told) > len(told) / 2


@pytest.mark.parametrize("name", [case.id for case in world.cases("negatives")])
def test_a_suspicious_word_ends_no_job_and_drops_no_checkpoint(name: str, tmp_path: Path) -> None:
    verdict = judge([_found(name, tmp_path)], 4)
    assert verdict is not None
    certain = verdict.confidence is Confidence.CERTAIN
    assert not (certain and verdict.remedy in (Remedy.STOP, Remedy.ELSEWHERE))
    assert not (certain and verdict.rule == "checkpoint-torn")


@pytest.mark.parametrize(
    ("name", "rule", "sure", "rests_on"),
    [
        ("w-torch-empty", "checkpoint-torn", Confidence.LIKELY, "frame"),  # torch.load
        ("n-eof-object", "peer-gone", Confidence.LIKELY, "frame"),  # an object of another rank
        ("n-eof-spawn", "peer-gone", Confidence.LIKELY, "frame"),
        ("n-reset-urllib", "service-library", Confidence.GUESS, "frame"),
        ("n-semaphore-space", "shared-memory-semaphore", Confidence.LIKELY, "frame"),
        ("n-nvcc", "tool-missing", Confidence.LIKELY, "frame"),
        ("w-xid-154-reboot", "gpu-recovery", Confidence.CERTAIN, "field"),
        ("w-slurm-time-progress", "slurm-time-limit", Confidence.CERTAIN, "field"),
        ("w-hip-oom", "gpu-out-of-memory", Confidence.LIKELY, "text"),
    ],
)
def test_a_finding_says_what_it_rests_on(name: str, rule: str, sure: Confidence, rests_on: str, tmp_path: Path) -> None:
    found = _found(name, tmp_path).finding
    assert found is not None
    assert (found.rule, found.confidence, found.rests_on) == (rule, sure, rests_on)


def test_an_end_of_file_without_a_file_is_no_torn_one() -> None:
    error = "EOFError: Ran out of input"
    frames = 'Traceback (most recent call last):\n  File "/w/train.py", line 1, in f\n    load()\n'
    fault = RankFault(FaultKind.EXIT, "n1", 1, 3, 1, 9, 1, error, f"{frames}{error}\n")
    assert examine(fault, b"").confidence is Confidence.GUESS


def test_the_last_error_of_nccl_is_its_headline(tmp_path: Path) -> None:
    found = _found("w-nvls-bind", tmp_path).finding
    assert found is not None and found.line.startswith("Failed to bind NVLink SHARP")


FRAME = b'Traceback (most recent call last):\n  File "/lib/python3.11/a.py", line 9, in f\n'
ABORT = b"ProcessGroupNCCL.cpp:495] To avoid data inconsistency, we are taking the entire process down."
WAITED = b"ProcessGroupNCCL.cpp:475] Watchdog caught collective operation timeout: OpType=ALLREDUCE"


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        (
            FRAME + b"RuntimeError:\n\n   no libraries of CUDA\n",
            "python-exception",
            "RuntimeError: no libraries of CUDA",
        ),
        (FRAME + b"raise KeyError(1)\nKeyError: 1\n", "python-exception", "KeyError: 1"),
        (WAITED + b"\n" + ABORT, "collective-timeout", WAITED.decode()),
        (FRAME + b"OSError: [Errno 16] Busy: '/root/.triton/cache/a'\n", "compile-cache", "OSError: [Errno 16]"),
    ],
)
def test_the_line_that_says_most_is_shown(text: bytes, rule: str, line: str, tmp_path: Path) -> None:
    case = first.Case("own", "", "code", ("user",), False, 1, {"text": text.decode()}, ())
    found = first.fault_of(case, (), _bare(1), tmp_path).finding
    assert found is not None and found.rule == rule
    assert found.line.startswith(line)


def test_the_node_in_a_line_is_named_and_not_the_one_that_prints_it(tmp_path: Path) -> None:
    fault = _found("w-slurm-node-failure", tmp_path)
    verdict = judge([fault], 4)
    assert verdict is not None and fault.finding is not None and fault.finding.node == "n7"
    assert "node n7 " in verdict.sentence and "n1" not in verdict.sentence
    assert not verdict.alone  # nor is the node that prints it suspected
    lost = RankFault(FaultKind.NODE_LOST, "n7", 7, message="its connection was closed")
    verdict = judge([fault, lost], 4)
    assert verdict is not None and verdict.cause is lost


@pytest.mark.parametrize("code", [-4, -6, -7, -8, -9, -11, -15, -31, 134, 135, 136, 139, 255, 7])
def test_an_end_without_a_rule_tells_code_or_signal_and_the_last_lines(code: int) -> None:
    bar, advice = b" 12%|#    | 3/25 [00:12<02:11,  1.2it/s]", b"Set CUDA_LAUNCH_BLOCKING=1 to debug"
    text = b"\n".join((b"loading", b"the mesh has no cells", bar, advice, b""))
    fault = _bare(code, text)
    assert fault.finding is not None and fault.finding.blame is Blame.UNKNOWN
    ended = -code if code < 0 else code - 128
    told = what_to_do(fault)
    assert told and ("killer" in told) == (ended == 9)
    if ended != 15:
        assert fault.finding.line.split(BETWEEN_LINES)[-1] == "the mesh has no cells"
        assert fault.finding.confidence is Confidence.GUESS and fault.finding.rests_on == "exit"


def test_of_the_last_lines_those_of_an_error_are_told_and_the_last() -> None:
    fault = _bare(3, b"the mesh cannot be read: error 7\nwith a=1\nwith b=2\nwith c=3\n")
    assert fault.finding is not None
    assert fault.finding.line.split(BETWEEN_LINES) == ["the mesh cannot be read: error 7", "with c=3"]


def test_each_signal_has_its_sentence() -> None:
    told = Counter(what_to_do(_bare(-signal)) for signal in (2, 3, 4, 6, 7, 8, 9, 11, 15, 31))
    assert max(told.values()) == 1 and "scancel" in what_to_do(_bare(-15))
    assert what_to_do(_bare(134)) == what_to_do(_bare(-6)) != what_to_do(_bare(255))


def test_a_program_that_a_limit_keeps_from_starting_is_not_at_a_wrong_path() -> None:
    codes = (errno.ENOENT, errno.EMFILE, errno.EAGAIN, errno.ENOMEM)
    told = [what_to_do(replace(WHERE, message=f"{os.strerror(code)} (process)")) for code in codes]
    assert "path" in told[0] and len({*told}) == len(told)


def test_which_rules_may_end_a_job() -> None:
    sure = [s for s in SIGNATURES if s.remedy is Remedy.STOP and s.confidence is Confidence.CERTAIN]
    assert {s.name for s in sure} == {"arguments", "checkpoint-mismatch", "nvrx-import", "python-import"}
    assert named("checkpoint-torn").confidence is Confidence.LIKELY  # type: ignore[union-attr] # by words alone


def test_the_table_of_places_names_rules_and_classes_that_exist() -> None:
    topics = {s.topic for s in SIGNATURES}
    for one in PLACES:
        assert not one.rule or named(one.rule) is not None
        assert one.proves | one.vetoes <= topics and one.packages


def test_the_first_frame_of_the_users_code_ends_the_search() -> None:
    frames = 'Traceback (most recent call last):\n  File "/opt/v/site-packages/requests/a.py", line 1, in f\n    g()\n'
    own = '  File "/w/train.py", line 1, in g\n    h()\n'
    assert place_of("OSError", f"{frames}OSError\n") is not None
    assert place_of("OSError", f"{frames}{own}OSError\n") is None
