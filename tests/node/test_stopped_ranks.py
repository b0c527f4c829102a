"""What a rank that was stopped because of another one has to say: a cause, or a consequence of the stop."""

import os
import time

import pytest

from nvrx_slurm.node.output.faults import of_stopped
from nvrx_slurm.types import FaultKind, RankFault

pytestmark = pytest.mark.process

TRACE = 'Traceback (most recent call last):\n  File "/w/t.py", line 1, in f\n    g()\n'
PEER = "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.7]:4711"


@pytest.mark.parametrize(
    "code, text, is_before, rule",
    [
        (-15, "", True, ""),  # it did what it was told
        (-9, "step 12\n", True, ""),
        (-15, f"{TRACE}ValueError: bad\n", True, "python-exception"),  # it was about to end
        (-15, f"{TRACE}{PEER}\n", True, "gloo-peer"),  # a victim
        (1, f"{TRACE}KeyError: 'x'\n", False, "python-exception"),
        (1, f"{TRACE}RuntimeError: no such handle\n", False, ""),  # perhaps because of the stop
        (1, f"{TRACE}RuntimeError: no such handle\n", True, "python-exception"),
        (-11, "", False, ""),
        (-6, "NVRM: Xid (PCI:0000:5d:00): 119, pid=1, Timeout\n", False, "gpu-xid"),
    ],
)
def test_what_it_has_to_say(code, text, is_before, rule, tmp_path):
    err = tmp_path / "rank.err"
    err.write_text(text)
    stopped_s = time.time() + (60 if is_before else -60)
    kind = FaultKind.SIGNAL if code < 0 else FaultKind.EXIT
    told = of_stopped(RankFault(kind, "n1", 1, 3, 1, 9, code), tmp_path / "rank.json", err, 0.0, stopped_s)
    assert (told.finding.rule if told.finding is not None else "") == rule


def test_it_takes_little_time(tmp_path):
    """A plan waits for this: the target is 10 ms for the ranks of a node that stop at once."""
    err = tmp_path / "rank.err"
    err.write_text("iteration 88 | lm loss: 2.1 | grad norm: 0.4 |\n" * 2000)
    fault, took_s = RankFault(FaultKind.SIGNAL, "n1", 1, 3, 1, 9, -15), []
    for _ in range(5):
        began_s = time.process_time()
        of_stopped(fault, tmp_path / "rank.json", err, 0.0, time.time())
        took_s.append(time.process_time() - began_s)
    assert min(took_s) < 0.02
    os.truncate(err, 0)
