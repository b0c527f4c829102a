"""Where in the user's code a rank failed: the file and line that a traceback or a dump of stacks points to. Pure."""

from __future__ import annotations

import re

_FRAME = re.compile(r'^[ |]*File "([^"\n]+)", line (\d+)', re.MULTILINE)
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib(?:64)?/python\d|/nvrx_slurm/")
_PYTHON = "Traceback (most recent call last)"
_CURRENT = "Current thread "  # of faulthandler's dump, whose frames begin with the most recent call


def failing_line(traceback: str) -> str:
    """`FILE:LINE` of the innermost frame that is not a library's, else of the innermost frame; "" without any frame.

    `traceback`: Python's, of which the last exception counts, or faulthandler's dump, of which the current thread does.
    """
    if _PYTHON in traceback:
        frames = _FRAME.findall(traceback[traceback.rfind(_PYTHON) :])[::-1]
    else:
        frames = _FRAME.findall(traceback.partition(_CURRENT)[2].partition("\n\n")[0] or traceback)
    own = [frame for frame in frames if not _LIBRARY.search(frame[0])]
    return next((f"{file}:{line}" for file, line in own or frames), "")
