"""The page of memory that a rank and its monitor share: how heartbeats travel without a syscall.

Layout: 512 words of 64 bits, native order. Each word has exactly one writer and is one whole fact, and a reader needs
no two words to agree. A torn read is therefore impossible: an aligned word is stored and loaded by one instruction
(memoryview items of format "q"). A seqlock was considered and left: Python has no memory barriers to build one with on
ARM, and a rank stopped in the middle of a write would leave it locked for ever.

Times are `time.monotonic_ns()`, 0 = never. A reader takes the words first and the clock after them, and believes a time
only if it lies between the init it belongs to and now; anything else is as if it had not been written. The page is
sealed: nobody who holds it can shrink it under its readers.
"""

from __future__ import annotations

import mmap
import os

PAGE_BYTES = 4096

MAGIC = 0  # agent: MAGIC_VALUE
LAYOUT = 1  # agent: LAYOUT_VALUE
INIT = 2  # monitor: when the rank last called init_workload_monitoring()
RANK_PID = 3  # monitor: and which process that was
LIMITS_AT = 4  # monitor: since when the limits from LIMITS on are in force instead of the agent's (0 = they are not)
WARNED = 5  # agent: when it was told that the job is about to end (0 = it was not)
HEARTBEAT = 8  # rank (own cache line): its last heartbeat
FINISHED = 9  # rank: when it last called shutdown_workload_monitoring()
OUTSIDE = 10  # rank: since when it has been in no section (0 = it is in one, or that does not count yet)
LEAVES = 11  # rank: when should_stop() first said yes, and it was told to save its work and end (0 = it was not)
SECTIONS = 64  # rank: from here on one word per slot (see core.rank.watch.slots_of): open since (0 = closed)
LIMITS = 256  # monitor: from here on one word per limit that a rank can learn, in ns (0 = no limit)

MAGIC_VALUE = 0x4E56_5258_5041_4745  # "NVRXPAGE"
LAYOUT_VALUE = 3


class PageError(ValueError):
    """A file descriptor does not hold a page of this layout."""


def create_page() -> int:
    """A new page as a file descriptor (close-on-exec; the caller's to close). Raises OSError (no memory, no fds)."""
    import fcntl  # only the agent creates pages

    fd = os.memfd_create("nvrx-rank", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, PAGE_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        page = Page(fd, check=False)
        page.words[MAGIC] = MAGIC_VALUE
        page.words[LAYOUT] = LAYOUT_VALUE
        page.close()
    except BaseException:
        os.close(fd)
        raise
    return fd


class Page:
    """A mapping of the page in `fd` (which may be closed afterwards). `words` is the view to read and write.

    Raises PageError if it is not a page of this layout.
    """

    __slots__ = ("_map", "words")

    def __init__(self, fd: int, check: bool = True) -> None:
        if os.fstat(fd).st_size != PAGE_BYTES:
            raise PageError("the shared page has the wrong size")
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self.words = memoryview(self._map).cast("q")
        if check and (self.words[MAGIC] != MAGIC_VALUE or self.words[LAYOUT] != LAYOUT_VALUE):
            self.close()
            raise PageError("the shared page has another layout: use the same nvrx_slurm on both sides")

    def close(self) -> None:
        """Unmap. A thread that is just using `words` gets a ValueError."""
        self.words.release()
        self._map.close()
