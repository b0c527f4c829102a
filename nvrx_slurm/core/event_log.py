"""Event logs: what a core was told and what it decided, one JSON line per step, and how to run them again.

Line 1 (a header) holds what is needed to build the core anew; each further line holds one event, when it came, the
state after it and the commands. Because cores are pure, feeding the events again must give the same commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, Union

from nvrx_slurm import __version__
from nvrx_slurm import types as records
from nvrx_slurm.codec import from_plain, to_json
from nvrx_slurm.core.agent import events as agent_events
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.bounded_json import parsed
from nvrx_slurm.core.coordinator import events as coordinator_events
from nvrx_slurm.core.coordinator.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.core.coordinator.events import HangFound, SendTo
from nvrx_slurm.core.coordinator.restarts import RestartLimits
from nvrx_slurm.core.election import events as election_events
from nvrx_slurm.core.election.election import Election
from nvrx_slurm.core.machine import Machine, Say, Tick
from nvrx_slurm.core.progress import DAMAGE
from nvrx_slurm.declared import Record, replace
from nvrx_slurm.errors import NvrxError, ProtocolError

MAX_LINE_CHARS = 4 << 20
_MOST_DIFFERENCES, _MOST_SKIPPED = 100, 100_000  # of a log; lines after the last of them
COMMANDS_IN_FULL = 64  # the others are logged as a number
_HEADER_START = '{"nvrx":'

_HOMES = (records, agent_events, coordinator_events, election_events)
_OTHERS = (Tick, Say, CoordinatorSettings, RestartLimits)
_CORES: tuple[type[Machine], ...] = (Coordinator, Agent, Election)


@cache
def logged() -> tuple[type[Record], ...]:
    """All records that event logs hold."""
    found = {one: None for home in _HOMES for one in vars(home).values() if _is_record(one)}
    return (*found, *(one for one in _OTHERS if one not in found))


def _is_record(one: object) -> bool:
    return isinstance(one, type) and issubclass(one, Record) and one is not Record


def decode(value: Any) -> Any:
    """The record, or the tuple of records, that a log holds. Raises ProtocolError."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    return value if value is None else from_plain(value, Union[logged()])  # noqa: UP007 (they are known at run time)


# --- encoding ------------------------------------------------------------------------------------------


def header_line(core: Machine) -> str:
    """First line of a log, without the newline. `core` has not stepped yet."""
    made_of = {name: getattr(core, name) for name in core.made_of}
    return _dump(
        {"nvrx": __version__, "core": type(core).__name__.lower(), **made_of, "now": core.started}
    )


def step_line(event: Any, now: float, wall: float, core: Machine, commands: Sequence[Any]) -> str:
    """One step, without the newline. `now` is monotonic, `wall` Unix time, in seconds; `core` is in its new state."""
    step = {"n": core.number, "now": now, "wall": wall, "event": event, "state": core.state.name}
    if len(core.chain) > 1:  # else the event has caused all commands
        step["caused"] = core.chain
    return _dump({**step, **_coded(commands)})


def _coded(commands: Sequence[Any]) -> dict[str, Any]:
    """The commands of a step: the first in full, the others as their number. A plan for 10,000 nodes is 10,000
    commands: "plans" has what they share once, and "to", who gets it: "ID GROUP_RANK RANK_OFFSET"."""
    others: list[Any] = []
    plans: list[tuple[records.Plan, list[str]]] = []
    for command in commands:
        message = command.message if isinstance(command, SendTo) else None
        if not isinstance(message, records.Plan):
            others.append(command)
            continue
        shared = replace(message, group_rank=-1, rank_offset=-1)
        if not plans or plans[-1][0] != shared:
            plans.append((shared, []))
        plans[-1][1].append(f"{command.node_id} {message.group_rank} {message.rank_offset}")
    shown = []
    for command in others[:COMMANDS_IN_FULL]:
        if isinstance(command, HangFound):  # hang.json has the ranks
            command = replace(command, ranks=())
        shown.append(command)
    coded: dict[str, Any] = {"commands": shown}
    if len(others) > COMMANDS_IN_FULL:
        coded["more"] = len(others) - COMMANDS_IN_FULL
    if plans:
        coded["plans"] = [{"plan": shared, "to": to} for shared, to in plans]
    return coded


def _dump(value: Any) -> str:
    line = to_json(value)
    if len(line) > MAX_LINE_CHARS:
        raise ProtocolError(
            f"a log line of {len(line)} characters is too long (limit {MAX_LINE_CHARS})"
        )
    return line


# --- running a log again ---------------------------------------------------------------------------------


class Difference(Record):
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
    # the last line, if it is no JSON; an accident if only a new header follows
    torn: Difference | None = None
    number = 0
    for number, line in enumerate(lines, 1):
        if found and (len(found) >= _MOST_DIFFERENCES or number > found[-1].line + _MOST_SKIPPED):
            return found
        if len(line) > MAX_LINE_CHARS + 1:
            return [*found, Difference(number, f"is longer than {MAX_LINE_CHARS} characters")]
        # a new life appends its header even to half a line
        content = line[max(line.find(_HEADER_START), 0) :]
        new = content.startswith(_HEADER_START)
        if torn is not None and not new:
            found.append(Difference(torn.line, "is not one line of JSON"))
            core = None
        torn = None
        try:
            if new:
                core = _core(parsed(content))
            elif core is not None:
                _check_step(core, parsed(content))
            elif number == 1:
                raise ProtocolError("the log does not start with a header")
        except json.JSONDecodeError:
            torn = Difference(number, "is torn: the program ended while writing it", torn=True)
        except (NvrxError, *DAMAGE) as error:  # all but the first: altered
            found.append(Difference(number, str(error)))
            core = None
    if number == 0:
        found.append(Difference(1, "the log is empty"))
    return [*found, torn] if torn is not None else found


def _core(header: dict[str, Any]) -> Machine:
    name, now = header.get("core"), float(header["now"])
    try:
        kind: Any = {core.__name__.lower(): core for core in _CORES}[str(name)]
        core: Machine = kind(*(decode(header[field]) for field in kind.made_of), now)
    except (AttributeError, KeyError, TypeError):
        raise ProtocolError(
            f"a header of an unknown core, or not a whole one: {name!r:.80}"
        ) from None
    return core


def _check_step(core: Machine, step: dict[str, Any]) -> None:
    """Run one step again; raises NvrxError with the first thing that differs."""
    again = json.loads(to_json(_coded(core.step(decode(step.get("event")), float(step["now"])))))
    if step.get("state") != core.state.name:
        raise ProtocolError(
            f"the log says state {step.get('state')!r:.80}, the core is in {core.state.name}"
        )
    logged = step.get("commands", [])
    mine = again["commands"]
    for place, (a, b) in enumerate(zip_longest(logged, mine), 1):
        if a != b:
            raise ProtocolError(f"command {place} was {to_json(a)}, but now it is {to_json(b)}")
    if step.get("n") != core.number:
        raise ProtocolError(f"this was event {step.get('n')!r:.20}, but now it is {core.number}")
    if step.get("plans") != again.get("plans"):
        raise ProtocolError("the log has other plans than the core makes now")
    if step.get("more") != again.get("more"):
        raise ProtocolError(
            f"{step.get('more')} further commands were logged, but now there are {again.get('more')}"
        )
