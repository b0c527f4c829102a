"""Why a person should look at a job: the one table of these rules. Pure, and quick to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvrx_slurm.core.words import in_words

LONG_S = 60.0
_NOW_S = 1.0
_PASSING = ("electing", "waiting", "taking over", "stopping", "ending")


def needs_a_person(found: Mapping[str, Any], state_s: float) -> dict[str, str]:
    """The rules that hold, each with its sentence; {}: nobody needs to look. As `rules`."""
    return {name: sentence for name, (sentence, holds) in rules(found, state_s).items() if holds}


def rules(found: Mapping[str, Any], state_s: float) -> dict[str, tuple[str, bool]]:
    """Each rule with its sentence, and whether it holds.

    `found`: content of status.json. `state_s`: how long (seconds) the job is in its state. Raises KeyError, TypeError.
    """
    nodes, used, allowed = (
        found["nodes"],
        int(found["restarts"]["used"]),
        int(found["restarts"]["allowed"]),
    )
    gone = nodes["missing"] + nodes["excluded"]
    waits = found["waits"] or {}
    had_spares = nodes["expected"] > nodes["needed"]
    late_s = found["written"] - (waits.get("until") or found["written"])
    notes = (found.get("checkpoint") or {}).get("notes", ())
    ends = found["allocation_ends"]
    return {
        "no-spare": (
            f"no spare is left, {gone} of {nodes['expected']} nodes are gone",
            found["cycle"] >= 0
            and had_spares
            and gone > 0
            and nodes["active"] + nodes["spare"] <= nodes["needed"],
        ),
        "few-restarts": (
            f"{max(0, allowed - used)} of {allowed} restarts are left",
            used > 0 and allowed - used <= allowed // 10,
        ),
        "long-state": (
            f"{found['state']} for {in_words(state_s)}",
            found["state"] in _PASSING and state_s > LONG_S,
        ),
        "long-hang": (
            "a rank hangs, and looking at the others takes too long",
            bool(found["hang"]) and late_s > LONG_S,
        ),
        "time-limit": (
            "the time limit has come: Slurm ends the job, and only --until-done would requeue it",
            found["state"] == "running" and ends is not None and found["written"] >= ends - _NOW_S,
        ),
        "crash-loop": ("ranks die at their start again and again", found["state"] == "paused"),
        "checkpoint": ("; ".join(notes), bool(notes)),
        "no-progress": (
            f"{found['no_progress']} cycles without a new checkpoint",
            found["no_progress"] >= 2,
        ),
    }
