"""The kinds of values that only settings of a job have; `kinds` has those that other files share. Pure."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from nvrx_slurm.config import kinds as k
from nvrx_slurm.config.kinds import Kind
from nvrx_slurm.core.logs import names
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
    found = re.fullmatch(
        r"\s*(\d{1,9})\s*(?::\s*(\d{1,9})\s*)?", "" if isinstance(raw, bool) else str(raw)
    )
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= MAX_NODES:
        raise ValueError(
            f"must be MIN or MIN:MAX with 1 <= MIN <= MAX <= {MAX_NODES}, for example 4 or 4:6"
        )
    return NodeRange(low, high)


def _preload(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str) and raw.strip() == "auto":
        return ()
    modules: tuple[str, ...] = _MODULES.parse(raw)
    if not all(part.isidentifier() for name in modules for part in name.split(".")):
        raise ValueError("must be auto or names of Python modules, for example torch,numpy")
    return modules


_MODULES = k.list_of(k.TEXT, "modules")
PRELOAD = Kind("auto|MODULE,...", _preload, lambda names: ",".join(names) or "auto")
NNODES = Kind("MIN[:MAX]", _node_range, str)


def _nproc(raw: object) -> int | str:
    if isinstance(raw, str) and raw.strip().lower() in ("gpu", "cpu", "auto"):
        return raw.strip().lower()
    try:
        return int(k.integer(1, 1024).parse(raw))
    except ValueError as error:
        raise ValueError(f"{error}, or gpu, cpu or auto") from None


NPROC = Kind("N|gpu|cpu|auto", _nproc)


@dataclass(frozen=True)
class Streams:
    """`-r`/`-t` of torchrun: one choice for all workers, or one per local rank (the others: none).

    The choices are torchrun's: 0 none, 1 stdout, 2 stderr, 3 both.
    """

    all_ranks: int = 0
    by_local_rank: tuple[tuple[int, int], ...] = ()

    def of(self, local_rank: int) -> int:
        """The streams chosen for one local rank."""
        return dict(self.by_local_rank).get(local_rank, self.all_ranks)

    def __str__(self) -> str:
        return ",".join(f"{rank}:{std}" for rank, std in self.by_local_rank) or str(self.all_ranks)


def _streams(raw: object) -> Streams:
    problem = "must be 0 (none), 1 (stdout), 2 (stderr), 3 (both), or such numbers per local rank like 0:1,1:2"
    if isinstance(raw, Streams):
        return raw
    text = str(raw).strip().removeprefix("=")  # click leaves it in "-t=3"
    if re.fullmatch("[0-3]", text):
        return Streams(int(text))
    ranks: dict[int, int] = {}
    for pair in text.rstrip(",").split(","):
        found = re.fullmatch(r"\s*(\d{1,4}):([0-3])\s*", pair)
        if found is None or int(found[1]) in ranks:
            raise ValueError(problem)
        ranks[int(found[1])] = int(found[2])
    return Streams(0, tuple(sorted(ranks.items())))


STREAMS = Kind("STREAMS", _streams, str)


RANKS = k.list_of(k.integer(0, 1023), "local ranks")._replace(
    show=lambda ranks: ",".join(map(str, ranks))
)


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
        raise ValueError(problem + k.did_you_mean(word, known)) from None


SIGNAL = Kind("SIGNAL", _signal, lambda member: member.name)


def _user_signal(raw: object) -> signal.Signals:
    found = _signal(raw)
    if found not in (signal.SIGUSR1, signal.SIGUSR2):
        raise ValueError("must be SIGUSR1, SIGUSR2 or none")
    return found


USER_SIGNAL = k.optional(Kind("SIGUSR1|SIGUSR2", _user_signal, SIGNAL.show))


def _log_level(raw: object) -> int:
    word = raw.strip().upper() if isinstance(raw, str) else ""
    known = logging.getLevelName("DEBUG" if word == "DBG" else word)
    if isinstance(known, int):
        return known
    try:
        return int(k.integer(0, 50).parse(raw))
    except ValueError:
        raise ValueError(
            "must be DEBUG, INFO, WARNING, ERROR, CRITICAL or a number from 0 to 50"
        ) from None


LOG_LEVEL = Kind(
    "LEVEL",
    _log_level,
    lambda level: level if level % 10 else logging.getLevelName(level),
)


def pairs(raw: object, separator: str, problem: str) -> dict[str, Any]:
    """Mapping from a mapping or from "name<separator>value,..."; a name given twice is an error."""
    if isinstance(raw, Mapping):
        if not all(isinstance(name, str) and name for name in raw):
            raise ValueError(problem)
        return dict(raw)
    if not isinstance(raw, str):
        raise ValueError(problem)
    found: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in raw.split(","))):
        name, middle, value = (piece.strip() for piece in part.partition(separator))
        if not name or not middle or name in found:
            raise ValueError(problem)
        found[name] = value
    return found


def _section_timeouts(raw: object) -> dict[str, float | None]:
    problem = "must be NAME:SECONDS,... (SECONDS > 0, or none), each name once, for example setup:600,step:30"
    try:
        # "step:" without a number is "no timeout", as in NVRx's launcher
        timeouts = {
            name: k.TIMEOUT.parse(s if s != "" else None)
            for name, s in pairs(raw, ":", problem).items()
        }
    except ValueError:
        raise ValueError(problem) from None
    if not all(name.isprintable() for name in timeouts):
        raise ValueError(problem)
    # Everything about a rank goes to its monitor in one message of at most 64 KiB.
    if (
        len(timeouts) > MAX_SECTIONS
        or sum(len(name.encode()) for name in timeouts) > MAX_SECTION_NAMES_BYTES
    ):
        raise ValueError(
            f"must be at most {MAX_SECTIONS} sections with {MAX_SECTION_NAMES_BYTES} bytes of names"
        )
    return timeouts


NAMES = k.list_of(k.TEXT, "names")
SECTION_TIMEOUTS = Kind("NAME:SECONDS,...", _section_timeouts, dict)


def _restarts_by_fault(raw: object) -> dict[FaultKind, int]:
    kinds = ", ".join(kind.value for kind in FaultKind)
    problem = f"must be FAULT:N,... with N >= 0, each FAULT once and one of {kinds}; for example hang:2,node-lost:5"
    allowed: dict[FaultKind, int] = {}
    for name, count in pairs(raw, ":", problem).items():
        number = k.as_number(count, int, problem)
        if name not in kinds.split(", ") or number < 0:
            raise ValueError(problem)
        allowed[FaultKind(name)] = number
    return allowed


RESTARTS_BY_FAULT = Kind(
    "FAULT:N,...",
    _restarts_by_fault,
    lambda allowed: {kind.value: count for kind, count in allowed.items()},
)


def _preflight_failures(raw: object) -> frozenset[tuple[int, int]]:
    if isinstance(raw, frozenset):
        return raw
    found = [
        re.fullmatch(r"\s*(\d{1,7}):(\d{1,7})\s*", part)
        for part in str(raw).split(",")
        if part.strip()
    ]
    if None in found:
        raise ValueError(
            "must be CYCLE:INFRA_RANK, or several separated by commas, for example 1:0,2:3"
        )
    return frozenset((int(one[1]), int(one[2])) for one in found if one)


PREFLIGHT_FAILURES = Kind(
    "CYCLE:RANK,...",
    _preflight_failures,
    lambda pairs: ",".join(f"{cycle}:{rank}" for cycle, rank in sorted(pairs)),
)


def _log_path(raw: object) -> str:
    path: str = k.ABSOLUTE_PATH.parse(raw)
    if path.endswith("/"):
        raise ValueError("must be the path of a file, for example /logs/%j/train.log")
    names.check(path)
    return path


LOG_PATH = Kind("PATH", _log_path)


def _pattern(raw: object) -> str:
    text = k.as_text(raw)
    try:
        if re.compile(text).groups:
            return text
    except (re.error, OverflowError):  # (...){999999999999}
        pass
    raise ValueError(
        r"must be a regular expression with a group for the iteration, for example model_(\d+)\.pt"
    )


PATTERN = Kind("REGEX", _pattern)


# --- the rendezvous, in torchrun's grammar ----------------------------------------------------------------------------


def split_endpoint(text: str) -> tuple[str, int]:
    """(host, port) of HOST[:PORT] or [IPV6]:PORT; port 0..65535. Raises ValueError("must be ...")."""
    found = re.fullmatch(r"(?:\[([^]\s/@]+)\]|([^][:\s/@]+))(?::(\d{0,5}))?", text.strip())
    port = int(found[3] or 29400) if found else -1
    if found is None or port > 65535:
        raise ValueError("must be HOST:PORT (an IPv6 address in brackets), for example node1:29400")
    return found[1] or found[2], port


def split_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """(host, port) of each in HOST[:PORT],... Raises ValueError("must be ...")."""
    return tuple(map(split_endpoint, text.split(",")))


def _endpoints(raw: object) -> str:
    if raw == "":
        return ""
    text = k.as_text(raw, "must be HOST:PORT").strip()
    split_endpoints(text)
    return text


ENDPOINTS = Kind("HOST[:PORT],...", _endpoints)


@dataclass(frozen=True)
class RendezvousConfig:
    """`--rdzv-conf`, times in seconds."""

    # this node starts the coordinator; None = decided by infra rank or endpoint
    is_host: bool | None = None
    # > 0: how long too few nodes are waited for; default: `timeout` where that is given
    join_timeout: float = 300.0
    # >= 0: how long a complete job waits for spares before its first plan
    last_call_timeout: float = 1.0
    ignored: tuple[str, ...] = ()  # keys that were given and change nothing here

    def __str__(self) -> str:
        names = ("is_host", "join_timeout", "last_call_timeout")
        given = {
            name: getattr(self, name)
            for name in names
            if getattr(self, name) != getattr(RendezvousConfig, name)
        }
        return ",".join(f"{name}={value}" for name, value in given.items())


_RDZV_KINDS = {
    "is_host": k.optional(k.BOOL),
    "join_timeout": k.POSITIVE_SECONDS,
    "timeout": k.POSITIVE_SECONDS,
    "last_call_timeout": k.SECONDS,
}
_RDZV_IGNORED = ("read_timeout", "close_timeout", "store_connect_wait_seconds", "use_libuv")
_RDZV_REFUSED = ("replacement_group_size", "segment", "segment_check_interval")


def _rdzv_conf(raw: object) -> RendezvousConfig:
    if isinstance(raw, RendezvousConfig):
        return raw
    # quotes that a launcher's script passes on
    text = raw.strip("'\"") if isinstance(raw, str) else raw
    given = pairs(
        text, "=", "must be KEY=VALUE,... with each key once, for example join_timeout=600"
    )
    ignored = tuple(name for name in _RDZV_IGNORED if given.pop(name, None) is not None)
    for name, value in given.items():
        if name in _RDZV_REFUSED:
            raise ValueError(f"{name} is not supported; leave it out")
        if name not in _RDZV_KINDS:
            near = k.did_you_mean(name, _RDZV_KINDS) or f" (known: {', '.join(_RDZV_KINDS)})"
            raise ValueError(f"{name} is not a key of --rdzv-conf{near}")
        try:
            given[name] = _RDZV_KINDS[name].parse(value)
        except ValueError as error:
            raise ValueError(f"{name} {error}") from None
    if "timeout" in given:  # with torchrun, users raise it for nodes that come late
        given.setdefault("join_timeout", given.pop("timeout"))
    return RendezvousConfig(**given, ignored=ignored)


RDZV_CONF = Kind("KEY=VALUE,...", _rdzv_conf, str)
