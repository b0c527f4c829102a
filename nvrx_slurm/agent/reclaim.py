"""The wait for the GPU memory of workers that are gone, before a restart (seed 000). Here is only the decision."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from nvrx_slurm.agent.preflight_settings import Reclaim
from nvrx_slurm.agent.resident import Answer
from nvrx_slurm.health.check import Verdict

READING_S = 10.0  # the most that one may take
_LEAST_S = 0.1


class Reading(NamedTuple):
    """MiB in use by GPU; none: `why`. `there`: whether there is something to read at all."""

    used_mb: Mapping[str, float]
    why: str = ""
    there: bool = True


class Ended(NamedTuple):
    """`text`: one sentence, with a number per GPU. `there`: whether a later wait makes sense."""

    free: bool
    text: str
    there: bool = True


def reading(answer: Answer) -> Reading:
    """The reading in an answer of the resident's."""
    if answer.used_mb:
        return Reading(answer.used_mb)
    findings = answer.report.findings
    there = any(finding.verdict is not Verdict.NOT_APPLICABLE for finding in findings)
    return Reading({}, "; ".join(finding.text for finding in findings), there)


async def wait_until_free(
    wanted: Reclaim, read: Callable[[float], Awaitable[Reading]], closing: asyncio.Event
) -> Ended:
    """Ask `read(seconds)` until no GPU holds too much, for `wanted.timeout_s` at most; sooner if `closing` is set or
    there is nothing to be read. `read` has to answer within its seconds (and a fraction)."""
    start_s = time.monotonic()
    first: Mapping[str, float] = {}
    while True:
        left_s = start_s + wanted.timeout_s - time.monotonic()
        used_mb, why, there = await read(max(_LEAST_S, min(READING_S, left_s)))
        if not there:
            return Ended(True, f"no GPU memory to wait for: {why}", there=False)
        if not used_mb:
            return Ended(False, f"GPU memory cannot be read: {why}")
        first = first or used_mb
        took_s = time.monotonic() - start_s
        numbers = ", ".join(f"{gpu} {first.get(gpu, mb):.0f} -> {mb:.0f} MiB" for gpu, mb in used_mb.items())
        busy = sum(mb > wanted.tolerance_mb for mb in used_mb.values())
        if not busy:
            return Ended(True, f"GPU memory was free after {took_s:.1f} s: {numbers}")
        if took_s >= wanted.timeout_s or await _set_within(closing, min(wanted.poll_s, wanted.timeout_s - took_s)):
            held = f"{busy} of {len(used_mb)} GPUs hold more than {wanted.tolerance_mb:g} MiB after {took_s:.1f} s"
            return Ended(False, f"{held}: {numbers}")


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True
