"""Whether the Python of another process has yet to run its handler of a signal.

CPython has a table with an entry per signal: an int that is set when the signal has come, and the handler. The main
thread clears the int when it is back in Python, just before it calls the handler. No file tells it, so it is read in
the memory of the process. The table is as far from the begin of the interpreter's file as in this process.
"""

from __future__ import annotations

import _signal
import functools
import os
import re
import struct
from typing import NamedTuple

_ENTRY = struct.Struct("@iP")
# the entries of SIGALRM, SIGCHLD, SIGUSR1 and others before it may change while they are looked for
_FIRST = 18
_MAPPINGS = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S+) [0-9a-f]+ (\S+ \d+)")


class Table(NamedTuple):
    """Where it is: in a process that has mapped `file` (device and inode), `offset` bytes after its begin."""

    file: bytes
    offset: int


def is_pending(pid: int, signum: int) -> bool:
    """Whether the signal has come, and the main thread has not been back in Python since.

    False, too, if the process runs another interpreter than this one. Raises OSError where its memory is hidden.
    """
    table = _own_table()
    with open(f"/proc/{pid}/maps", "rb") as maps:
        before, found, _ = maps.read().partition(b" %s " % table.file)
    if not found:
        return False
    begin = int(before.rpartition(b"\n")[2].partition(b"-")[0], 16)
    return read_memory(pid, begin + table.offset + signum * _ENTRY.size, 1) != b"\0"


def read_memory(pid: int, address: int, size: int) -> bytes:
    """Bytes of a process. Raises OSError where they are hidden, or are not there."""
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    try:
        return os.pread(fd, size, address)
    finally:
        os.close(fd)


@functools.lru_cache(1)
def _own_table() -> Table:
    """Its entries are known here: what `signal.getsignal` returns. Raises OSError if there is no such table."""
    handlers = [_signal.getsignal(signum) for signum in range(_FIRST, _signal.NSIG)]
    entries = b"".join(_ENTRY.pack(0, id(handler)) for handler in handlers)
    with open("/proc/self/maps", "rb") as maps:
        found = _MAPPINGS.findall(maps.read())
    mappings = [(int(begin, 16), int(end, 16), access, file) for begin, end, access, file in found]
    interpreter = next(file for begin, end, _, file in mappings if begin <= id(int) < end)
    own = [mapping for mapping in mappings if mapping[3] == interpreter]
    first = own[0][0]
    last = own[-1][1]
    # its variables that begin as 0
    zeroed = [mapping for mapping in mappings if mapping[0] == last]
    for begin, end, access, _ in own + zeroed:
        if not access.startswith(b"rw"):
            continue
        at = read_memory(os.getpid(), begin, end - begin).find(entries)
        if at >= 0:
            return Table(interpreter, begin + at - first - _FIRST * _ENTRY.size)
    raise OSError("this Python has no table of signal handlers")
