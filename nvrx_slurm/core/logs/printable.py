"""Text of a rank for a terminal: no byte of it acts on the terminal. Pure."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1, what reorders text, and surrogates, which cannot be encoded
_ACTS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text, in which each character that would act on a terminal is written as \\x1b or \\u202e is."""
    return _ACTS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
