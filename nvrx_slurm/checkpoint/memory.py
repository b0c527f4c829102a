"""Memory that a descriptor stands for."""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Callable, Iterator
from io import FileIO

_CHUNK_BYTES = 256 << 10
_STEP_BYTES = 2 << 20  # a description that grows by some bytes seldom needs other memory
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
)  # no reader can be cut off from its bytes


def rounded(size: int) -> int:
    """Bytes of the memory for a save of `size` bytes."""
    return -(-size // _STEP_BYTES) * _STEP_BYTES


class Memory:
    """Bytes of one generation. The kernel frees them when no process has them open or mapped."""

    file: FileIO

    def __init__(self, size: int) -> None:
        self.size = size
        self.is_there = False  # allocated
        self.used = 0  # bytes of the save

    def allocate(self) -> None:
        """All of it: who writes into it never runs out of memory. It may take seconds. Raises OSError."""
        if not self.is_there:
            self.file = FileIO(
                os.memfd_create("nvrx-checkpoint", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+"
            )
            os.posix_fallocate(self.file.fileno(), 0, self.size)
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, _SEALS)
            self.is_there = True

    def blocks(self) -> Iterator[memoryview]:
        """The bytes of the save; each block is valid until the next one. Raises OSError."""
        buffer, at = memoryview(bytearray(_CHUNK_BYTES)), 0
        while at < self.used:
            read = os.preadv(self.file.fileno(), [buffer[: self.used - at]], at)
            if not read:
                raise OSError("it is cut off")  # it is sealed, so this does not happen
            yield buffer[:read]
            at += read

    def checksum(self) -> int:
        """Of the bytes of the save. Raises OSError."""
        found = 0
        for block in self.blocks():
            found = zlib.crc32(block, found)
        return found

    def receive(self, read_into: Callable[[memoryview], int]) -> int:
        """Take the bytes of a save from elsewhere; returns their checksum. Raises OSError."""
        buffer, at, found = memoryview(bytearray(_CHUNK_BYTES)), 0, 0
        while at < self.used:
            block = buffer[: self.used - at]
            left = block
            while left:
                read = read_into(left)
                if not read:
                    raise OSError("the other keeper has closed the connection")
                left = left[read:]
            os.pwrite(self.file.fileno(), block, at)
            found = zlib.crc32(block, found)
            at += len(block)
        return found
