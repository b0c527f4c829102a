"""The kinds of values that only settings of a job have, besides those of `kinds`, which are here too.

Pure, as those are.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntFlag
from typing import Any, NamedTuple

from nvrx_slurm.config.kinds import (  # noqa: F401
    ABSOLUTE_PATH,
    ABSOLUTE_PATHS,
    ADDRESS,
    BOOL,
    MAX_SECONDS,
    MAX_SOCKET_PATH_BYTES,
    MAX_TEXT,
    PATH,
    POSITIVE_SECONDS,
    SECONDS,
    TEXT,
    TIMEOUT,
    UNIX_SOCKET,
    WORDS,
    Kind,
    as_number,
    as_text,
    choice,
    did_you_mean,
    integer,
    nearest,
    optional,
    parse_bool,
    real,
)
from nvrx_slurm.core.rank.watch import MAX_SECTIONS
from nvrx_slurm.types import FaultKind

MAX_NODES = 1_000_000
MAX_SECTION_NAMES_BYTES = 4096  # of all together


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
    number: int = as_number(raw, int, "must be a whole number from 1 to 1024, or gpu, cpu or auto")
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
    text = as_text(raw, "must be HOST:PORT").strip()
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
    level: int = as_number(raw, int, problem)
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
        number = as_number(count, int, problem)
        if name not in kinds.split(", ") or number < 0:
            raise ValueError(problem)
        allowed[FaultKind(name)] = number
    return allowed


RESTARTS_BY_FAULT = Kind(
    "FAULT:N,...", _restarts_by_fault, lambda allowed: {kind.value: count for kind, count in allowed.items()}
)


def _preflight_failures(raw: object) -> frozenset[tuple[int, int]]:
    if isinstance(raw, frozenset):
        return raw
    parts = [part.strip().split(":") for part in str(raw).split(",") if part.strip()]
    if not all(len(part) == 2 and all(word.isdecimal() and len(word) < 8 for word in part) for part in parts):
        raise ValueError("must be CYCLE:INFRA_RANK, or several separated by commas, for example 1:0,2:3")
    return frozenset((int(cycle), int(rank)) for cycle, rank in parts)


PREFLIGHT_FAILURES = Kind(
    "CYCLE:RANK,...", _preflight_failures, lambda pairs: ",".join(f"{cycle}:{rank}" for cycle, rank in sorted(pairs))
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
