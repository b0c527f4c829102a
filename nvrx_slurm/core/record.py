"""Event logs: what a core was told and what it decided, one JSON line per step, and how to run them again.

Line 1 (a header) holds what is needed to build the core anew; each further line holds one event, when it came, the
state after it and the commands. Because cores are pure, feeding the events again must give the same commands.
Decoding is strict: a name or field that is not in the registry below is an error, never an object.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

from nvrx_slurm import __version__
from nvrx_slurm import types as records
from nvrx_slurm.core.job import agent_events, coordinator_events
from nvrx_slurm.core.job.agent import Agent
from nvrx_slurm.core.job.agent_events import AgentSettings
from nvrx_slurm.core.job.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.job.restarts import RestartLimits
from nvrx_slurm.core.machine import Machine, Say, Tick
from nvrx_slurm.errors import NvrxError, ProtocolError

MAX_LINE_CHARS = 4 << 20
COMMANDS_IN_FULL = 64  # a plan for 10,000 nodes is 10,000 commands: the others are logged as a number
_HEADER_START = '{"nvrx":'


def _registry() -> dict[str, type]:
    """Every dataclass that may stand in a log, by name."""
    found: dict[str, type] = {cls.__name__: cls for cls in (Tick, Say, CoordinatorSettings, RestartLimits)}
    for home in (records, agent_events, coordinator_events):
        for name, cls in vars(home).items():
            if is_dataclass(cls) and getattr(cls, "__module__", "") == home.__name__:
                found[name] = typing.cast(type, cls)
    return found


_TYPES = _registry()
_HINTS: dict[str, dict[str, Any]] = {}  # filled when first needed: resolving annotations is slow


# --- encoding ------------------------------------------------------------------------------------------


def encode(value: Any) -> Any:
    """JSON value of a record of the cores; dataclasses carry their name as "type"."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    name = type(value).__name__
    if _TYPES.get(name) is not type(value):
        raise ProtocolError(f"{name} is not a record of the cores and cannot be logged")
    coded: dict[str, Any] = {"type": name}
    for field in fields(typing.cast(Any, value)):
        coded[field.name] = encode(getattr(value, field.name))
    return coded


def header_line(core: Machine) -> str:
    """First line of a log, without the newline. `core` is a Coordinator or an Agent that has not stepped yet."""
    header: dict[str, Any] = {"nvrx": __version__, "core": type(core).__name__.lower()}
    if isinstance(core, Agent):
        header["node"] = encode(core.node)
    if isinstance(core, (Agent, Coordinator)):
        header["settings"] = encode(core.settings)
    header["now"] = core.started
    return _dump(header)


def step_line(event: Any, now: float, wall: float, core: Machine, commands: Sequence[Any]) -> str:
    """One step, without the newline. `now` is monotonic, `wall` Unix time, in seconds; `core` is in its new state."""
    step = {"now": now, "wall": wall, "event": encode(event), "state": core.state.name}
    return _dump({**step, **_coded(commands)})


def _coded(commands: Sequence[Any]) -> dict[str, Any]:
    """The commands of a step: the first in full, the others as their number."""
    coded: dict[str, Any] = {"commands": [encode(command) for command in commands[:COMMANDS_IN_FULL]]}
    if len(commands) > COMMANDS_IN_FULL:
        coded["more"] = len(commands) - COMMANDS_IN_FULL
    return coded


def _dump(value: Any) -> str:
    try:
        line = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise ProtocolError(f"cannot be logged as JSON: {error}") from None
    if len(line) > MAX_LINE_CHARS:
        raise ProtocolError(f"a log line of {len(line)} characters is too long (limit {MAX_LINE_CHARS})")
    return line


# --- decoding ------------------------------------------------------------------------------------------


def decode(value: Any) -> Any:
    """The record that `encode` made this of. Raises ProtocolError, one sentence, for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("type"), str):
        raise ProtocolError(f'expected a record with a "type", not {_short(value)}')
    name = value["type"]
    cls = _TYPES.get(name)
    if cls is None:
        raise ProtocolError(f"unknown record type {name[:80]!r}")
    hints = _hints(name, cls)
    unknown = sorted(value.keys() - hints.keys() - {"type"})
    missing = sorted(hints.keys() - value.keys())
    if unknown or missing:
        problem = f"has an unknown field {unknown[0][:80]!r}" if unknown else f"lacks the field {missing[0]!r}"
        raise ProtocolError(f"{name} {problem}")
    return cls(**{field: _decode(value[field], hint, f"{name}.{field}") for field, hint in hints.items()})


def _hints(name: str, cls: type) -> dict[str, Any]:
    if name not in _HINTS:
        _HINTS[name] = typing.get_type_hints(cls)
    return _HINTS[name]


def _decode(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint` of the field `where`."""
    if isinstance(hint, types.UnionType):
        if value is None and types.NoneType in hint.__args__:
            return None
        options = [option for option in hint.__args__ if option is not types.NoneType]
        return _decode(value, options[0], where) if len(options) == 1 else _one_of(value, options, where)
    if typing.get_origin(hint) is tuple:
        return _decode_tuple(value, hint, where)
    if is_dataclass(hint):
        return _one_of(value, [hint], where)
    if issubclass(hint, Enum):
        if value not in [member.value for member in hint]:
            raise ProtocolError(f"{where}: no {hint.__name__} is called {_short(value)}")
        return hint(value)
    fits = type(value) is hint or (hint is float and type(value) is int)
    if not fits:
        raise ProtocolError(f"{where} must be of type {hint.__name__}, not {_short(value)}")
    return value


def _decode_tuple(value: Any, hint: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ProtocolError(f"{where} must be a list, not {_short(value)}")
    item_hint = typing.get_args(hint)[0]  # all our tuples are tuple[X, ...]
    return tuple(_decode(item, item_hint, where) for item in value)


def _one_of(value: Any, classes: Sequence[Any], where: str) -> Any:
    record = decode(value)
    if type(record) not in classes:
        raise ProtocolError(f"{where} cannot be a {type(record).__name__}")
    return record


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# --- running a log again ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a log and a new run of it part. `torn`: only an unfinished last line, as a killed program leaves it."""

    line: int  # from 1
    what: str
    torn: bool = False

    def __str__(self) -> str:
        return f"line {self.line}: {self.what}"


def replay(lines: Iterable[str]) -> list[Difference]:
    """Feed the events of a log to a fresh core and compare what it does; [] = the same decisions throughout.

    Stops at the first step that differs (what comes after it means nothing), but a further header, of the next
    life of a node that came back, starts afresh.
    """
    found: list[Difference] = []
    core: Machine | None = None
    empty = True
    broken: Difference | None = None  # a line that is no JSON: torn if nothing but a new header follows
    for number, line in enumerate(lines, 1):
        empty = False
        content = _after_tear(line)
        if broken is not None and not content.startswith(_HEADER_START):
            found.append(Difference(broken.line, "is not one line of JSON"))
            core = None
        broken = None
        try:
            if content.startswith(_HEADER_START):
                core = _core(_load(content))
            elif core is not None:
                _check_step(core, _load(content))
            elif number == 1:
                raise ProtocolError("the log does not start with a header")
        except _NotJson:
            broken = Difference(number, "is torn: the program ended while writing it", torn=True)
        except NvrxError as error:
            found.append(Difference(number, str(error)))
            core = None
    if broken is not None:
        found.append(broken)
    return [Difference(1, "the log is empty")] if empty else found


class _NotJson(Exception):
    """The line is not JSON."""


def _after_tear(line: str) -> str:
    """A new life of an agent appends its header to whatever its last life left behind, even half a line."""
    start = line.find(_HEADER_START)
    return line[start:] if start > 0 else line


def _load(line: str) -> dict[str, Any]:
    if len(line) > MAX_LINE_CHARS + 1:
        raise ProtocolError(f"is longer than {MAX_LINE_CHARS} characters")
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        raise _NotJson from None
    if not isinstance(content, dict):
        raise ProtocolError("is not a JSON object")
    return content


def _core(header: dict[str, Any]) -> Machine:
    settings, now = decode(header.get("settings")), _number(header, "now")
    if header.get("core") == "coordinator" and isinstance(settings, CoordinatorSettings):
        return Coordinator(settings, now)
    node = decode(header.get("node"))
    if header.get("core") == "agent" and isinstance(settings, AgentSettings) and isinstance(node, records.Node):
        return Agent(node, settings, now)
    raise ProtocolError(f"a header of an unknown core {_short(header.get('core'))}")


def _check_step(core: Machine, step: dict[str, Any]) -> None:
    """Run one step again; raises NvrxError with the first thing that differs."""
    commands = core.step(decode(step.get("event")), _number(step, "now"))
    logged: dict[str, Any] = {name: step[name] for name in ("commands", "more") if name in step}
    again = _coded(commands)
    if step.get("state") != core.state.name:
        raise ProtocolError(f"the log says state {_short(step.get('state'))}, the core is in {core.state.name}")
    if logged != again:
        raise ProtocolError(_first_difference(logged, again))


def _number(content: dict[str, Any], name: str) -> float:
    value = content.get(name)
    if type(value) not in (int, float):
        raise ProtocolError(f"{name} must be a number, not {_short(value)}")
    return float(typing.cast(float, value))


def _first_difference(logged: dict[str, Any], again: dict[str, Any]) -> str:
    mine, theirs = again["commands"], logged.get("commands")
    if not isinstance(theirs, list):
        return f"commands must be a list, not {_short(theirs)}"
    for place, (a, b) in enumerate(zip(theirs, mine, strict=False)):
        if a != b:
            return f"command {place + 1} was {_dump(a)}, but now it is {_dump(b)}"
    if len(theirs) != len(mine):
        return f"{len(theirs)} commands were logged, but now there are {len(mine)}"
    return f"{logged.get('more')} further commands were logged, but now there are {again.get('more')}"
