"""Text of a rank for a terminal: no byte of it acts on the terminal. Pure."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL, C1, and what reorders text
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: bytes) -> str:
    """The text, in which each character that would act on a terminal is written as \\x1b or \\u202e is."""
    return _ACTS.sub(_written, text.decode("utf-8", "replace"))


def _written(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
