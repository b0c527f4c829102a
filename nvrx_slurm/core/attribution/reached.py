"""How far a training got, by what its ranks print. Pure."""

from __future__ import annotations

import re

from nvrx_slurm.core.attribution.signatures import NO_PROGRESS, PROGRESS

_EXACT = 10  # steps between two lines; with more, one cannot tell two failures apart
_MOST_BYTES = 2048  # of a line that are looked at
_MOST_LINES = 100  # with a step and an error that are looked at, from the end
_PIECE_BYTES = 4096  # most ranks have made their last step there
_ITERATION = re.compile(
    rb"\b(?:step|iter|iteration)\b[^\w\n]{0,12}(\d{1,3}(?:,\d{3})+|\d{1,15})\b(?!\.\d)"
)
_BAR = re.compile(rb"\b(\d{1,15})/\d{3,15} \[\d\d:")
_NO_STEP = re.compile(rb"load|resum|restor|eval|valid|sav|shard|warm|checkpoint")


def progress(lower: bytes) -> int:
    """Where the last line begins (of a text in lower case) that shows that the rank went on; -1 without one."""
    end, left = len(lower), _MOST_LINES
    while end > 0:
        begin = lower.rfind(b"\n", 0, max(0, end - _PIECE_BYTES)) + 1
        for found in reversed([*PROGRESS.finditer(lower, begin, end)][-left:]):
            first = lower.rfind(b"\n", 0, found.start()) + 1
            last = lower.find(b"\n", found.end())
            line = lower[first : last if last >= 0 else len(lower)]
            if not NO_PROGRESS.search(line[:_MOST_BYTES]):
                return first
            left -= 1
        if not left:
            break
        end = begin
    return -1


def iteration(text: bytes) -> int:
    """The last step or iteration of the training that an output tells, also by tqdm's bar.

    -1 = none is known to within 10 steps. Lines about checkpoints, evaluation and the like tell none.
    """
    lines = text.lower().replace(b"\r", b"\n").split(b"\n")
    lines = [line for line in lines if not _NO_STEP.search(line)]
    for pattern in (_ITERATION, _BAR):
        found = [match for line in lines if (match := pattern.search(line))]
        numbers = [int(match[1].replace(b",", b"")) for match in found]
        before = [-1, *numbers]
        steps = [number for number, last in zip(numbers, before, strict=False) if number != last]
        if len(steps) > 1 and 0 < steps[-1] - steps[-2] <= _EXACT:
            return steps[-1]
    return -1
