"""The second corpus (`corpus/world/*.yaml`): texts of the years 2024 to 2026, and hard negatives, scored.

`python tests/attribution/world.py` prints the table; with `seen`, `negatives` or `fresh` also what is wrong there.
The cases that are put aside stay unread: no rule is written after them.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from typing import NamedTuple

import yaml
from cases import CORPUS, Case, Try, _case, tries

FOLDER = CORPUS / "world"
OWN = ("negatives", "fresh")  # parts that have a file of their own
PARTS = ("seen", "aside", *OWN)
# A wrong answer of these classes says how the rank ended, and nothing that sends a reader elsewhere.
NEUTRAL = ("code", "killed", "native-crash", "cuda-library", "nccl-error")


class Scores(NamedTuple):
    """The figures of one part; shares are of 1."""

    tries: int
    right: float
    confident: int  # answers that are certain or likely
    precision: float  # of those that are right
    misleading: float
    wrong_exclusions: int


def is_aside(name: str) -> bool:
    """A half of the second corpus is put aside."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 2 == 0


@cache
def cases(part: str) -> tuple[Case, ...]:
    """The cases of a part."""
    if part in OWN:
        files = [FOLDER / f"{part}.yaml"]
    else:
        files = [path for path in sorted(FOLDER.glob("*.yaml")) if path.stem not in OWN]
    found = [_case(raw) for path in files for raw in yaml.safe_load(path.read_text())]
    return tuple(case for case in found if part in OWN or is_aside(case.id) == (part == "aside"))


def misleads(one: Try) -> bool:
    """Whether an answer is wrong and sends its reader elsewhere."""
    return not one.right and (one.confident or one.found not in NEUTRAL)


def scores(part: str) -> Scores:
    """The figures of a part: each case bare, and in its shape."""
    done = list(tries(cases(part)))
    sure = [one for one in done if one.confident]
    return Scores(
        len(done),
        sum(one.right for one in done) / len(done),
        len(sure),
        sum(one.right for one in sure) / len(sure) if sure else 1.0,
        sum(map(misleads, done)) / len(done),
        sum(one.wrong_exclusion for one in done),
    )


def main(shown: str) -> None:
    """Print the table, and what is wrong in a part."""
    for part in PARTS:
        print(f"{part:10}", {name: round(value, 3) for name, value in scores(part)._asdict().items()})
    for one in tries(cases(shown)) if shown in ("seen", *OWN) else ():
        if not one.right:
            mark = "MISLEADS" if misleads(one) else ""
            print(f"    {one.id}: {one.topic} -> {one.found}/{one.blame} {mark} {'SURE' * one.confident}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
