"""Records of `nvrx_slurm.types` <-> protobuf. A message that this version never sends raises ProtocolError."""

from __future__ import annotations

import dataclasses
from enum import Enum
from functools import cache
from typing import Any, TypeVar, get_args, get_type_hints

from google.protobuf.message import DecodeError, Message

from nvrx_slurm import types as t
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.errors import ProtocolError

Envelope = TypeVar("Envelope", bound=Message)
_LISTS = {"faults": 64, "order": 8, "spent": 16, "excluded": 4096, "ranks": 4096, "successors": 32}
_LISTS |= {"dead": 4096, "returned": 4096, "restarts": 8, "lost": 64, "promoted": 64}  # longest; cut by the sender
_LISTS |= {"ports": 64, "ranks_seen": 64, "frames": 12, "collectives": 8}
_LISTS |= {"nodes": 32, "seconds": 32, "sections": 16, "estimated": 32, "costs": 9, "paces": 64}
_LISTS |= {"modules": 32, "names": 256, "values": 256}
_LISTS |= {"waits": 4096, "waited_s": 4096, "until_s": 4096}
_MAX_COUNT = 10_000_000  # ranks, cycles, terms: far above anything real
_MAX_S = 1e10  # all floats are seconds; Unix time is below, and differs between hosts
# Longest texts, cut by the sender.
_LONG_TEXT = {"message": 2000, "reason": 4000, "description": 4000, "traceback": 16_000, "log": 4096, "cause": 400}
_LONG_TEXT |= {"line": 300, "resume_from": 4096, "values": 4096}
_ID_CHARS = 256  # every other string
_BOUNDS = {
    "port": (0, 65535),
    "ports": (1, 65535),
    "master_port": (0, 65535),
    "nproc": (1, 4096),
    "code": (0, 255),
    "exit_code": (-255, 255),
    "signum": (0, 64),
    "iteration": (-1, 1 << 62),
    "checkpoint": (-1, 1 << 62),
    "resume_before": (-1, 1 << 62),
    "seq": (0, 1 << 62),
    "steps": (0, 1 << 40),
    "waits": (0, 1 << 40),
    "order": (0, 2**64 - 1),
}
# Records have the names of their messages; a message without a record (Hello) is handled before the codec.
_RECORDS: dict[str, type] = {name: getattr(t, name) for name in pb.DESCRIPTOR.message_types_by_name if hasattr(t, name)}


def _fields(envelope: type[Message]) -> dict[type, str]:
    """The field of an envelope by the class of the record that goes there."""
    named = ((field.name, field.message_type) for field in envelope.DESCRIPTOR.fields)
    return {_RECORDS[kind.name]: name for name, kind in named if kind is not None and kind.name in _RECORDS}


_AGENT_FIELDS, _COORDINATOR_FIELDS = _fields(pb.FromAgent), _fields(pb.FromCoordinator)


def from_agent(message: t.AgentMessage) -> pb.FromAgent:
    """Wrap an agent's message for the wire."""
    return pb.FromAgent(**{_AGENT_FIELDS[type(message)]: _to_pb(message)})


def from_coordinator(message: t.CoordinatorMessage) -> pb.FromCoordinator:
    """Wrap a coordinator's message for the wire."""
    if isinstance(message, t.Plan):
        return _plan(message)
    return pb.FromCoordinator(**{_COORDINATOR_FIELDS[type(message)]: _to_pb(message)})


def parse(kind: type[Envelope], data: bytes) -> Envelope:
    """The message of class `kind` in `data`. Raises ProtocolError if there is none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise ProtocolError("the peer sent bytes that are no message") from None


def decode(envelope: pb.FromAgent | pb.FromCoordinator) -> Any:
    """The record inside an envelope. Raises ProtocolError for an empty, unknown or out-of-bounds one."""
    what = envelope.WhichOneof("what")
    known = _AGENT_FIELDS if isinstance(envelope, pb.FromAgent) else _COORDINATOR_FIELDS
    if what not in known.values():
        raise ProtocolError(f"the peer sent a {what or 'message without content'}, which is not expected here")
    return _from_pb(getattr(envelope, str(what)))


def _to_pb(record: Any) -> Any:
    cls: type = type(record)
    fields: dict[str, Any] = {}
    for field, _ in _hints(cls):
        value = getattr(record, field)
        if isinstance(value, tuple):
            value = [_plain(field, item) for item in value[: _LISTS[field]]]
        if value is not None:
            fields[field] = _plain(field, value)
    return getattr(pb, cls.__name__)(**fields)


def _plain(field: str, value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        # Output and paths of workers may hold lone surrogates, which protobuf's strings must not.
        return value.encode("utf-8", "replace").decode("utf-8")[: _LONG_TEXT.get(field, _ID_CHARS)]
    return _to_pb(value) if dataclasses.is_dataclass(value) else value


_OWN = ("group_rank", "rank_offset")
_SHARED = [field.name for field in dataclasses.fields(t.Plan) if field.name not in _OWN]
_last: list[tuple[t.Plan, pb.FromCoordinator]] = []  # the plan that was wrapped last, if any


def _plan(plan: t.Plan) -> pb.FromCoordinator:
    """All plans of a cycle carry the same history and successors: they are wrapped once."""
    if not _last or any(getattr(plan, field) is not getattr(_last[0][0], field) for field in _SHARED):
        _last[:] = [(plan, pb.FromCoordinator(plan=_to_pb(plan)))]
    found = pb.FromCoordinator()
    found.CopyFrom(_last[0][1])
    found.plan.group_rank, found.plan.rank_offset = plan.group_rank, plan.rank_offset
    return found


@cache
def _hints(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(cls).items())


def _from_pb(message: Any) -> Any:
    name = type(message).__name__
    cls = _RECORDS[name]
    return cls(**{field: _field(f"{name}.{field}", hint, message) for field, hint in _hints(cls)})


def _field(where: str, hint: Any, message: Any) -> Any:
    field = where.rpartition(".")[2]
    raw = getattr(message, field)
    if field in _LISTS:
        if len(raw) > _LISTS[field]:
            raise ProtocolError(f"{where} has {len(raw)} entries; at most {_LISTS[field]} are allowed")
        if where == "RanksFailed.faults" and not raw:
            raise ProtocolError(f"{where} is empty: nothing failed")
        return tuple(_value(where, field, get_args(hint)[0], item) for item in raw)
    if isinstance(raw, Message) and not message.HasField(field):
        if type(None) not in get_args(hint):
            raise ProtocolError(f"{where} is missing")
        return None
    return _value(where, field, hint, raw)


def _value(where: str, field: str, hint: Any, raw: Any) -> Any:
    if isinstance(raw, Message):
        return _from_pb(raw)
    if hint is str:
        limit = _LONG_TEXT.get(field, _ID_CHARS)
        if len(raw) > limit:
            raise ProtocolError(f"{where} has {len(raw)} characters; at most {limit} are allowed")
    elif hint is int:
        low, high = _BOUNDS.get(field, (-1, _MAX_COUNT))
        if not low <= raw <= high:
            raise ProtocolError(f"{where} is {raw}; allowed is {low} to {high}")
    elif hint is float:
        if not -_MAX_S <= raw <= _MAX_S:  # NaN, too
            raise ProtocolError(f"{where} is {raw:g}; allowed is {-_MAX_S:g} to {_MAX_S:g}")
    elif hint is not bool:
        try:
            return hint(raw)
        except ValueError:
            raise ProtocolError(f"{where} is {str(raw)[:40]!r}, which is no {hint.__name__}") from None
    return raw
