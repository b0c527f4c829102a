"""What ranks say when they are looked at is not trusted; a worker that ends is not waited for."""

import asyncio
import json
from typing import cast

import pytest

from nvrx_slurm import types as t
from nvrx_slurm.control.messages import FROM_AGENTS
from nvrx_slurm.control.stream import MAX_MESSAGE_BYTES
from nvrx_slurm.declared import replace
from nvrx_slurm.node.monitors.inspection import inspect
from nvrx_slurm.node.monitors.monitors import RankMonitor

pytestmark = pytest.mark.process


SEEN = {"pid": 7, "state": "S", "moves": False, "stack": "", "record": "[]", "section": "", "silent_s": 1.0}


class Monitor:
    """Says `answer`; None: its worker has ended, ...: nothing."""

    def __init__(self, answer):
        self._answer = answer

    def inspect(self, within_s):
        found = asyncio.get_running_loop().create_future()
        if self._answer is not ...:
            found.set_result(self._answer)
        return found


def inspected(within_s, *answers):
    """The evidence of workers whose monitors give these answers, {} for the usual one."""

    async def play():
        monitors = [Monitor(SEEN | answer if isinstance(answer, dict) else answer) for answer in answers]
        workers = [t.RankFault(t.FaultKind.HANG, "n0", 0, rank, rank, pid=7) for rank in range(len(answers))]
        return await asyncio.wait_for(inspect(workers, cast(list[RankMonitor], monitors), within_s), 5.0)

    return asyncio.run(play())


RECORDS = (
    *("", "no JSON", "{}", '{"a": 1}', "[1]", "[[1, 2]]", '[["0", Infinity, "x", true]]', '[["0", -5, "x", true]]'),
    *(f'[["0", {10**30}, "\\u001b[31m", 1]]', "[" * 10_000, json.dumps([[str(n), n, "x", 0] for n in range(99)])),
)


@pytest.mark.parametrize("record", RECORDS)
def test_any_record_can_be_sent(record):
    stack = 'Current thread 0x1 (most recent call first):\n  File "/w/\x1b[31m.py", line 3 in f\n'
    found = inspected(9.0, {"record": record, "stack": stack}, None)
    sent = FROM_AGENTS.decode(FROM_AGENTS.encode(t.Evidence(1, 3, found)))
    assert sent == t.Evidence(1, 3, found)
    [rank] = found
    assert rank.frames == ("/w/ [31m.py:3 in f",) and len(rank.collectives) <= 8
    assert all(collective.what.isprintable() and collective.seq >= 0 for collective in rank.collectives)


def test_the_evidence_of_64_ranks_fits_into_one_message():
    stack = "Current thread 0x1 (most recent call first):\n"
    stack += "".join(f'  File "/{chr(0x4E2D) * 200}.py", line 3 in {chr(0x4E2D) * 200}\n' for _ in range(20))
    record = json.dumps([[chr(0x4E2D) * 200, n, chr(0x4E2D) * 200, True] for n in range(9)])
    [rank] = inspected(9.0, {"record": record, "stack": stack, "section": "s" * 256}, None)
    assert {(text[:3], len(text)) for text in rank.frames} == {("...", 120)}  # it says that it is cut
    message = t.Evidence(1, 3, (replace(rank, log="/" * 4096, host="h" * 64),) * 64)
    assert len(FROM_AGENTS.encode(message)) < MAX_MESSAGE_BYTES


def test_a_worker_that_has_ended_is_not_waited_for_and_one_that_does_not_answer_is_left_out():
    assert len(inspected(9.0, {}, None)) == 1
    assert inspected(9.0, None, None) == inspected(9.0) == ()
    assert [rank.rank for rank in inspected(0.01, ..., {})] == [1]
