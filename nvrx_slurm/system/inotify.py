"""inotify(7) through libc: tells that files in a directory have grown, without polling."""

from __future__ import annotations

import ctypes
import os
import struct

_IN_MODIFY, _IN_CREATE, _IN_MOVED_TO = 0x2, 0x100, 0x80
_IN_CLOEXEC = 0x80000
_HEAD = struct.Struct("iIII")  # wd, mask, cookie, length of the name


class Inotify:
    """Watches directories for files that are created or written to. Raises OSError where the kernel refuses."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._checked(self._libc.inotify_init1(_IN_CLOEXEC))

    def watch(self, directory: str) -> None:
        """Add a directory."""
        mask = ctypes.c_uint32(_IN_MODIFY | _IN_CREATE | _IN_MOVED_TO)
        self._checked(self._libc.inotify_add_watch(self.fd, os.fsencode(directory), mask))

    def wait(self) -> set[str]:
        """Block until something changes; the names (without directory) of the files that did."""
        names = set()
        data = os.read(self.fd, 65536)
        while data:
            *_, length = _HEAD.unpack_from(data)
            names.add(os.fsdecode(data[_HEAD.size : _HEAD.size + length].rstrip(b"\0")))
            data = data[_HEAD.size + length :]
        return names

    def close(self) -> None:
        """Stop watching."""
        os.close(self.fd)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
