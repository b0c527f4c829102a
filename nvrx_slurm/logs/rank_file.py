"""One growing log file, read by whole lines. The console, the shipper and `nvrx logs` read the ranks' files with it."""

from __future__ import annotations

import os
from io import FileIO

from nvrx_slurm.core.logs.lines import LONGEST_LINE, Lines
from nvrx_slurm.system.foreign import followed, size_of


class RankFile:
    """It keeps no line: what was not taken is read again. `at`: how many bytes were taken; may be set.

    `lines`: what becomes of the lines. `piece`: about how many bytes are read at once.
    """

    def __init__(
        self, path: str | os.PathLike[str], lines: Lines, at: int = 0, piece: int = LONGEST_LINE
    ) -> None:
        self.path, self.lines, self.at, self._piece = os.fspath(path), lines, at, piece
        self._file: FileIO | None = None

    def open(self) -> FileIO:
        """Open it now. Raises OSError."""
        self._file = followed(self.path)
        return self._file

    def read(self, final: bool) -> tuple[bytes, bool]:
        """(the next lines, whether this is the end of the file). Raises OSError; a file that is not there is empty.

        `final`: no program writes to it any more, so a last line without newline counts.
        """
        try:
            file = self._file or self.open()
        except FileNotFoundError:
            return b"", True
        text = b""
        at_end = False
        for size in (self._piece, LONGEST_LINE):
            data = os.pread(file.fileno(), size, self.at)
            at_end = len(data) < size
            text, used = self.lines.take(data, final and at_end)
            if used or at_end:
                self.at += used
                break
        return text, at_end

    @property
    def unread(self) -> int:
        """How many bytes have not been taken. Raises OSError."""
        return size_of(self._file or self.open()) - self.at

    def close(self) -> None:
        """Close it; `read` would open it again."""
        if self._file is not None:
            self._file.close()
            self._file = None
