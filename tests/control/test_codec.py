"""Every message survives the wire; what no peer of this version sends is a ProtocolError and never anything else."""

from __future__ import annotations

import math
import re
from dataclasses import is_dataclass, replace
from enum import Enum
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvrx_slurm import types as t
from nvrx_slurm.control import codec, stream
from nvrx_slurm.control import control_pb2 as pb
from nvrx_slurm.errors import ProtocolError

UNSIGNED = (4, 13)  # uint64 and uint32 of descriptor.proto


def of(record: type) -> st.SearchStrategy[Any]:
    """Records of a class, up to the bounds of the codec."""
    hints = get_type_hints(record).items()
    return st.builds(record, **{name: _values(record, name, hint) for name, hint in hints})


def _values(record: type, name: str, hint: Any) -> st.SearchStrategy[Any]:
    if isinstance(hint, UnionType):
        return st.none() | of(get_args(hint)[0])
    if get_origin(hint) is tuple:
        least = 1 if record is t.RanksFailed else 0
        return st.lists(_values(record, name, get_args(hint)[0]), min_size=least, max_size=3).map(tuple)
    if is_dataclass(hint):
        return of(hint)
    if issubclass(hint, Enum):
        return st.sampled_from(hint)
    if hint is bool:
        return st.booleans()
    if hint is str:
        limit = codec._LONG_TEXT.get(name, codec._ID_CHARS)
        return st.text(max_size=40) | st.just("x" * limit)
    field = getattr(pb, record.__name__).DESCRIPTOR.fields_by_name[name]
    low, high = codec._BOUNDS.get(name, (-1, codec._MAX_COUNT))
    return st.integers(max(low, 0) if field.type in UNSIGNED else low, high)


FROM_AGENT = st.one_of([of(record) for record in codec._AGENT_FIELDS])
FROM_COORDINATOR = st.one_of([of(record) for record in codec._COORDINATOR_FIELDS])


@given(FROM_AGENT)
def test_agents_messages_survive_the_wire(message: t.AgentMessage) -> None:
    wire = codec.from_agent(message).SerializeToString()
    assert codec.decode(pb.FromAgent.FromString(wire)) == message


@given(FROM_COORDINATOR)
def test_coordinators_messages_survive_the_wire(message: t.CoordinatorMessage) -> None:
    wire = codec.from_coordinator(message).SerializeToString()
    assert codec.decode(pb.FromCoordinator.FromString(wire)) == message


@settings(max_examples=500)
@given(st.binary(max_size=300), st.sampled_from([pb.FromAgent, pb.FromCoordinator]))
def test_hostile_bytes_are_an_error_and_nothing_else(data: bytes, envelope: Any) -> None:
    try:
        codec.decode(codec.parse(envelope, data))
    except ProtocolError:
        return


FAULT_1 = t.RankFault(t.FaultKind.EXIT, "h", 0)


def register(port: int = 0, **node: Any) -> pb.FromAgent:
    return pb.FromAgent(register=pb.Register(node=pb.Node(**{"nproc": 1, **node}), port=port))


def failed(*faults: pb.RankFault) -> pb.FromAgent:
    return pb.FromAgent(ranks_failed=pb.RanksFailed(faults=faults))


def plan(history: Any = None, **fields: Any) -> pb.FromCoordinator:
    return pb.FromCoordinator(plan=pb.Plan(history=history or pb.History(), **fields))


@pytest.mark.parametrize(
    ("envelope", "what"),
    [
        (pb.FromAgent(), "without content"),
        (pb.FromCoordinator(), "without content"),
        (pb.FromAgent(hello=pb.Hello(version=1)), "hello"),
        (pb.FromAgent(register=pb.Register()), "Register.node is missing"),
        (pb.FromCoordinator(plan=pb.Plan()), "Plan.history is missing"),
        (register(nproc=0), "Node.nproc is 0"),
        (register(port=65536), "Register.port is 65536"),
        (register(infra_rank=-2), "Node.infra_rank is -2"),
        (register(host="h" * 257), "Node.host has 257 characters"),
        (register(order=[1] * 9), "Node.order has 9 entries"),
        (register(), "Register.doing is '', which is no Activity"),
        (failed(), "RanksFailed.faults is empty"),
        (failed(*[pb.RankFault(kind="exit")] * 65), "RanksFailed.faults has 65 entries"),
        (failed(pb.RankFault(kind="gremlin")), "'gremlin', which is no FaultKind"),
        (failed(pb.RankFault(kind="exit", exit_code=-256)), "exit_code is -256"),
        (pb.FromAgent(asked=pb.Asked(action=3)), "Asked.action is '3', which is no WorkloadAction"),
        (pb.FromAgent(warn_job=pb.WarnJob(signum=65)), "WarnJob.signum is 65"),
        (pb.FromAgent(succeeded=pb.Succeeded(cycle=2**32 - 1)), "Succeeded.cycle is 4294967295"),
        (pb.FromAgent(evidence=pb.Evidence(ranks_seen=[pb.RankEvidence(silent_s=math.inf)])), "silent_s is inf"),
        (pb.FromCoordinator(ranks_gone=pb.RanksGone(ranks=[-2])), "RanksGone.ranks is -2"),
        (plan(pb.History(excluded=["x"] * 4097)), "excluded has 4097 entries"),
        (plan(pb.History(down_s=math.nan)), "History.down_s is nan"),
        (plan(successors=[pb.Peer()] * 33), "successors has 33 entries"),
    ],
)
def test_bounds(envelope: pb.FromAgent | pb.FromCoordinator, what: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(what)):
        codec.decode(envelope)


def test_the_sender_cuts_what_is_too_long() -> None:
    long = replace(FAULT_1, message="m" * 9000, traceback="t" * 90_000, host="h" * 900, log="l" * 9000)
    message = t.RanksFailed(1, 0, (long,) * 100)
    wire = codec.from_agent(message).SerializeToString()
    assert len(wire) < 2 * stream.MAX_MESSAGE_BYTES  # and 64 faults of the longest kind are just above one message
    got = codec.decode(pb.FromAgent.FromString(wire))
    assert len(got.faults) == 64 and {len(got.faults[0].message), len(got.faults[0].log)} == {2000, 4096}


def test_texts_that_are_not_unicode_are_sent_all_the_same() -> None:
    """File names and workers' output may hold lone surrogates."""
    fault = replace(FAULT_1, message="caf\udce9 \ud800", log="/logs/\udcff")
    got = codec.decode(codec.from_agent(t.RanksFailed(1, 0, (fault,))))
    assert got.faults[0].message == "caf? ?" and got.faults[0].log == "/logs/?"
