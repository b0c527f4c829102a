"""Exceptions that hide another one, and ends that Slurm only follows."""

from __future__ import annotations

import pytest

from nvrx_slurm.core.attribution.evidence import examine
from nvrx_slurm.core.attribution.raised import raised_in
from nvrx_slurm.core.attribution.signatures import SIGNATURES
from nvrx_slurm.core.attribution.verdict import judge, owners_of
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Blame, Confidence, FaultKind, RankFault

pytestmark = pytest.mark.fast

HEAD = 'Traceback (most recent call last):\n  File "/w/train.py", line 3, in f\n    x()\n'
FROM = "\n\nThe above exception was the direct cause of the following exception:\n\n"
WHILE = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
FULL, OOM = f"{HEAD}OSError: [Errno 122] Disk quota exceeded", f"{HEAD}torch.OutOfMemoryError: CUDA out of memory."
DIED, PEER = f"{HEAD}RuntimeError: worker died", f"{HEAD}RuntimeError: Connection closed by peer [10.0.0.7]:4711"
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "/w/train.py", line 1, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "/w/train.py", line 2, in f
    | OSError: [Errno 122] Disk quota exceeded
    +---------------- 2 ----------------
    | Traceback (most recent call last):
    |   File "/w/train.py", line 9, in f
    | asyncio.exceptions.CancelledError
    +------------------------------------"""
LIBRARY = HEAD + '  File "/opt/v/lib/python3.11/site-packages/x/y.py", line 3, in g\n    y()\n'
QUOTED = (
    f"{LIBRARY}ray.exceptions.RayTaskError(AcceleratorError): ray::A.train() (pid=7, ip=10.0.0.7)\n"
    '  File "/w/a.py", line 3, in train\n    z()\ntorch.AcceleratorError: CUDA error: an illegal memory access was'
    " encountered"
)
GUESS, LIKELY = Confidence.GUESS, Confidence.LIKELY


@pytest.mark.parametrize("prefix", ["", "[rank3]: "])
@pytest.mark.parametrize(
    ("text", "rule", "sure"),
    [
        (FULL + FROM + DIED, "disk-full", LIKELY),
        (FULL + WHILE + DIED, "disk-full", LIKELY),
        (FULL + FROM + PEER, "disk-full", LIKELY),
        (OOM + WHILE + f"{HEAD}KeyError: 'x'", "gpu-out-of-memory", GUESS),  # of the handler
        (OOM + WHILE + FULL, "disk-full", GUESS),  # two owners
        (f"{FULL}\n{DIED}", "disk-full", GUESS),  # only printed above
        (f"Exception in thread Thread-3:\n{FULL}\n{DIED}", "disk-full", GUESS),
        (f"{DIED}\nException in thread Thread-3:\n{FULL}", "disk-full", GUESS),
        (f"{FULL}\nstep 12\n{DIED}", "python-exception", GUESS),  # the rank went on
        (f"{FULL}\n{PEER}", "gloo-peer", LIKELY),
        (f"{FULL}\n{HEAD}KeyError: 'x'", "python-exception", LIKELY),
        (GROUP, "disk-full", LIKELY),
        (QUOTED, "illegal-access", GUESS),
        (f"{LIBRARY}ValueError: bad header", "python-exception", GUESS),  # its words have to tell whose it is
        (f"{LIBRARY}TypeError: no shape", "python-exception", LIKELY),
        (f"{HEAD}ValueError: bad shape", "python-exception", LIKELY),
    ],
)
def test_a_hidden_cause_is_found_and_no_surer_than_its_chain(text, rule, sure, prefix):
    text = "\n".join(prefix + line for line in text.split("\n"))
    last = raised_in(text)
    fault = RankFault(FaultKind.EXIT, "n1", 1, 3, 1, 9, 1, last.headline, last.traceback)
    found = examine(fault, text.encode())
    assert (found.rule, found.confidence) == (rule, sure)


def test_the_root_of_unknown_exceptions_is_told():
    text = f"{HEAD}ValueError: bad shape{FROM}{DIED}"
    last = raised_in(text)
    fault = RankFault(FaultKind.EXIT, "n1", 1, 3, 1, 9, 1, last.headline, last.traceback)
    assert examine(fault, text.encode()).line == "ValueError: bad shape"


def test_a_step_that_slurm_cancels_after_a_kill_for_memory_is_no_cause():
    cancelled = b"slurmstepd: error: *** STEP 77.0 ON n1 CANCELLED AT 2026-03-01T10:00:00 ***\n"
    killed = b"slurmstepd: error: Detected 1 oom_kill event in StepId=77.0.\n"
    told = {2: cancelled, 3: killed + cancelled}
    faults = [RankFault(FaultKind.SIGNAL, f"n{n}", n, n, 0, 9, -15 if n == 2 else -9, "") for n in told]
    found = [replace(one, finding=examine(one, told[one.rank])) for one in faults]
    verdict = judge(found, 4)
    assert (verdict.rule, verdict.cause.rank) == ("cgroup-out-of-memory", 3)
    alone = judge(found[:1], 4)
    assert (alone.rule, alone.blame, alone.confidence) == ("slurm-step-cancelled", Blame.SLURM, GUESS)


def test_a_rule_with_two_owners_is_a_guess_and_names_both():
    assert all(s.confidence is GUESS for s in SIGNATURES if s.or_blame)
    fault = RankFault(FaultKind.EXIT, "n1", 1, 3, 1, 9, 1, "RuntimeError: No CUDA GPUs are available")
    fault = replace(fault, finding=examine(fault, fault.message.encode()))
    verdict = judge([fault], 4)
    assert verdict.sentence.startswith("node n1 is to blame (guess)")
    assert owners_of(verdict.rule, verdict.blame) == [Blame.NODE, Blame.USER]
