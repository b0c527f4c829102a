"""The rules against the corpus: each failure inside a storm of secondary lines, on one of several ranks that report."""

from __future__ import annotations

import re
import time
from collections import Counter
from itertools import pairwise, product
from pathlib import Path

import pytest
import signaturedoc
from corpus import FAILURES, STORM

from nvrx_slurm.core.attribution import rules
from nvrx_slurm.core.attribution.evidence import TAIL_BYTES, examine
from nvrx_slurm.core.attribution.raised import raised_in
from nvrx_slurm.core.attribution.reached import iteration
from nvrx_slurm.core.attribution.recurrence import repeats
from nvrx_slurm.core.attribution.said import what_to_do
from nvrx_slurm.core.attribution.signatures import SIGNATURES, Signature
from nvrx_slurm.core.attribution.verdict import JudgedCause, first_cause, judge
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Blame, Confidence, FaultKind, LineRole, RankFault, Remedy, RestartRecord

pytestmark = pytest.mark.fast


BY_NAME = {signature.name: signature for signature in SIGNATURES}
CASES = [(rule, line) for rule, lines in FAILURES.items() for line in lines]
CULPRIT = 5


def fault(rank: int, message: str = "", kind: FaultKind = FaultKind.EXIT, code: int = 1) -> RankFault:
    return RankFault(
        kind, f"n{rank // 2}", rank // 2, rank, rank % 2, 4711, code, message, "Traceback" if message else ""
    )


def report(rank: int, own: str = "") -> RankFault:
    """What a rank's agent reports: its own line, where it has one, in a storm of consequences."""
    storm = STORM.format(r=rank)
    text = f"step 88 loss 2.3\n{own}\n{storm}" if own else f"step 88 loss 2.3\n{storm}"
    message = own or "RuntimeError: [pair.cc:538] Connection closed by peer [10.0.0.7]:4711"
    found = fault(rank, message)
    if own and any(own in FAILURES[one.name] for one in SIGNATURES if one.printed):
        found = replace(found, traceback="")  # a program's or the kernel's line, not an exception
    return replace(found, finding=examine(found, text.encode()))


def of_job(line: str) -> JudgedCause:
    """The verdict on a job of 4 nodes in which the rank with `line` reports last."""
    faults = [report(rank) for rank in (0, 1, 2, 7)] + [report(CULPRIT, line)]
    verdict = judge(faults, 4)
    assert verdict is not None
    return verdict


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("iteration 149/ 1000 | loss\n iteration      150/ 1000\neval: step 50/50\n", 150),
        ("Step: 1,199\nStep: 1,200\n", 1200),
        ("  4%|4 | 44/1000 [00:10<\r 4%|4 | 45/1000 [00:11<", 45),
        ("step 150\nstep 150\n", -1),
        ("iteration 5000/\niteration 5100/\n", -1),  # a failure may have been anywhere between
        ("successfully loaded checkpoint at iteration 5000\nsaving at iteration 5001\n", -1),
        ("Loading checkpoint shards: 75%|3/4 [00:09<\rLoading checkpoint shards: 100%|4/4 [00:10<", -1),
        ("iteration 150 took 3.2 s\n", -1),
    ],
)
def test_how_far_a_training_got(text: str, reached: int) -> None:
    assert iteration(text.encode()) == reached


def test_the_corpus_has_each_signature() -> None:
    assert (
        FAILURES.keys() == {name for name, one in BY_NAME.items() if one.texts}
        and len(BY_NAME) >= 60
        and len(CASES) >= 60
    )


@pytest.mark.parametrize(("rule", "line"), CASES)
def test_a_failure_is_found_in_a_storm(rule: str, line: str) -> None:
    signature, verdict = BY_NAME[rule], of_job(line)
    if signature.role is LineRole.ECHO:
        assert verdict.cause.finding is not None and verdict.cause.finding.role is LineRole.ECHO
        assert (verdict.blame, verdict.confidence) == (Blame.UNKNOWN, Confidence.GUESS)
        return
    assert verdict.cause.rank == CULPRIT
    names_another = verdict.cause.finding is not None and verdict.cause.finding.node
    remedy = Remedy.RESTART if names_another else signature.remedy  # the one that prints it stays
    assert (verdict.rule, verdict.blame, verdict.remedy) == (rule, signature.blame, remedy)


@pytest.mark.parametrize("rule", [s.name for s in SIGNATURES if s.role is LineRole.ECHO])
def test_an_echo_alone_blames_no_one(rule: str) -> None:
    found = fault(0, FAILURES[rule][0])
    finding = examine(found, b"")
    assert (finding.rule, finding.role) == (rule, LineRole.ECHO)


def test_a_line_before_progress_is_not_the_cause() -> None:
    text = b"OSError: [Errno 116] Stale file handle\nstep 4 loss 1.1\nValueError: bad sample\n"
    assert examine(fault(0, "ValueError: bad sample"), text).rule == "python-exception"


def test_the_exception_that_ended_the_rank_goes_before_an_older_line() -> None:
    text = b"FileNotFoundError: no such file or directory: 'cache'\nRuntimeError: CUDA out of memory\n"
    assert examine(fault(0, "RuntimeError: CUDA out of memory"), text).rule == "gpu-out-of-memory"


@pytest.mark.parametrize(
    ("code", "kind", "rule", "role"),
    [
        (-11, FaultKind.SIGNAL, "native-crash", LineRole.UNCLEAR),
        (139, FaultKind.EXIT, "native-crash", LineRole.UNCLEAR),
        (-15, FaultKind.SIGNAL, "stopped", LineRole.ECHO),
        (143, FaultKind.EXIT, "stopped", LineRole.ECHO),
        (-9, FaultKind.SIGNAL, "", LineRole.UNCLEAR),
    ],
)
def test_without_a_line_the_exit_code_tells(code: int, kind: FaultKind, rule: str, role: LineRole) -> None:
    finding = examine(fault(0, kind=kind, code=code), b"")
    assert (finding.rule, finding.role) == (rule, role)


def test_equal_failures_have_equal_fingerprints() -> None:
    one, other = (fault(r, f"ValueError: sample {r} in /data/{r}/x.bin at 0x7f{r}") for r in (1, 2))
    assert examine(one, b"").fingerprint == examine(other, b"").fingerprint
    assert examine(one, b"").fingerprint != examine(fault(1, "KeyError: 'lr'"), b"").fingerprint


def test_one_lost_node_goes_before_what_its_peers_say() -> None:
    lost = RankFault(FaultKind.NODE_LOST, "n9", 9, message="its connection was closed")
    verdict = judge([report(0), report(1), lost], 4)
    assert verdict is not None and verdict.cause is lost and verdict.blame is Blame.NODE


def test_a_rule_about_a_node_that_many_nodes_show_excludes_none() -> None:
    line = FAILURES["gpu-not-initialized"][0]
    verdict = judge([report(rank, line) for rank in (0, 2, 4)], 4)
    assert verdict is not None and verdict.nodes == 3
    assert (verdict.remedy, verdict.confidence) == (Remedy.RESTART, Confidence.LIKELY)


def test_a_missing_file_on_all_ranks_of_one_node_points_to_the_node() -> None:
    line = FAILURES["file-missing"][0]
    verdict = judge([report(rank, line) for rank in (2, 3)], 4)
    assert verdict is not None and (verdict.blame, verdict.confidence) == (Blame.NODE, Confidence.GUESS)


def test_the_same_failure_of_the_script_is_counted_whichever_rank_was_the_first() -> None:
    verdict = of_job("ValueError: bad sample 4")
    assert verdict.cause.finding is not None
    mark = verdict.cause.finding.fingerprint
    before = [RestartRecord(0, 1.0, 1.0, "", 0, "other"), RestartRecord(1, 3.0, 1.0, "", CULPRIT + 1, mark)]
    assert repeats(mark, before) == 2
    assert repeats(mark, before[::-1]) == 1  # another failure came between
    weeks = [RestartRecord(n, 0.0, 1.0, "", CULPRIT, mark, ran_s=ran_s) for n, ran_s in enumerate((6e5, 2.8e6))]
    assert repeats(mark, weeks) == 1  # it got much further in between
    fault = replace(verdict.cause, finding=replace(verdict.cause.finding, blame=Blame.NODE))
    judged = [judge([cause], 4, before) for cause in (verdict.cause, fault)]
    assert [found.times for found in judged if found is not None] == [2, 1]  # only the user's code counts


@pytest.mark.parametrize(
    "text", [b"\0" * TAIL_BYTES, b"\xff\xfe" * 1000, b"x" * (4 * TAIL_BYTES), b"\x1b[2J\r" * 9000, b""]
)
def test_hostile_output_is_read(text: bytes) -> None:
    assert examine(fault(0), text, text).rule == ""


@pytest.mark.parametrize(
    "text",
    ["1 " * 30_000 + "Traceback (most recent call last)", "Traceback (most recent call last)\n" * 1900,
     "7a" * 90 + "Traceback (most recent call last):\n" + "7" * 60_000,
     "Traceback (most recent call last)\n" + " \n" * 32_000],
)  # fmt: skip
def test_hostile_tracebacks_take_little_time(text: str) -> None:
    began_s = time.process_time()
    raised_in(text)
    assert time.process_time() - began_s < 0.5


def test_8_000_faults_are_judged() -> None:
    """The target is 200 ms; this bound only catches what is quadratic."""
    faults = [report(0)] * 1
    faults = [replace(faults[0], rank=rank, infra_rank=rank // 8) for rank in range(8_000)]
    began_s = time.monotonic()
    verdict = judge([*faults, report(CULPRIT, FAILURES["gpu-ecc"][0])], 1_000)
    assert verdict is not None and verdict.rule == "gpu-ecc"
    assert time.monotonic() - began_s < 5.0


def test_no_rule_is_certain_and_wrong() -> None:
    wrong = Counter(
        of_job(line).rule
        for rule, line in CASES
        if of_job(line).confidence is Confidence.CERTAIN and of_job(line).rule != rule
    )
    assert not wrong
    assert first_cause([]) is None


def test_the_page_shows_the_signatures() -> None:
    page = Path(__file__).parents[2] / "docs/reference/attribution.md"
    fresh = page.read_text() == signaturedoc.render()
    assert fresh, "run: python scripts/lib/signaturedoc.py docs/reference/attribution.md"


QUOTED = (
    "INFO resuming from step checkpoint: previous run ended due to node failure",
    "srun: error: Node failure on node777",
    "sample> my gpu says: RuntimeError: No CUDA GPUs are available, what now?",
    "[1.0] NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus",
    "sample> CUDA error: uncorrectable ECC error encountered",
)
HARMLESS = (
    "[transformers] There were missing keys in the checkpoint model loaded: ['lm_head.weight'].",
    "WARNING missing key(s) in state_dict: 'lm_head.weight', which is tied",
    "error: unrecognized arguments: --lr, ignored",
    "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress packet error",
    "mce: [Hardware Error]: Corrected error, no action required.",
    "[1.0] NVRM: Xid (PCI:0000:3b:00): 63, pid=1, Row Remapper: New row marked for remapping",
)


@pytest.mark.parametrize(("line", "code"), [*product(HARMLESS, (-9, 137, -11, -6)), *product(HARMLESS + QUOTED, (1,))])
def test_a_harmless_or_quoted_line_explains_no_end(line: str, code: int) -> None:
    kind, error = (FaultKind.SIGNAL if code < 0 else FaultKind.EXIT), "ValueError: bad" if code == 1 else ""
    found = examine(fault(0, error, kind, code), f"{line}\nanother line\n{error}\n".encode())
    assert found.remedy is Remedy.RESTART and found.blame is not Blame.NODE
    assert code in (1, -6) or (found.rule in ("", "native-crash") and found.blame is Blame.UNKNOWN)


IB = (
    "n3:1:2 [0] NCCL WARN NET/IB : Got completion from peer 10.0.0.7<4791> with status=12 opcode=1 len=0 vendor err 129"
)
WEAKER_FIRST = (
    fault(0, "RuntimeError: Connection closed by peer [10.0.0.7]:4711"),
    fault(1, f"torch.distributed.DistBackendError: {IB}"),
    fault(2, "RuntimeError: mat1 and mat2 shapes cannot be multiplied"),
    fault(3, "KeyError: 'text'"),
    fault(4, kind=FaultKind.SIGNAL, code=-9),
    fault(5, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
)


@pytest.mark.parametrize(("weaker", "stronger"), [*pairwise(WEAKER_FIRST)], ids=range(5))
def test_the_order_of_evidence(weaker: RankFault, stronger: RankFault) -> None:
    assert first_cause([weaker, stronger]) is first_cause([stronger, weaker]) is stronger


def test_the_log_of_a_killed_rank_may_hold_what_its_peers_say() -> None:
    killed = fault(0, kind=FaultKind.SIGNAL, code=-9)
    assert examine(killed, STORM.format(r=1).encode()).rule == ""
    assert examine(replace(killed, exit_code=-6), STORM.format(r=1).encode()).role is LineRole.ECHO


def test_a_quoted_line_does_not_explain_what_a_peer_did() -> None:
    error = "torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error"
    assert examine(fault(0, error), f"{QUOTED[3]}\n{error}\n".encode()).role is LineRole.ECHO


def test_a_script_that_quotes_a_log_blames_no_node() -> None:
    error = "ValueError: cannot parse 'CUDA error: uncorrectable ECC error encountered'"
    raised = replace(fault(0, error), traceback=f"Traceback (most recent call last):\n  File 'x'\n{error}\n")
    assert examine(raised, b"").blame is Blame.USER


QUOTING = (
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for Row\ntext\n"
    "  Input should be a valid integer [type=int_parsing, input_value='my GPU is lost in the mail', input_type=str]",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error, input_value='my GPU is lost in the mail'",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\nmy GPU is lost in the mail",
    "datasets.exceptions.DatasetGenerationError: row 7: the gpu is lost",
    "mypkg.ValueError: 'uncorrectable NVLink error'",
    "RuntimeError: Caught KeyError in DataLoader worker process 0.\nsample: 'uncorrectable ECC error encountered'",
    "yaml.scanner.ScannerError: in 'GPU 3 has fallen off the bus'",
    "mypkg.errors.RuntimeError: cannot parse 'uncorrectable ECC error encountered'",
    f"pyarrow.lib.ArrowInvalid: CSV parse error: {QUOTED[3]}",
    f"RuntimeError: cannot parse {QUOTED[3]}",
    "RuntimeError: cannot parse 'CUDA error: uncorrectable ECC error encountered'",
)


@pytest.mark.parametrize("error", QUOTING)
def test_an_exception_that_quotes_a_line_excludes_no_node(error: str) -> None:
    trace = f'Traceback (most recent call last):\n  File "train.py", line 4, in <module>\n    main()\n{error}\n'
    raised = replace(fault(0, error.partition("\n")[0]), traceback=trace)
    found = examine(raised, trace.encode())
    assert found.confidence is not Confidence.CERTAIN and found.remedy is Remedy.RESTART


@pytest.mark.parametrize(("code", "kind"), [(1, FaultKind.EXIT), (-9, FaultKind.SIGNAL), (0, FaultKind.HANG)])
def test_a_last_line_that_is_no_exception_excludes_no_node(code: int, kind: FaultKind) -> None:
    found = examine(fault(0, kind=kind, code=code), b"row 7 failed: my GPU is lost in the mail\nbye\n")
    assert found.confidence is not Confidence.CERTAIN and found.remedy is not Remedy.ELSEWHERE


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "AcceleratorError: CUDA error: uncorrectable ECC error encountered",
        "torch.distributed.DistBackendError: NCCL error: uncorrectable NVLink error detected during the execution",
        "cupy_backends.cuda.api.runtime.CUDARuntimeError: cudaErrorECC: uncorrectable ECC error encountered",
        "pynvml.NVMLError_GpuIsLost: GPU is lost",
    ],
)
def test_what_a_device_library_raises_excludes_the_node(error: str) -> None:
    found = examine(fault(0, error), b"")
    assert (found.blame, found.confidence, found.remedy) == (Blame.NODE, Confidence.CERTAIN, Remedy.ELSEWHERE)


def test_what_native_code_says_as_it_aborts_excludes_the_node() -> None:
    text = "terminate called\n  what():  CUDA error: uncorrectable ECC error encountered\n"
    for code, kind in ((-6, FaultKind.SIGNAL), (134, FaultKind.EXIT)):
        assert examine(fault(0, kind=kind, code=code), text.encode()).remedy is Remedy.ELSEWHERE


@pytest.mark.parametrize(
    "error", ["CUDA driver version is insufficient for CUDA runtime", "No CUDA GPUs are available"]
)
def test_a_wrong_container_excludes_no_node(error: str) -> None:
    fault = RankFault(FaultKind.EXIT, "n1", 1, 3, 3, 99, 1, f"RuntimeError: {error}", "Traceback")
    assert examine(fault, b"").confidence is not Confidence.CERTAIN


def test_a_rule_of_the_site_comes_first_and_takes_linear_time() -> None:
    site = Signature(
        "site-rule", "site", ("stale * handle", "aaaa" + "*a" * 20 + "*b"), LineRole.CAUSE, Blame.NETWORK,
        Confidence.LIKELY, Remedy.RESTART, "ask the site", printed=True,
    )  # fmt: skip
    rules.use([site])
    try:
        found = replace(fault(0), finding=examine(fault(0), b"OSError: [Errno 116] Stale file handle\n"))
        assert found.finding is not None and found.finding.rule == "site-rule"
        assert (rules.topic(found), what_to_do(found, of_site=True)) == ("site", "ask the site")
        assert what_to_do(found) == ""
        began = time.process_time()
        examine(fault(0), b"a" * TAIL_BYTES)
        assert time.process_time() - began < 0.5
    finally:
        rules.use(())


def test_a_coordinator_judges_by_the_built_in_rules_only() -> None:
    site = Signature(
        "site-rule", "site", ("stale file handle",), LineRole.CAUSE, Blame.NODE, Confidence.CERTAIN, Remedy.ELSEWHERE,
        "ask the site", printed=True,
    )  # fmt: skip
    without = fault(0, "OSError: [Errno 116] Stale file handle")  # no finding
    built_in = judge([without], 4)
    rules.use([site])
    try:
        assert examine(without, b"").rule == "site-rule"
        assert judge([without], 4) == built_in
    finally:
        rules.use(())
    assert built_in is not None and built_in.rule == "storage-error"


def test_each_class_says_what_to_do() -> None:
    assert all(0 < len(signature.advice) <= 130 for signature in SIGNATURES)
    ended = [replace(fault(0, "E"), kind=kind) for kind in FaultKind if kind is not FaultKind.EXCLUDED]
    told = [what_to_do(one) for one in ended]
    raised = fault(0, "KeyError: 1")
    told.append(what_to_do(replace(raised, finding=examine(raised, b""))))
    assert all(told) and len(set(told)) == len(told)


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda signature: signature.name)
def test_no_line_takes_long(signature: Signature) -> None:
    """Patterns hold the GIL of the agent. 64 KiB of the rule's own words, on one line."""
    fault = RankFault(FaultKind.SIGNAL, "n1", 1, 3, 3, 99, -6, "", "")
    words = re.findall(r"[a-z_]{3,}", signature.pattern)
    for unit in (*signature.texts, " ".join([*signature.texts, *words])):
        text = (unit.encode() + b" ") * (65536 // (len(unit) + 1))
        began = time.process_time()
        examine(fault, text)
        assert time.process_time() - began < 0.5
