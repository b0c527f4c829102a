"""The kinds of values a setting can have: how each is read from text or YAML, and how it is shown again.

Pure: text in, value out. A `ValueError` carries the end of a sentence ("must be ..."); `resolve` puts
the flag, variable or file in front of it. Every parser takes its own results back unchanged, so a value may pass twice.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntFlag
from typing import Any, NamedTuple

from nvrx_slurm.core.watch import MAX_SECTIONS
from nvrx_slurm.types import FaultKind

# poll() and epoll take milliseconds in 32 bits; a longer wait must be "none" instead.
MAX_SECONDS = 2_000_000.0
MAX_NODES = 1_000_000
MAX_TEXT = 4096
MAX_SECTION_NAMES_BYTES = 4096  # of all together
MAX_SOCKET_PATH_BYTES = 107  # sockaddr_un.sun_path less its 0

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_NONE = frozenset({"none", "null"})


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that `name` was probably meant to be, or ""."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return found[0] if found else ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" or, without a near name, ""."""
    guess = nearest(name, known)
    return f"; did you mean {guess}?" if guess else ""


@dataclass(frozen=True)
class Kind:
    """A kind of value. `parse` raises ValueError("must be ..."); `show` gives plain YAML data."""

    metavar: str
    parse: Callable[[object], Any]
    show: Callable[[Any], Any] = lambda value: value


def optional(kind: Kind) -> Kind:
    """`kind`, or None written as none or null."""

    def parse(raw: object) -> Any:
        unset = raw is None or (isinstance(raw, str) and raw.strip().lower() in _NONE)
        return None if unset else kind.parse(raw)

    return replace(kind, parse=parse, show=lambda value: None if value is None else kind.show(value))


def parse_bool(raw: object) -> bool:
    """The one boolean parser: true/false, 1/0, yes/no, on/off, in any case."""
    word = str(raw).strip().lower() if isinstance(raw, (str, int)) else ""
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("must be true or false (also 1/0, yes/no, on/off)")


BOOL = Kind("true|false", parse_bool)


def _number(raw: object, convert: Callable[[Any], Any], problem: str) -> Any:
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


def integer(low: int, high: int = 2**31 - 1, metavar: str = "N") -> Kind:
    """Whole numbers low..high."""
    limits = f">= {low}" if high == 2**31 - 1 else f"from {low} to {high}"
    problem = f"must be a whole number {limits}"

    def parse(raw: object) -> int:
        number: int = _number(raw, int, problem)
        if not low <= number <= high:
            raise ValueError(problem)
        return number

    return Kind(metavar, parse)


def real(
    low: float = 0.0, *, above: bool = False, high: float = MAX_SECONDS, unit: str = "", metavar: str = "X"
) -> Kind:
    """Finite numbers from `low` (or strictly above it) to `high`."""
    what = f"a number of {unit}" if unit else "a number"
    problem = f"must be {what} {'>' if above else '>='} {low:.10g} and <= {high:.10g}"

    def parse(raw: object) -> float:
        number: float = _number(raw, float, problem)
        if not math.isfinite(number) or number > high or number < low or (above and number == low):
            raise ValueError(problem)
        return number

    return Kind(metavar, parse)


SECONDS = real(unit="seconds", metavar="SECONDS")
POSITIVE_SECONDS = real(above=True, unit="seconds", metavar="SECONDS")
TIMEOUT = optional(POSITIVE_SECONDS)


def _text(raw: object, problem: str = "must be text on one line") -> str:
    if not isinstance(raw, str) or not raw.strip() or len(raw) > MAX_TEXT or not raw.isprintable():
        raise ValueError(f"{problem} (1 to {MAX_TEXT} characters)")
    return raw


def _absolute(raw: object) -> str:
    path = _text(raw, "must be a path")
    if not path.startswith("/"):
        raise ValueError("must be an absolute path (starting with /)")
    return path


def _absolute_list(raw: object) -> str:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError("must be absolute paths separated by commas")
    return ",".join(_absolute(part.strip() if isinstance(part, str) else part) for part in parts)


TEXT = Kind("TEXT", _text)
PATH = Kind("PATH", lambda raw: _text(raw, "must be a path"))
ABSOLUTE_PATH = Kind("PATH", _absolute)
ABSOLUTE_PATHS = Kind("PATH,...", _absolute_list)
ADDRESS = Kind("HOST", _text)


def _unix_socket(raw: object) -> str:
    problem = "must be an absolute path of a Unix socket, or unix:// and such a path"
    path = _text(raw, problem).removeprefix("unix://")
    if not path.startswith("/"):
        raise ValueError(problem)
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ValueError(f"must be at most {MAX_SOCKET_PATH_BYTES} bytes long, as paths of Unix sockets are")
    return path


UNIX_SOCKET = Kind("PATH|unix://PATH", _unix_socket)  # its value is the path


def choice(*allowed: str) -> Kind:
    """One of a few words."""

    def parse(raw: object) -> str:
        word = str(raw).strip().lower()
        if word not in allowed:
            raise ValueError(f"must be {' or '.join(allowed)}")
        return word

    return Kind("|".join(allowed), parse)


class NodeRange(NamedTuple):
    """`--nnodes MIN:MAX`: `min` active nodes (>= 1), `max - min` hot spares."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}:{self.max}"


def _node_range(raw: object) -> NodeRange:
    problem = f"must be MIN or MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}, for example 4 or 4:6"
    if isinstance(raw, NodeRange):
        parts: list[str] = [str(raw.min), str(raw.max)]
    elif isinstance(raw, (str, int)) and not isinstance(raw, bool):
        parts = str(raw).split(":")
    else:
        raise ValueError(problem)
    if len(parts) > 2 or not all(part.strip().isdecimal() and len(part) < 10 for part in parts):
        raise ValueError(problem)
    low, high = int(parts[0]), int(parts[-1])
    if not 1 <= low <= high <= MAX_NODES:
        raise ValueError(problem)
    return NodeRange(low, high)


NNODES = Kind("MIN[:MAX]", _node_range, str)


def _nproc(raw: object) -> int | str:
    if isinstance(raw, str) and raw.strip().lower() in ("gpu", "cpu", "auto"):
        return raw.strip().lower()
    number: int = _number(raw, int, "must be a whole number from 1 to 1024, or gpu, cpu or auto")
    if not 1 <= number <= 1024:
        raise ValueError("must be a whole number from 1 to 1024, or gpu, cpu or auto")
    return number


NPROC = Kind("N|gpu|cpu|auto", _nproc)


def split_endpoint(text: str, default_port: int = 29400) -> tuple[str, int]:
    """(host, port) of HOST[:PORT] or [IPV6]:PORT; port 0..65535. Raises ValueError("must be ...")."""
    host, port = text.strip(), ""
    if host.startswith("["):
        host, closed, rest = host[1:].partition("]")
        port = rest[1:]
        good = bool(closed) and (not rest or rest.startswith(":"))
    else:
        good = host.count(":") <= 1
        host, _, port = host.partition(":")
    number = int(port) if port.isdecimal() and len(port) < 6 else default_port if not port else -1
    if not good or not host or not 0 <= number <= 65535 or any(c.isspace() or c in "/@" for c in host):
        raise ValueError("must be HOST:PORT (an IPv6 address in brackets), for example node1:29400")
    return host, number


def _endpoint(raw: object) -> str:
    if raw == "":
        return ""
    text = _text(raw, "must be HOST:PORT").strip()
    split_endpoint(text)
    return text


ENDPOINT = Kind("HOST[:PORT]", _endpoint)


class Std(IntFlag):
    """Which of a worker's streams: torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class Streams:
    """`-r`/`-t` of torchrun: one choice for everybody, or one per local rank (the others: none)."""

    everybody: Std = Std.NONE
    by_local_rank: tuple[tuple[int, Std], ...] = ()

    def of(self, local_rank: int) -> Std:
        """The streams chosen for one local rank."""
        return dict(self.by_local_rank).get(local_rank, self.everybody)

    def __str__(self) -> str:
        pairs = ",".join(f"{rank}:{int(std)}" for rank, std in self.by_local_rank)
        return pairs or str(int(self.everybody))


def _streams(raw: object) -> Streams:
    problem = "must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or such numbers per local rank like 0:1,1:2"
    if isinstance(raw, Streams):
        return raw
    text = str(raw).strip()
    if text in ("0", "1", "2", "3"):
        return Streams(Std(int(text)))
    ranks: dict[int, Std] = {}
    for pair in text.rstrip(",").split(","):
        rank, _, std = pair.strip().partition(":")
        if not rank.isdecimal() or len(rank) > 4 or std not in ("0", "1", "2", "3") or int(rank) in ranks:
            raise ValueError(problem)
        ranks[int(rank)] = Std(int(std))
    return Streams(Std.NONE, tuple(sorted(ranks.items())))


STREAMS = Kind("STREAMS", _streams, str)


def _ranks(raw: object) -> tuple[int, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, Sequence) or not parts:
        raise ValueError("must be local ranks separated by commas, for example 0,1")
    one = integer(0, 1023)
    try:
        return tuple(sorted({one.parse(part) for part in parts}))
    except ValueError:
        raise ValueError("must be local ranks separated by commas, for example 0,1") from None


RANKS = Kind("RANK,...", _ranks, lambda ranks: ",".join(map(str, ranks)))


def _signal(raw: object) -> signal.Signals:
    problem = "must be a signal name or number, for example SIGKILL or 9"
    text = str(int(raw)) if isinstance(raw, int) and not isinstance(raw, bool) else raw
    if not isinstance(text, str):
        raise ValueError(problem)
    word = text.strip().upper()
    try:
        if word.isdecimal():
            return signal.Signals(int(word))
        return signal.Signals[word if word.startswith("SIG") else f"SIG{word}"]
    except (ValueError, KeyError):
        known = [member.name for member in signal.Signals]
        raise ValueError(problem + did_you_mean(word, known)) from None


SIGNAL = Kind("SIGNAL", _signal, lambda member: member.name)


def _user_signal(raw: object) -> signal.Signals:
    problem = "must be SIGUSR1, SIGUSR2 or none"
    try:
        found = _signal(raw)
    except ValueError:
        raise ValueError(problem) from None
    if found not in (signal.SIGUSR1, signal.SIGUSR2):
        raise ValueError(problem)
    return found


USER_SIGNAL = optional(Kind("SIGUSR1|SIGUSR2", _user_signal, SIGNAL.show))

_LEVELS = {
    "DEBUG": logging.DEBUG,
    "DBG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}


def _log_level(raw: object) -> int:
    problem = "must be DEBUG, INFO, WARNING, ERROR, CRITICAL or a number from 0 to 50"
    if isinstance(raw, str) and raw.strip().upper() in _LEVELS:
        return _LEVELS[raw.strip().upper()]
    level: int = _number(raw, int, problem)
    if not 0 <= level <= 50:
        raise ValueError(problem)
    return level


LOG_LEVEL = Kind("LEVEL", _log_level, lambda level: logging.getLevelName(level) if level in _LEVELS.values() else level)


def _pairs(raw: object, separator: str, problem: str) -> dict[str, object]:
    """Mapping from a mapping or from "name<separator>value,..."; a name given twice is an error."""
    if isinstance(raw, Mapping):
        if not all(isinstance(name, str) and name for name in raw):
            raise ValueError(problem)
        return dict(raw)
    if not isinstance(raw, str):
        raise ValueError(problem)
    found: dict[str, object] = {}
    for part in filter(None, (piece.strip() for piece in raw.split(","))):
        name, middle, value = (piece.strip() for piece in part.partition(separator))
        if not name or not middle or name in found:
            raise ValueError(problem)
        found[name] = value
    return found


def _section_timeouts(raw: object) -> dict[str, float | None]:
    problem = "must be NAME:SECONDS,... (SECONDS > 0, or none), each name once, for example setup:600,step:30"
    try:
        # "step:" without a number is "no timeout", as in the seeds' launcher
        timeouts = {
            name: TIMEOUT.parse(None if value == "" else value) for name, value in _pairs(raw, ":", problem).items()
        }
    except ValueError:
        raise ValueError(problem) from None
    if not all(name.isprintable() for name in timeouts):
        raise ValueError(problem)
    # Everything about a rank goes to its monitor in one message of at most 64 KiB.
    if len(timeouts) > MAX_SECTIONS or sum(len(name.encode()) for name in timeouts) > MAX_SECTION_NAMES_BYTES:
        raise ValueError(f"must be at most {MAX_SECTIONS} sections with {MAX_SECTION_NAMES_BYTES} bytes of names")
    return timeouts


SECTION_TIMEOUTS = Kind("NAME:SECONDS,...", _section_timeouts, dict)


def _restarts_by_fault(raw: object) -> dict[FaultKind, int]:
    kinds = ", ".join(kind.value for kind in FaultKind)
    problem = f"must be FAULT:N,... with N >= 0, each FAULT once and one of {kinds}; for example hang:2,node-lost:5"
    allowed: dict[FaultKind, int] = {}
    for name, count in _pairs(raw, ":", problem).items():
        number = _number(count, int, problem)
        if name not in kinds.split(", ") or number < 0:
            raise ValueError(problem)
        allowed[FaultKind(name)] = number
    return allowed


RESTARTS_BY_FAULT = Kind(
    "FAULT:N,...", _restarts_by_fault, lambda allowed: {kind.value: count for kind, count in allowed.items()}
)


def _gate_failures(raw: object) -> frozenset[tuple[int, int]]:
    if isinstance(raw, frozenset):
        return raw
    parts = [part.strip().split(":") for part in str(raw).split(",") if part.strip()]
    if not all(len(part) == 2 and all(word.isdecimal() and len(word) < 8 for word in part) for part in parts):
        raise ValueError("must be CYCLE:INFRA_RANK, or several separated by commas, for example 1:0,2:3")
    return frozenset((int(cycle), int(rank)) for cycle, rank in parts)


GATE_FAILURES = Kind(
    "CYCLE:RANK,...", _gate_failures, lambda pairs: ",".join(f"{cycle}:{rank}" for cycle, rank in sorted(pairs))
)


@dataclass(frozen=True)
class RendezvousConfig:
    """`--rdzv-conf`, times in seconds. The last four are taken for compatibility and change nothing here."""

    is_host: bool | None = None  # this node starts the coordinator; None = decided by infra rank or endpoint
    join_timeout: float = 300.0  # > 0: how long too few nodes are waited for
    last_call_timeout: float = 1.0  # >= 0: how long a complete job waits for spares before its first plan
    read_timeout: float = 60.0
    close_timeout: float = 30.0
    timeout: float = 900.0
    store_connect_wait_seconds: float = 120.0
    use_libuv: bool = True

    def __str__(self) -> str:
        return ",".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)


_RDZV_KINDS: dict[str, Kind] = {
    "is_host": optional(BOOL),
    "join_timeout": POSITIVE_SECONDS,
    "last_call_timeout": SECONDS,
    "read_timeout": POSITIVE_SECONDS,
    "close_timeout": SECONDS,
    "timeout": POSITIVE_SECONDS,
    "store_connect_wait_seconds": SECONDS,
    "use_libuv": BOOL,
}
RDZV_NO_EFFECT = ("read_timeout", "close_timeout", "timeout", "store_connect_wait_seconds", "use_libuv")
_RDZV_LATER = ("replacement_group_size", "segment", "segment_check_interval")


def _rdzv_conf(raw: object) -> RendezvousConfig:
    if isinstance(raw, RendezvousConfig):
        return raw
    values: dict[str, Any] = {}
    for name, value in _pairs(
        raw, "=", "must be KEY=VALUE,... with each key once, for example join_timeout=600"
    ).items():
        if name in _RDZV_LATER:
            raise ValueError(f"{name} is not built yet in this version; remove it")
        if name not in _RDZV_KINDS:
            raise ValueError(f"{name} is not a key of --rdzv-conf{did_you_mean(name, _RDZV_KINDS) or _known_keys()}")
        try:
            values[name] = _RDZV_KINDS[name].parse(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    return RendezvousConfig(**values)


def _known_keys() -> str:
    return f" (known: {', '.join(_RDZV_KINDS)})"


RDZV_CONF = Kind("KEY=VALUE,...", _rdzv_conf, str)


def _words(raw: object) -> tuple[str, ...]:
    """Arguments: a sequence as it is, a text (environment) split as a shell would."""
    words = shlex.split(raw) if isinstance(raw, str) else raw
    if not isinstance(words, Sequence):
        raise ValueError("must be a list of arguments")
    return tuple(_text(word, "must be arguments of one line each") for word in words)


WORDS = Kind("ARG", _words, shlex.join)
