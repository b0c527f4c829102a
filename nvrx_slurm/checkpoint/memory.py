"""Memory that a descriptor stands for."""

from __future__ import annotations

import fcntl
import os
import zlib
from io import FileIO

UNREADABLE = -2  # instead of a checksum
_CHUNK_BYTES = 1 << 20
_STEP_BYTES = 2 << 20  # a description that grows by some bytes seldom needs other memory
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
)  # no reader can be cut off from its bytes


def rounded(size: int) -> int:
    """Bytes of the memory for a save of `size` bytes."""
    return -(-size // _STEP_BYTES) * _STEP_BYTES


class Memory:
    """Bytes of one generation. The kernel frees them when no process has them open or mapped."""

    def __init__(self, size: int) -> None:
        """All of it is allocated here: who writes into it never runs out of memory. Raises OSError."""
        self.size = size
        self.file = FileIO(
            os.memfd_create("nvrx-checkpoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+"
        )
        os.posix_fallocate(self.file.fileno(), 0, self.size)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
        self.used = self.tree_at = self.tree_size = 0

    def checksum(self) -> int:
        """Of the bytes of the save."""
        buffer, at, found = memoryview(bytearray(_CHUNK_BYTES)), 0, 0
        while at < self.used:
            read = os.preadv(self.file.fileno(), [buffer[: self.used - at]], at)
            if not read:
                return UNREADABLE  # it is sealed, so this does not happen
            found = zlib.crc32(buffer[:read], found)
            at += read
        return found
