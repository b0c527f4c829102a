"""What the last exception of an output hides: its causes, and exceptions of other threads. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from nvrx_slurm.core.attribution.raised import (
    FROM,
    OF_CODE,
    RAISED,
    TRACEBACK,
    WHILE,
    WRAPPERS,
    raised,
    raised_in,
)
from nvrx_slurm.core.attribution.reached import progress
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Confidence, Finding, LineRole, RankFault

_MOST_EXCEPTIONS = 8  # of an output


def of_chain(
    fault: RankFault, found: Finding, stderr: bytes, examined: Callable[[RankFault], Finding]
) -> Finding:
    """What was `found`, or what an exception tells that the last one hides: no surer than both together are."""
    is_code = OF_CODE.match(fault.message) is not None
    for one, follows in _earlier(fault, stderr):
        other = examined(one)
        is_cause = other.role is LineRole.CAUSE
        if found.role is LineRole.CAUSE:
            is_unsure = is_cause and follows and other.blame is not found.blame
            return replace(found, confidence=Confidence.GUESS) if is_unsure else found
        if is_cause and follows:
            is_of_handler = is_code and follows == WHILE
            return replace(other, confidence=Confidence.GUESS) if is_of_handler else other
        if is_cause and not is_code and found.role is LineRole.UNCLEAR:
            return replace(other, role=LineRole.UNCLEAR, confidence=Confidence.GUESS)
        if follows == FROM and found.rule == RAISED:
            found = other
    return found


def _earlier(fault: RankFault, stderr: bytes) -> Iterator[tuple[RankFault, str]]:
    """The exceptions besides the one that ended the rank, the last first, and how that one follows them."""
    last = raised_in(fault.traceback)
    text = fault.traceback
    if text.count(TRACEBACK) < 2 and stderr.count(TRACEBACK.encode()) > 1:
        text = stderr[max(0, progress(stderr.lower())) :].decode("utf-8", "replace")
    follows = ""
    for one in islice(raised(text), _MOST_EXCEPTIONS):
        is_last = last is not None and one.headline == last.headline
        if not is_last and not WRAPPERS.search(one.headline):
            yield replace(fault, message=one.headline, traceback=one.traceback), follows
        follows = one.follows if is_last or follows else ""
