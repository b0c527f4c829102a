"""What known failures print, from the table `signatures.txt`; docs/reference/attribution.md explains and shows it.

The texts are those of PyTorch, NCCL, Gloo, CUDA, Slurm, Linux and Python, as their sources and public reports show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from nvrx_slurm.types import Blame, Confidence, LineRole, Remedy


class Signature(NamedTuple):
    """One known failure. It matches a line that holds one of its texts, and its pattern where it has one."""

    name: str
    topic: str  # the class of failures that it is of
    texts: tuple[
        str, ...
    ]  # lower case, as the line is; "*" stands for anything, "?" marks common words: a guess
    role: LineRole
    blame: Blame
    confidence: Confidence
    remedy: Remedy
    advice: str  # what the user can do, one line
    pattern: str = ""  # of the lower-case line; "" = the texts are enough
    one_node: bool = False  # on the ranks of one node only: that node is to blame
    # counts anywhere in the output, not only in the exception that ended the rank
    printed: bool = False
    is_field: bool = False  # what a vendor's own verdict says, with its number or node; no later progress makes it void
    # although it blames the user, it explains a signal that no program sends itself
    kills: bool = False
    or_blame: Blame | None = None  # the other owner, where the text cannot tell which it is


def _signatures(table: str) -> Iterator[Signature]:
    advice: dict[str, str] = {}
    for row in table.replace("\n    ", " ").splitlines():
        if row.startswith("["):
            topic, _, rest = row[1:-1].partition(": ")
            role, blame, confidence, remedy, *flags = rest.split()
        elif row.startswith("> "):
            advice[topic] = row.removeprefix("> ")
        elif not row.startswith("#"):
            name, _, rest = row.partition(":")
            texts, _, pattern = rest.partition(" ~ ")
            # none: of a place only
            words = tuple(texts.strip().split("; ")) if texts.strip() else ()
            first, *second = map(Blame, blame.split("|"))
            given: dict[str, Any] = dict.fromkeys(flags, True)
            kind = LineRole(role), first, Confidence(confidence), Remedy(remedy)
            yield Signature(
                name,
                topic,
                words,
                *kind,
                advice[topic],
                pattern.strip(),
                or_blame=second[0] if second else None,
                **given,
            )


with open(f"{__file__.removesuffix('.py')}.txt", encoding="utf-8") as table:
    SIGNATURES = tuple(_signatures(table.read()))
ADVICE = (
    "asynchronously reported",
    "cuda_launch_blocking",
    "torch_use_cuda_dsa",
    "may be caused by",
    "to debug",
)
RETRIED = re.compile(rb"\bretrying\b|\bretry in\b|\bsucceeded\b|\battempt \d+ ?(/|of) ?\d+")
PROGRESS = re.compile(rb"\b(?:step|iter|iteration|epoch|loss)\b\W{0,3}\d")
NO_PROGRESS = re.compile(
    rb"\A  |error|\bnan\b|failed|exception|traceback"
)  # of a line with such a word
