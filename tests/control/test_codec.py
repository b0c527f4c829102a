"""Every message survives the wire; what no peer of this version sends is a ProtocolError and never anything else."""

import math
import re
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_values import values

from nvrx_slurm import types as t
from nvrx_slurm.control import stream
from nvrx_slurm.control.messages import FROM_AGENTS, FROM_COORDINATOR
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import ProtocolError

pytestmark = pytest.mark.fast


BY_WIRE = [
    *((FROM_AGENTS, kind) for kind in get_args(t.AgentMessage)),
    *((FROM_COORDINATOR, kind) for kind in get_args(t.CoordinatorMessage)),
]


@pytest.mark.parametrize("wire, kind", BY_WIRE, ids=lambda one: getattr(one, "__name__", ""))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_messages_survive_the_wire(wire, kind, data):
    message = data.draw(values(kind))
    assert wire.decode(wire.encode(message)) == message


@settings(max_examples=500)
@given(st.binary(max_size=300), st.sampled_from([FROM_AGENTS, FROM_COORDINATOR]))
def test_hostile_bytes_are_an_error_and_nothing_else(data, wire):
    try:
        wire.decode(data)
    except ProtocolError:
        return


FAULT_1 = t.RankFault(t.FaultKind.EXIT, "h", 0)
NODE = {"node_id": "n", "infra_rank": 0, "host": "h", "addr": "", "nproc": 1}
PLAN = {
    "type": "Plan", "term": 1, "cycle": 0, "max_restarts": 0, "active_nodes": 1, "world_size": 1,
    "master_addr": "", "master_port": 1,
}  # fmt: skip
FAULT = {"kind": "exit", "host": "h", "infra_rank": 0}
PEER = {"key": "", "host": "", "addr": "", "port": 0}
EVIDENCE = {"rank": 0, "infra_rank": 0, "host": ""}


def register(port=0, **node):
    return {"type": "Register", "node": {**NODE, **node}, "port": port}


def of_cycle(kind, **more):
    return {"type": kind, "term": 1, "cycle": 0, **more}


def plan(history=None, **fields):
    return {**PLAN, "history": history or {}, **fields}


@pytest.mark.parametrize(
    "message, field",
    [
        ({}, "type"),
        ([], "array"),
        ({"type": "Popen", "args": "reboot"}, "$.type"),
        ({"type": "Register"}, "node"),
        ({**register(), "more": 1}, "more"),
        (PLAN, "history"),
        (register(nproc=0), "$.node.nproc"),
        (register(port=65536), "$.port"),
        (register(infra_rank=-2), "$.node.infra_rank"),
        (register(infra_rank=True), "$.node.infra_rank"),
        (register(host="h" * 257), "$.node.host"),
        (register(order=[1] * 9), "$.node.order"),
        ({**register(), "doing": ""}, "$.doing"),
        (of_cycle("RanksFailed", faults=[]), "$.faults"),
        (of_cycle("RanksFailed", faults=[FAULT] * 65), "$.faults"),
        (of_cycle("RanksFailed", faults=[{**FAULT, "kind": "gremlin"}]), "$.faults[0].kind"),
        (of_cycle("RanksFailed", faults=[{**FAULT, "exit_code": -256}]), "$.faults[0].exit_code"),
        (of_cycle("Asked", action=3, rank=0, description=""), "$.action"),
        ({"type": "WarnJob", "signum": 65, "reason": ""}, "$.signum"),
        ({**of_cycle("Succeeded"), "cycle": 2**32 - 1}, "$.cycle"),
        (of_cycle("Evidence", ranks_seen=[{**EVIDENCE, "silent_s": math.inf}]), "$.ranks_seen[0].silent_s"),
        ({"type": "RanksGone", "cycle": 0, "ranks": [-2], "reason": ""}, "$.ranks[0]"),
        (plan({"excluded": ["x"] * 4097}), "$.history.excluded"),
        (plan({"down_s": math.nan}), "$.history.down_s"),
        (plan(successors=[PEER] * 33), "$.successors"),
    ],
)
def test_bounds(message, field):
    """The error names the field."""
    kind = message.get("type") if isinstance(message, dict) else None
    wire = FROM_COORDINATOR if kind in ("Plan", "RanksGone") else FROM_AGENTS
    with pytest.raises(ProtocolError, match=re.escape(field)):
        wire.decode(msgspec.msgpack.encode(message))


def test_what_is_within_the_bounds_is_taken():
    for message in (register(), of_cycle("RanksFailed", faults=[FAULT]), of_cycle("Evidence", ranks_seen=[EVIDENCE])):
        assert type(FROM_AGENTS.decode(msgspec.msgpack.encode(message))).__name__ == message["type"]
    assert FROM_COORDINATOR.decode(msgspec.msgpack.encode(plan(successors=[PEER])))


def test_the_sender_cuts_what_is_too_long():
    long = replace(FAULT_1, message="m" * 9000, traceback="t" * 90_000, host="h" * 900, log="l" * 9000)
    wire = FROM_AGENTS.encode(t.RanksFailed(1, 0, (long,) * 100))
    assert len(wire) < 2 * stream.MAX_MESSAGE_BYTES  # and 64 faults of the longest kind are just above one message
    got = FROM_AGENTS.decode(wire)
    assert isinstance(got, t.RanksFailed)
    assert len(got.faults) == 64 and {len(got.faults[0].message), len(got.faults[0].log)} == {2000, 4096}


def test_texts_that_are_not_unicode_are_sent_all_the_same():
    """File names and workers' output may hold lone surrogates."""
    fault = replace(FAULT_1, message="caf\udce9 \ud800", log="/logs/\udcff")
    got = FROM_AGENTS.decode(FROM_AGENTS.encode(t.RanksFailed(1, 0, (fault,))))
    assert isinstance(got, t.RanksFailed)
    assert got.faults[0].message == "caf? ?" and got.faults[0].log == "/logs/?"
