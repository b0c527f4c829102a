"""The kinds of values that all configuration files and flags share; `values` has those of a job's settings only.

Pure: text in, value out. A `ValueError` carries the end of a sentence ("must be ..."); the caller puts the flag,
variable or file in front of it. Every parser takes its own results back unchanged, so a value may pass twice.
Loaded by Slurm's prolog where there is a site file: only cheap imports.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

# poll() and epoll take milliseconds in 32 bits; a longer wait must be "none" instead.
MAX_SECONDS = 2_000_000.0
MAX_TEXT = 4096
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its 0

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NONE = frozenset({"none", "null"})


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """The known name that `name` was probably meant to be, or "". `cutoff`: how alike, 0 to 1."""
    import difflib  # slow to import, and needed only after a misspelling

    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" or, without a near name, ""."""
    guess = nearest(name, known)
    return f"; did you mean {guess}?" if guess else ""


def shorten(raw: object) -> str:
    """A wrong value as an error sentence shows it."""
    text = repr(raw)
    return text if len(text) <= 80 else text[:77] + "..."


class Kind(NamedTuple):
    """A kind of value. `parse` raises ValueError("must be ..."); `show` gives plain YAML data."""

    metavar: str
    parse: Callable[[object], Any]
    show: Callable[[Any], Any] = lambda value: value


def optional(kind: Kind) -> Kind:
    """`kind`, or None written as none or null."""

    def parse(raw: object) -> Any:
        unset = raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE)
        return None if unset else kind.parse(raw)

    return kind._replace(
        parse=parse, show=lambda value: None if value is None else kind.show(value)
    )


def parse_bool(raw: object) -> bool:
    """The one boolean parser: true/false, 1/0, yes/no, on/off, in any case."""
    word = str(raw).strip().lower() if isinstance(raw, (str, int)) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("must be true or false (also 1/0, yes/no, on/off)")


BOOL = Kind("true|false", parse_bool)


def as_number(raw: object, convert: Callable[[Any], Any], problem: str) -> Any:
    """`raw` by `convert` (int or float). Raises ValueError(problem)."""
    # bool is an int in Python: "timeout: true" in YAML is a mistake, not one second.
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError(problem)
    try:
        number = convert(raw)
    except (ValueError, OverflowError):
        raise ValueError(problem) from None
    if isinstance(raw, float) and raw != number:
        raise ValueError(problem)  # 2.5 where a whole number is wanted
    return number


def _number(
    convert: Callable[[Any], Any], allowed: Callable[[Any], bool], problem: str, metavar: str
) -> Kind:
    def parse(raw: object) -> Any:
        number = as_number(raw, convert, problem)
        if not allowed(number):  # not a number is in no range
            raise ValueError(problem)
        return number

    return Kind(metavar, parse)


def integer(low: int, high: int = 2**31 - 1, metavar: str = "N") -> Kind:
    """Whole numbers low..high."""
    limits = f">= {low}" if high == 2**31 - 1 else f"from {low} to {high}"
    return _number(
        int, lambda number: low <= number <= high, f"must be a whole number {limits}", metavar
    )


def real(
    low: float = 0.0,
    *,
    above: bool = False,
    high: float = MAX_SECONDS,
    unit: str = "",
    metavar: str = "X",
) -> Kind:
    """Finite numbers from `low` (or strictly above it) to `high`."""
    what = f"a number of {unit}" if unit else "a number"
    problem = f"must be {what} {'>' if above else '>='} {low:.10g} and <= {high:.10g}"
    return _number(
        float,
        lambda number: low <= number <= high and number != (low if above else None),
        problem,
        metavar,
    )


SECONDS = real(unit="seconds", metavar="SECONDS")
POSITIVE_SECONDS = real(above=True, unit="seconds", metavar="SECONDS")
TIMEOUT = optional(POSITIVE_SECONDS)


def as_text(raw: object, problem: str = "must be text on one line") -> str:
    """`raw` if it is printable text of at most MAX_TEXT characters. Raises ValueError that begins with `problem`."""
    if not isinstance(raw, str) or not raw.strip() or len(raw) > MAX_TEXT or not raw.isprintable():
        raise ValueError(f"{problem} (1 to {MAX_TEXT} characters)")
    return raw


def list_of(one: Kind, what: str) -> Kind:
    """A tuple of values; also from text with commas."""

    def parse(raw: object) -> tuple[Any, ...]:
        parts = (
            [part.strip() for part in raw.split(",") if part.strip()]
            if isinstance(raw, str)
            else raw
        )
        if not isinstance(parts, Sequence):
            raise ValueError(f"must be a list of {what}")
        return tuple(one.parse(part) for part in parts)

    return Kind(f"{one.metavar},...", parse, list)


def matching(metavar: str, pattern: str, problem: str) -> Kind:
    """Text of at most MAX_TEXT characters on one line, or a number, that is as the regular expression says. `problem`:
    "must be ...".
    """

    def parse(raw: object) -> str:
        text = str(raw)
        plain = isinstance(raw, (str, int)) and not isinstance(raw, bool)
        plain = plain and text.isprintable() and len(text) <= MAX_TEXT
        if not plain or not re.fullmatch(pattern, text.strip(), re.ASCII):
            raise ValueError(problem)
        return text.strip()

    return Kind(metavar, parse)


TEXT = Kind("TEXT", as_text)
PATH = Kind("PATH", lambda raw: as_text(raw, "must be a path"))
ABSOLUTE_PATH = matching("PATH", "/.*", "must be an absolute path (starting with /)")
_PATHS = list_of(ABSOLUTE_PATH, "absolute paths")
ABSOLUTE_PATHS = _PATHS._replace(parse=lambda raw: as_text(",".join(_PATHS.parse(raw))), show=str)
ADDRESS = Kind("HOST", as_text)


def _unix_socket(raw: object) -> str:
    problem = "must be an absolute path of a Unix socket, or unix:// and such a path"
    path = as_text(raw, problem).removeprefix("unix://")
    if not path.startswith("/"):
        raise ValueError(problem)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"must be at most {MAX_SOCKET_PATH_BYTES} bytes long, as paths of Unix sockets are"
        )
    return path


_UNITS = {"": 1, **{unit: 1 << 10 * power for power, unit in enumerate("KMGT", 1)}}
_LEAST_BYTES = _UNITS["M"]  # a number without a unit is rarely meant as bytes


def _size(raw: object) -> int:
    found = re.fullmatch(
        r"\s*(\d{1,15})\s*([KMGT]?)\s*", "" if isinstance(raw, bool) else str(raw), re.IGNORECASE
    )
    size = int(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not _LEAST_BYTES <= size < 1 << 62:
        raise ValueError("must be a size of at least 1M with a unit K, M, G or T, for example 64G")
    return size


def _shown_size(size: int) -> str:
    unit = next(one for one in ("T", "G", "M", "K", "") if size % _UNITS[one] == 0)
    return f"{size // _UNITS[unit]}{unit}"


SIZE = Kind("SIZE", _size, _shown_size)  # its value is bytes
UNIX_SOCKET = Kind("PATH|unix://PATH", _unix_socket)  # its value is the path


def choice(*allowed: str) -> Kind:
    """One of a few words."""

    def parse(raw: object) -> str:
        word = str(raw).strip().lower()
        if word not in allowed:
            raise ValueError(f"must be {' or '.join(allowed)}")
        return word

    return Kind("|".join(allowed), parse)


def _words(raw: object) -> tuple[str, ...]:
    """Arguments: a sequence as it is, a text (environment) split as a shell would."""
    words = shlex.split(raw) if isinstance(raw, str) else raw
    if not isinstance(words, Sequence):
        raise ValueError("must be a list of arguments")
    return tuple(as_text(word, "must be arguments of one line each") for word in words)


WORDS = Kind("ARG", _words, shlex.join)
