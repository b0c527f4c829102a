"""Where in the user's code a rank failed: the file and line that a traceback or a dump of stacks points to. Pure."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)(?:,? in (\S+))?', re.MULTILINE)
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d|/nvrx_slurm/")
_PYTHON = "Traceback (most recent call last)"
_CURRENT = "Current thread "  # of faulthandler's dump, whose frames begin with the most recent call


def failing_line(traceback: str) -> str:
    """`FILE:LINE` of the innermost frame that is not a library's, else of the innermost frame; "" without any frame.

    `traceback`: Python's, of which the last exception counts, or faulthandler's dump, of which the current thread does.
    """
    found = frames(traceback)
    own = [place for place, library in found if not library]
    return (own or [place for place, _ in found] or [""])[0].partition(" in ")[0]


def frames(traceback: str) -> list[tuple[str, bool]]:
    """("FILE:LINE in FUNCTION", whether that is a library's) of the same thread, innermost first."""
    if _PYTHON in traceback:
        found = _FRAME.findall(traceback[traceback.rfind(_PYTHON) :])[::-1]
    else:
        found = _FRAME.findall(traceback.partition(_CURRENT)[2].partition("\n\n")[0] or traceback)
    return [(f"{file}:{line} in {function}", bool(_LIBRARY.search(file))) for file, line, function in found]
