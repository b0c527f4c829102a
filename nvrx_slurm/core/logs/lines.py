"""The lines of one rank on their way to the merged file: cleaned, cut and prefixed. Bytes in, bytes out; pure.

NUL becomes <NUL>, invalid UTF-8 U+FFFD. Of a line with carriage returns (a progress bar) the last state counts. Only a
newline ends a line.
"""

from __future__ import annotations

LONGEST_LINE = 1 << 16  # bytes as the rank wrote them; a longer line is cut
CUT = b"<CUT>"  # ends each piece of such a line but the last


def rank_prefix(rank: int, world_size: int) -> bytes:
    """The rank as `srun -l` shows it: right-aligned to the width of the last rank, and ": "."""
    return b"%*d: " % (len(str(max(0, world_size - 1))), rank)


class Lines:
    """One source. `prefix` goes before each line. `as_written`: lines are only split, and have no prefix."""

    def __init__(self, prefix: bytes = b"", as_written: bool = False) -> None:
        self.prefix = prefix
        self._as_written = as_written

    def take(self, data: bytes, final: bool = False) -> tuple[bytes, int]:
        """(text for the merged file, how many bytes of `data` it stands for).

        `data`: what follows the bytes that were taken before; read at least LONGEST_LINE bytes where there are so many.
        A last line without newline waits, unless `final`.
        """
        end = data.rfind(b"\n") + 1
        if final:
            return self._dressed(data if data.endswith(b"\n") or not data else data + b"\n"), len(
                data
            )
        if end:
            return self._dressed(data[:end]), end
        if len(data) < LONGEST_LINE:
            return b"", 0
        states = data.rstrip(b"\r").rfind(b"\r") + 1
        if states and not self._as_written:
            return b"", states
        cut = LONGEST_LINE
        # not within a character
        while cut > LONGEST_LINE - 4 and cut < len(data) and data[cut] & 0xC0 == 0x80:
            cut -= 1
        return self._dressed(data[:cut] + (b"" if self._as_written else CUT) + b"\n"), cut

    def _dressed(self, data: bytes) -> bytes:
        if self._as_written:
            return data
        if b"\r" in data:
            data = b"\n".join(line.rstrip(b"\r").rpartition(b"\r")[2] for line in data.split(b"\n"))
        data = data.replace(b"\0", b"<NUL>")
        try:
            data.decode()
        except UnicodeDecodeError:
            data = data.decode("utf-8", "replace").encode()
        if not data or not self.prefix:
            return data
        return self.prefix + data[:-1].replace(b"\n", b"\n" + self.prefix) + b"\n"
