"""What a person should know about the checkpoints of a job that runs. Pure; times in seconds."""

from __future__ import annotations

from statistics import median

from nvrx_slurm.core.words import in_words

_LATE_S = 60.0  # a checkpoint is not late sooner than this
_ROOM = 1.1  # free space, as a multiple of the last checkpoint


def worries(
    age_s: float, intervals_s: list[float], same_as: str, size: int, free: int, save_s: float, warned_s: float
) -> dict[str, str]:
    """Sentences by what they are about; {} = all is well.

    `age_s`: since the last complete checkpoint, or since the cycle began if that is later; `intervals_s`: between the
    complete ones before; `same_as`: name of an earlier one with the same bytes; `size`, `free`: bytes of the last one,
    and on its disk; `save_s`: how long a save takes; `warned_s`: how long before the end of the allocation ranks are
    warned, 0 = they are not.
    """
    usual_s, found = median(intervals_s) if intervals_s else 0.0, dict[str, str]()
    if usual_s and age_s > max(2 * usual_s, _LATE_S):
        found["late"] = f"the last checkpoint is {in_words(age_s)} old, one came every {in_words(usual_s)}"
    if same_as:
        found["same"] = (
            f"the last checkpoint has the same bytes as {same_as}: is the state that trains the one that is saved?"
        )
    if size and free < _ROOM * size:
        found["disk"] = (
            f"the next checkpoint may not fit: {free >> 20} MiB are free, the last one took {size >> 20} MiB"
        )
    if 0.0 < warned_s < 1.5 * save_s:
        found["time"] = (
            f"a save takes {in_words(save_s)}, but ranks are warned {in_words(warned_s)} before the end:"
            f" --ft-warn-before-end {2 * save_s:.0f}"
        )
    return found
