"""How far a job is and how fast: what status.json tells of it, and that in words. Pure, and quick to import.

Ages and times are by the coordinator's clock, in Unix seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nvrx_slurm.core.words import in_words
from nvrx_slurm.errors import ProtocolError

if TYPE_CHECKING:
    from nvrx_slurm.types import Pace

SILENT = 3  # intervals without news
_STILL_S, _STILL_STEPS = 60.0, 10  # no step for longer than both is told
_MOST_OPEN = 256
_NAME_CHARS = 32
# what a file raises that is damaged, or was not written by a program of ours
DAMAGE = (
    LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError, RecursionError, ProtocolError,
)  # fmt: skip

Found = dict[str, Any]  # (a part of) the content of status.json


def progress(told: Sequence[Pace]) -> Found | None:
    """What nodes told last of their ranks; None: nothing. `open`: [rank, section, seconds], the oldest first."""
    ranks = [rank for pace in told for rank in pace.paces]
    if not ranks:
        return None
    paces = sorted(rank.step_s for rank in ranks if rank.step_s > 0.0)
    inside = sorted((rank for rank in ranks if rank.section), key=lambda rank: -rank.section_s)[
        :_MOST_OPEN
    ]
    return {
        "ranks": len(ranks),
        "stepped": sum(rank.steps > 0 for rank in ranks),
        "steps": min(rank.steps for rank in ranks),
        "step_s": round(paces[len(paces) // 2], 6) if paces else None,
        "still_s": round(min(rank.still_s for rank in ranks), 1),
        "open": [
            [rank.rank, rank.section[:_NAME_CHARS], round(rank.section_s, 1)] for rank in inside
        ],
    }


def checkpoint(before: Found | None, iteration: int, time: float) -> Found:
    """A checkpoint; `every_s`, `iteration_s`: from the one before it to this one, and for each iteration between."""
    known = before or {"iteration": iteration, "time": time, "every_s": None, "iteration_s": None}
    more = iteration - known["iteration"]
    took_s = time - known["time"]
    found = {**known, "iteration": iteration, "time": time}
    return (
        found | {"every_s": took_s, "iteration_s": took_s / more}
        if more > 0 and took_s > 0.0
        else found
    )


def waits(found: Found, at: float) -> str:
    """What the job waits for at that time; "" for nothing."""
    if not (told := found["waits"]):
        return ""
    return str(told["why"]) + (
        f" (at most {in_words(max(0.0, told['until'] - at))} more)" if told["until"] else ""
    )


def pace(found: Found) -> Iterator[str]:
    """How far the ranks are, and how fast; nothing where they do not tell."""
    told, saved = found.get("progress") or {}, found.get("checkpoint") or {}
    if told and told["stepped"] < told["ranks"]:
        yield f"{told['stepped']} of {told['ranks']} ranks have begun to train"
    elif told:
        yield f"step {told['steps']} of this cycle"
    still_s = told.get("still_s", 0.0)
    if still_s > max(_STILL_S, _STILL_STEPS * (told.get("step_s") or 0.0)):
        yield f"no step for {in_words(still_s)}"
    if step_s := told.get("step_s") or saved.get("iteration_s"):
        yield f"{step_s:.3g} s for each"
        if found["allocation_ends"]:
            left = max(0.0, found["allocation_ends"] - found["written"]) / step_s
            yield f"about {left:.0f} more until the allocation ends"


def now_doing(found: Found, at: float) -> str:
    """One line for a terminal; "": the job has ended."""
    age_s = at - found["written"]
    if found["state"] == "ended":
        return ""
    if age_s > SILENT * found["interval_s"]:
        return f"the coordinator has been silent for {in_words(age_s)}"
    cycle = f"cycle {found['cycle']}: " if found["cycle"] >= 0 else ""
    state = f"{cycle}{found['state']} for {in_words(max(0.0, at - found['since']))}"
    return "; ".join(filter(None, [state, waits(found, at) or ", ".join(pace(found))]))
