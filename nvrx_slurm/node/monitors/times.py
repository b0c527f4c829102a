"""What the page of a rank says about its time. The rank may have written anything there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nvrx_slurm.core.account.rank_times import RankTimes
from nvrx_slurm.core.rank.sections import kind_of
from nvrx_slurm.core.rank.watch import STEP_SECTION, slots_of
from nvrx_slurm.core.straggler.detector import Reading
from nvrx_slurm.monitor import page
from nvrx_slurm.types import SectionTime

# What a script tells of its steps replaces those of its optimizer.
_TOLD = page.BEATS, page.FIRST_BEAT, page.SECOND_BEAT, page.HEARTBEAT
_COUNTED = page.STEPS, page.FIRST_STEP, page.SECOND_STEP, page.STEP


def waits_of(words: Sequence[int], names: Sequence[str], is_wait: Callable[[str], bool]) -> Reading | None:
    """How long the rank has waited for others, by its sections `names`; None: never, or it does not tell."""
    waits = waited_ns = until_ns = 0
    for slot, name in enumerate(names):
        if is_wait(name):
            waits += max(0, words[page.TIMES + slot])
            until_ns = max(until_ns, words[page.ENDED + slot])
        if is_wait(name) or kind_of(name) in ("checkpoint", "reload", "init"):
            waited_ns += words[page.SPENT + slot]
    most = 1 << 62
    return Reading(waits, waited_ns / 1e9, until_ns / 1e9) if 0 < waits < most and 0 <= waited_ns < most else None


def times_of(words: Sequence[int], names: Sequence[str], released_s: float, until_s: float) -> RankTimes:
    """`words` of the page of a rank that was released and ended (or lives) at these monotonic seconds. `names`: of its
    sections, in the order of the page."""
    lived_s = until_s - released_s

    def at_s(word: int) -> float:
        return words[word] / 1e9 if released_s <= words[word] / 1e9 <= until_s else 0.0

    def length_s(word: int) -> float:
        return min(max(0.0, words[word] / 1e9), lived_s)

    slots = [name for name, _ in slots_of(list(names))]
    since_s = [at_s(page.SECTIONS + slot) for slot in range(len(slots))]
    last = since_s.index(max(since_s)) if any(since_s) else -1  # it began last of those that are open
    spent_s = [length_s(page.SPENT + slot) for slot in range(len(slots))]
    if last >= 0:
        spent_s[last] += until_s - max(at_s(page.TURN), since_s[last])
    sections: dict[str, SectionTime] = {}
    for slot, name in enumerate(slots):
        old, times = sections.get(name, SectionTime(name, 0.0)), min(max(0, words[page.TIMES + slot]), 1_000_000)
        sections[name] = SectionTime(name, old.took_s + spent_s[slot], old.times + times)
    told = words[page.BEATS] > 0 or STEP_SECTION in sections and sections[STEP_SECTION].times > 0
    beats, first_at, second_at, last_at = _TOLD if told else _COUNTED
    others_s = sum(section.took_s for section in sections.values() if section.name != STEP_SECTION)
    saved_s, kept_s = at_s(page.SAVED), at_s(page.KEPT)
    steps = words[page.BEATS] or words[page.STEPS]
    reached = words[page.KEPT_ITERATION] - 1 + max(0, steps - words[page.KEPT_STEPS])
    return RankTimes(
        released_s=released_s,
        until_s=until_s,
        init_s=at_s(page.FIRST_INIT) or at_s(page.STEPS_SINCE),
        first_s=at_s(first_at),
        second_s=at_s(second_at),
        last_s=at_s(last_at),
        turn_s=at_s(page.TURN),
        saved_s=max(saved_s, kept_s),
        after_s=max(0.0, others_s - length_s(page.BEFORE_SAVED)) if saved_s > kept_s else 0.0,
        before_s=length_s(page.BEFORE),
        beats=min(max(0, words[beats]), 1 << 40),
        longest_s=0.0 if told or any(since_s) or words[page.TURN] else length_s(page.LONGEST_STEP),
        reached=reached if words[page.KEPT_ITERATION] > 0 and 0 <= reached < 1 << 62 else -1,
        counts=at_s(page.STEPS_SINCE) > 0.0,
        suspended_s=length_s(page.SUSPENDED),
        sections=tuple(section for section in sections.values() if section.took_s > 0.0),
        section=slots[last] if last >= 0 else "",
        since_s=since_s[last] if last >= 0 else 0.0,
    )
