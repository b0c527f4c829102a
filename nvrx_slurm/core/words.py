"""Numbers in words and text on one line for people, and times in files. Pure, and quick to import."""

from __future__ import annotations

from datetime import datetime, timezone

_LINE_CHARS = 400


def one_line(text: object) -> str:
    """Printable text on one line of at most 400 characters, for terminals, logs and drain reasons."""
    words = " ".join(str(text).split())
    clean = "".join(char if char.isprintable() else "?" for char in words)
    return clean if len(clean) <= _LINE_CHARS else f"{clean[: _LINE_CHARS - 3]}..."


def in_words(seconds: float) -> str:
    """`seconds` (>= 0) as "0.05 s", "3.1 s", "12 min 3 s" or "3 h 12 min"."""
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 0.095 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def utc(unix_s: float) -> str:
    """A time as files and --json have it: 2026-03-01T10:00:00.123Z."""
    return (
        datetime.fromtimestamp(unix_s, timezone.utc)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def unix_s(text: object) -> float:
    """The Unix seconds of such a time. Raises ValueError."""
    # Python 3.10 knows no Z
    return datetime.fromisoformat(str(text).replace("Z", "+00:00")).timestamp()
