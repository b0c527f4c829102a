"""The decision how long to wait for GPU memory between cycles (seed 000): bounded, best effort, by what is read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import pytest

from nvrx_slurm.agent.preflight_settings import Reclaim
from nvrx_slurm.agent.reclaim import READING_S, Ended, Reading, reading, wait_until_free
from nvrx_slurm.agent.resident import Answer
from nvrx_slurm.health import report

FULL, FREE = Reading({"GPU 0": 70000.0, "GPU 1": 3.0}), Reading({"GPU 0": 5.0, "GPU 1": 3.0})
LONG = Reclaim(1000.0, 512.0, 0.001)
SHORT = Reclaim(0.02, 512.0, 0.001)
LINE = '{"node": "n", "when": "preflight", "findings": [%s], "notes": [], "seconds": 0}'
FINDING = '{"check": "gpu-memory", "verdict": "%s", "text": "%s", "seconds": 0, "action": ""}'


def waited(wanted: Reclaim, *readings: Reading) -> Ended:
    """How it ends with these readings; the last one stays."""
    left = list(readings)

    async def read(seconds: float) -> Reading:
        assert 0 < seconds <= READING_S
        return left.pop(0) if len(left) > 1 else left[0]

    async def play() -> Ended:
        return await asyncio.wait_for(wait_until_free(wanted, read, asyncio.Event()), 30)

    return asyncio.run(play())


def test_it_waits_until_the_last_gpu_is_free() -> None:
    done = waited(LONG, FULL, Reading({"GPU 0": 600.0, "GPU 1": 900.0}), Reading({"GPU 0": 513.0, "GPU 1": 3.0}), FREE)
    assert done.free and done.there
    assert done.text.startswith("GPU memory was free after ")
    assert done.text.endswith("s: GPU 0 70000 -> 5 MiB, GPU 1 3 -> 3 MiB")


def test_what_is_within_the_tolerance_is_free() -> None:
    assert waited(SHORT, Reading({"GPU 0": 512.0})).free
    assert not waited(SHORT, Reading({"GPU 0": 512.5})).free
    assert waited(Reclaim(0.02, 600.0, 0.001), Reading({"GPU 0": 512.5})).free


def test_after_the_timeout_it_says_who_holds_how_much() -> None:
    done = waited(SHORT, FULL, Reading({"GPU 0": 60000.0, "GPU 1": 3.0}))
    assert not done.free and done.there
    assert re.match(r"1 of 2 GPUs hold more than 512 MiB after [\d.]+ s: GPU 0 70000 -> 60000 MiB, ", done.text)


def test_a_long_poll_does_not_make_it_longer() -> None:
    assert not waited(Reclaim(0.02, 512.0, 1000.0), FULL).free


def test_it_can_be_stopped() -> None:
    async def play(read: Callable[[float], Awaitable[Reading]]) -> Ended:
        closing = asyncio.Event()
        waiting = asyncio.ensure_future(wait_until_free(Reclaim(1000.0, 512.0, 1000.0), read, closing))
        await asyncio.sleep(0)
        closing.set()
        return await asyncio.wait_for(waiting, 30)

    async def full(seconds: float) -> Reading:
        return FULL

    assert not asyncio.run(play(full)).free


def test_without_gpus_or_with_sick_ones_it_goes_on() -> None:
    nothing = Reading({}, "no NVML here (Driver Not Loaded)", there=False)
    assert waited(LONG, nothing) == (True, "no GPU memory to wait for: no NVML here (Driver Not Loaded)", False)
    sick = Reading({}, "GPU 0: GPU is lost")
    assert waited(LONG, FULL, sick) == (False, "GPU memory cannot be read: GPU 0: GPU is lost", True)


@pytest.mark.parametrize(
    ("finding", "used_mb", "expected"),
    [
        (("pass", ""), {"GPU 0": 5.5}, Reading({"GPU 0": 5.5})),
        (("unknown", "timed out"), {}, Reading({}, "timed out")),
        (("not applicable", "no GPU"), {}, Reading({}, "no GPU", there=False)),
    ],
)
def test_an_answer_tells_the_memory_or_why_it_cannot(finding: tuple[str, str], used_mb, expected: Reading) -> None:
    found = report.from_json(LINE % (FINDING % finding))
    assert reading(Answer(found, used_mb)) == expected
