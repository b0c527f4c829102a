"""Learned timeouts: a safety factor times the longest observed time, smoothed from one calculation to the next. Pure.

All times are seconds. Names, defaults and rules: reference 2.1 (HeartbeatTimeouts, SectionTimeouts). Inputs must be the
same on all ranks (the longest time of any rank); then the results are, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from nvrx_slurm.core.rank.watch import seconds

STATE_KEY = "current_timeouts"
_WEIGHT_OF_NEW = 0.5


class NotReady(ValueError):
    """There are too few observations to learn from; the text is one sentence."""


@dataclass(frozen=True)
class HeartbeatTimeouts:
    """Timeouts of heartbeats in seconds; None = no limit.

    `initial`: from init to the first one. `subsequent`: between two. `were_calculated`: learned, not configured
    (None = unknown).
    """

    initial: float | None = None
    subsequent: float | None = None
    were_calculated: bool | None = None

    @property
    def are_valid(self) -> bool:
        """Whether both limits exist."""
        return self.initial is not None and self.subsequent is not None


@dataclass(frozen=True)
class SectionTimeouts:
    """Timeouts of sections in seconds; None = no limit.

    `section`: by name. `out_of_section`: while no section is open. `calculated_sections` and
    `is_out_of_section_calculated`: which limits were learned; the others are the configured ones.
    """

    section: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None
    calculated_sections: frozenset[str] = frozenset()
    is_out_of_section_calculated: bool = False

    @property
    def were_calculated(self) -> bool:
        """Whether all limits were learned."""
        return self.calculated_sections == set(self.section) and self.is_out_of_section_calculated

    @property
    def are_valid(self) -> bool:
        """Whether every section, and the time outside, has a limit."""
        return self.out_of_section is not None and None not in self.section.values()


def learn_heartbeats(
    initial_s: float, longest_s: float, factor: float, current: HeartbeatTimeouts
) -> HeartbeatTimeouts:
    """New timeouts from the longest times until a first heartbeat and between two (s, 0 = not observed).

    Raises NotReady if one of them is 0. `factor` >= 1. Timeouts that were learned before count for one half.
    """
    if not initial_s or not longest_s:
        missing = "a first heartbeat" if not initial_s else "two heartbeats in a row"
        raise NotReady(f"heartbeat timeouts cannot be calculated yet: no rank has sent {missing}")
    learned_before = bool(current.were_calculated)
    return HeartbeatTimeouts(
        _merged(factor * initial_s, current.initial if learned_before else None),
        _merged(factor * longest_s, current.subsequent if learned_before else None),
        True,
    )


def learn_sections(
    longest_s: Mapping[str, float],
    longest_outside_s: float,
    factor: float,
    current: SectionTimeouts,
    selected: Collection[str],
    outside: bool,
) -> SectionTimeouts:
    """New timeouts of the `selected` sections, and if `outside` of the time in none.

    `longest_s`: the longest time in each configured section (0 = not observed), likewise `longest_outside_s`. Other
    sections keep their timeout. Raises NotReady if a selected time was not observed.
    """
    missing = [f"section {name!r}" for name in selected if not longest_s[name]]
    if outside and not longest_outside_s:
        missing.append("time out of all sections")
    if missing:
        raise NotReady(
            f"section timeouts cannot be calculated yet: no rank has completed {', '.join(missing)}"
        )
    limits = dict(current.section)
    for name in selected:
        before = current.section.get(name) if name in current.calculated_sections else None
        limits[name] = _merged(factor * longest_s[name], before)
    outside_limit = current.out_of_section
    if outside:
        before = outside_limit if current.is_out_of_section_calculated else None
        outside_limit = _merged(factor * longest_outside_s, before)
    return SectionTimeouts(
        limits,
        outside_limit,
        current.calculated_sections | frozenset(selected),
        current.is_out_of_section_calculated or outside,
    )


def _merged(new: float, before: float | None) -> float:
    return new if before is None else _WEIGHT_OF_NEW * new + (1 - _WEIGHT_OF_NEW) * before


def with_learned(configured: SectionTimeouts, learned: SectionTimeouts) -> SectionTimeouts:
    """`configured` with the limits of `learned` that were calculated; sections that are not configured are left out."""
    names = learned.calculated_sections & set(configured.section)
    use_outside = learned.is_out_of_section_calculated
    return SectionTimeouts(
        {
            name: learned.section[name] if name in names else limit
            for name, limit in configured.section.items()
        },
        learned.out_of_section if use_outside else configured.out_of_section,
        configured.calculated_sections | names,
        configured.is_out_of_section_calculated or use_outside,
    )


def to_message(heartbeats: HeartbeatTimeouts, sections: SectionTimeouts) -> dict[str, Any]:
    """The calculated limits by the names of `core.rank.watch.RankLimits`, for the rank monitor."""
    told: dict[str, Any] = {}
    if heartbeats.were_calculated:
        told["initial_rank_heartbeat_timeout"] = heartbeats.initial
        told["rank_heartbeat_timeout"] = heartbeats.subsequent
    if sections.is_out_of_section_calculated:
        told["rank_out_of_section_timeout"] = sections.out_of_section
    if sections.calculated_sections:
        told["rank_section_timeouts"] = {
            name: sections.section[name] for name in sorted(sections.calculated_sections)
        }
    return told


def to_state(heartbeats: HeartbeatTimeouts, sections: SectionTimeouts) -> dict[str, Any]:
    """The calculated limits as JSON-safe data, the same on all ranks."""
    timeouts: dict[str, Any] = {}
    if heartbeats.were_calculated:
        timeouts["heartbeat"] = asdict(heartbeats)
    if sections.calculated_sections or sections.is_out_of_section_calculated:
        names = sorted(sections.calculated_sections)
        learned = with_learned(SectionTimeouts(dict.fromkeys(names)), sections)
        timeouts["section"] = asdict(learned) | {"calculated_sections": names}
    return {STATE_KEY: timeouts}


def from_state(state: Mapping[str, Any]) -> tuple[HeartbeatTimeouts, SectionTimeouts]:
    """The calculated limits in a result of to_state(), also of NVRx. Raises ValueError, one sentence."""
    try:
        saved = state[STATE_KEY]
        return _heartbeats_from(saved.get("heartbeat") or {}), _sections_from(
            saved.get("section") or {}
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"it is no state with learned timeouts: {type(error).__name__}: {error}"
        ) from error


def _heartbeats_from(saved: Mapping[str, Any]) -> HeartbeatTimeouts:
    if not saved.get("were_calculated"):
        return HeartbeatTimeouts()
    initial, subsequent = (seconds(name, saved[name]) for name in ("initial", "subsequent"))
    return HeartbeatTimeouts(initial, subsequent, True)


def _sections_from(saved: Mapping[str, Any]) -> SectionTimeouts:
    names = frozenset(saved.get("calculated_sections", ()))
    use_outside = bool(saved.get("is_out_of_section_calculated"))
    return SectionTimeouts(
        {name: seconds(name, saved["section"][name]) for name in sorted(names)},
        seconds("out_of_section", saved["out_of_section"]) if use_outside else None,
        names,
        use_outside,
    )
