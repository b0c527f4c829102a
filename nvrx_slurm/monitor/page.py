"""The page of memory that a rank shares with its monitor: heartbeats without a system call.

Layout: 640 words of 64 bits, native order, then a note, then a ring of reports. Each word has one writer and is a
complete fact; no two words need to agree, but for the ring (see below). Torn reads are impossible: one instruction
stores or loads an aligned word (memoryview items of format "q"). A seqlock would need memory barriers, which Python
lacks on ARM, and a rank stopped during a write would leave it locked.

Times are `time.monotonic_ns()`, 0 = never. A reader loads the words first and then the clock. It ignores a time that is
not between the init it belongs to and now. The page is sealed: no process can shrink it under its readers.
"""

from __future__ import annotations

import mmap
import os
import sys

PAGE_BYTES = 1 << 15

MAGIC = 0  # agent: MAGIC_VALUE
INIT = 2  # monitor: when the rank last called init_workload_monitoring()
RANK_PID = 3  # monitor: and which process that was
LIMITS_AT = 4  # monitor: since when the limits in the note replace the agent's (0 = they do not)
WARNED = 5  # agent: when it was warned that the job is about to end (0 = it was not)
FIRST_INIT = 6  # monitor: when the rank first called init_workload_monitoring()
SUSPENDED = 7  # monitor: ns for which it was stopped, and so probably the rank
HEARTBEAT = 8  # rank (own cache line): its last heartbeat
FINISHED = 9  # rank: when it last called shutdown_workload_monitoring()
# rank: since when it has been in no section (0 = it is in one, or this time does not count yet)
OUTSIDE = 10
LEAVES = 11  # rank: when should_stop() first returned True (0 = never)
BEATS = 12  # rank: heartbeats so far
FIRST_BEAT = 13  # rank: its first heartbeat, or the start of its first "step"
SECOND_BEAT = 14  # rank: its second heartbeat
SAVED = 15  # rank: when a section of kind checkpoint last ended (see core.rank.sections.kind_of)
TURN = 16  # rank: when a section last began or ended; SPENT has the time until then
BEFORE = 17  # rank: ns in sections other than "step" before its first heartbeat or "step"
BEFORE_SAVED = 18  # rank: the same before SAVED
KEPT = 19  # rank: when checkpoint.save() last kept its state in memory
KEPT_ITERATION = 20  # rank: of the last state that was loaded from there or kept, + 1 (0 = none)
KEPT_STEPS = 21  # rank: heartbeats or steps until then
STEP = 24  # rank (own cache line), by warm.steps: when an optimizer of torch last made a step
STEPS = 25  # rank: steps so far of the optimizer that made the first one
FIRST_STEP = 26  # rank: its first step
SECOND_STEP = 27  # rank: its second step
LONGEST_STEP = 28  # rank: longest time between two steps so far, ns
STEPS_SINCE = 29  # rank: when its script had imported torch's optimizers, whose steps are counted from then on
JUDGED = 48  # agent (own cache line): how many reports it has judged and found right
REPORTED = 56  # rank (own cache line): reports so far
# rank: from here on one word per slot (see core.rank.watch.slots_of): open since (0 = closed)
SECTIONS = 64
SPENT = 200  # rank: the same slots: ns in the section, without those in sections that began later
TIMES = 336  # rank: the same slots: how often the section has ended
MAGIC_VALUE = 0x4E56_5258_5041_4738  # "NVRXPAG8": 8 is the version of the layout
ENDED = 472  # rank: the same slots: when the section last ended
WORDS = 640
# byte: behind the words is the monitor's note about learned limits, padded with NULs
_NOTE_AT = 8 * WORDS
# The last reports, number N in slot N % SLOTS: loss and norm of the gradients (doubles), iteration * 4 + which of both
# there are (1 loss, 2 norm). A reader may find a slot half written: see RankMonitor.reports.
REPORT_WORDS, REPORT_SLOTS = 3, 128
REPORTS = PAGE_BYTES // 8 - REPORT_WORDS * REPORT_SLOTS
NOTE_BYTES = 8 * REPORTS - _NOTE_AT


class PageError(ValueError):
    """A file descriptor does not hold a page of this layout."""


def create_page() -> int:
    """A new page as a file descriptor (close-on-exec, owned by the caller). Raises OSError."""
    import fcntl  # only the agent creates pages

    fd = os.memfd_create("nvrx-rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        os.pwrite(fd, MAGIC_VALUE.to_bytes(8, sys.byteorder), 8 * MAGIC)
    except BaseException:
        os.close(fd)
        raise
    return fd


class RankPage:
    """A mapping of the page in `fd`, which may be closed afterwards. `words`, `floats`: memoryviews of it.

    Raises PageError if it is not a page of this layout (without `check`: of this size).
    """

    __slots__ = ("_map", "floats", "words")

    def __init__(self, fd: int, check: bool = True) -> None:
        if os.fstat(fd).st_size != PAGE_BYTES:
            raise PageError("the shared page has the wrong size")
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words, self.floats = memoryview(self._map).cast("q"), memoryview(self._map).cast("d")
        if check and self.words[MAGIC] != MAGIC_VALUE:
            self.close()
            raise PageError(
                "the shared page has another layout: use the same nvrx_slurm on both sides"
            )

    @property
    def note(self) -> bytes:
        """What a monitor leaves to its successor. Of at most NOTE_BYTES."""
        return self._map[_NOTE_AT : 8 * REPORTS].partition(b"\0")[0]

    @note.setter
    def note(self, text: bytes) -> None:
        self._map[_NOTE_AT : 8 * REPORTS] = text.ljust(NOTE_BYTES, b"\0")

    def report(self, number: int) -> tuple[int, float | None, float | None, int]:
        """One report: iteration, loss and norm of the gradients (None = not reported), bits of the loss."""
        slot = REPORTS + number % REPORT_SLOTS * REPORT_WORDS
        bits, _, iteration = self.words[slot : slot + REPORT_WORDS].tolist()
        loss, norm = self.floats[slot : slot + 2].tolist()
        return (
            iteration >> 2,
            loss if iteration & 1 else None,
            norm if iteration & 2 else None,
            bits,
        )

    def close(self) -> None:
        """Unmap. A thread that uses `words` gets a ValueError."""
        self.words.release()
        self.floats.release()
        self._map.close()
