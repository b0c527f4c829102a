"""What a person should know about the checkpoints of a job that runs. Pure; times in seconds."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from nvrx_slurm.core.words import in_words

_LAST = 16  # checkpoints that tell the usual interval
_LATE_S = 60.0  # a checkpoint is not late sooner than this
_ROOM = 1.1  # free space, as a multiple of the last checkpoint


def worries(
    age_s: float,
    saved_s: list[float],
    same_as: str,
    sizes: tuple[int, int],
    save_s: float,
    warned_s: float,
) -> dict[str, str]:
    """Sentences by what they are about; {} = all is well.

    `age_s`: since the last complete checkpoint, or since the cycle began if that is later; `saved_s`: when complete
    ones were saved, in order; `same_as`: name of an earlier one with the same bytes; `sizes`: bytes of the last one,
    and free ones on its disk; `save_s`: how long a save takes; `warned_s`: how long before the end of the allocation
    ranks are warned, 0 = they are not.
    """
    usual_s, found = (
        median([later - earlier for earlier, later in pairwise(saved_s[-_LAST:])] or [0.0]),
        dict[str, str](),
    )
    if usual_s > 0.0 and age_s > max(2 * usual_s, _LATE_S):
        found["late"] = (
            f"the last checkpoint is {in_words(age_s)} old, one came every {in_words(usual_s)}"
        )
    if same_as:
        found["same"] = (
            f"the last checkpoint has the same bytes as {same_as}: does the script save what it trains?"
        )
    if sizes[1] < _ROOM * sizes[0]:
        taken, free = (f"{size >> 20} MiB" for size in sizes)
        found["disk"] = (
            f"the next checkpoint may not fit: {free} are free, the last one took {taken}"
        )
    if 0.0 < warned_s < 1.5 * save_s:
        told = f"a save takes {in_words(save_s)}, but ranks are warned {in_words(warned_s)} before the end"
        found["time"] = f"{told}: --ft-warn-before-end {2 * save_s:.0f}"
    return found
