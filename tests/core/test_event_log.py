"""Event logs: encoding, strict decoding, and running them again."""

import json
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_values import values

from nvrx_slurm.codec import to_json
from nvrx_slurm.core import event_log
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.agent.agent import Agent
from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.event_log import Difference, decode, header_line, replay, step_line
from nvrx_slurm.declared import plain
from nvrx_slurm.errors import ProtocolError
from nvrx_slurm.types import RanksFailed, Register

from .samples import a_fault, a_node, a_plan, agent_settings, coordinator_settings

pytestmark = pytest.mark.fast


def agent_log():
    """An agent that is connected, starts, and sees a worker fail."""
    core = Agent(a_node(1), agent_settings(), 10.0)
    lines = [header_line(core)]
    events = ((10.2, ag.Prepared()), (10.5, ag.Connected()), (11.0, a_plan()), (12.0, ag.WorkerExited(1, a_fault(1))))
    for now, event in events:
        commands = core.step(event, now)
        lines.append(step_line(event, now, 1.7e9 + now, core, commands))
    return lines


# --- encoding ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", event_log.logged(), ids=lambda cls: cls.__name__)
@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_every_record_survives_the_log(cls, data):
    drawn = data.draw(values(cls))
    assert decode(json.loads(to_json(drawn))) == drawn


def test_a_line_is_a_line_and_says_what_happened():
    line = agent_log()[4]
    assert "\n" not in line
    step = json.loads(line)
    assert (step["now"], step["wall"], step["state"]) == (12.0, 1700000012.0, "STOPPING")
    assert step["event"]["type"] == "WorkerExited"
    assert [command["type"] for command in step["commands"]] == ["Send", "Say", "SignalWorkers"]


def test_each_command_has_the_number_of_the_event_that_caused_it():
    core = Coordinator(coordinator_settings(min_nodes=2, max_nodes=2), 0.0)
    steps = []
    for rank in range(2):
        event = ev.Joined(Register(a_node(rank), 1000))
        steps.append(json.loads(step_line(event, 1.0, 2.0, core, core.step(event, 1.0))))
    first, second = (step["caused"] for step in steps)
    assert [name for name, _ in second] == ["Joined", "Known", "Arrived", "Review", "Entered"]
    assert [name for name, count in second if count] == ["Review"]
    assert sum(count for _, count in second) == len(core.out) + len(steps[1]["commands"]) + 2  # two plans
    assert [step["n"] for step in steps] == [len(first), len(first) + len(second)] == [4, core.number]


def test_what_is_no_record_cannot_be_logged():
    with pytest.raises(ProtocolError, match="cannot be written as JSON"):
        to_json(object())


FAULT = plain(a_fault(1))


@pytest.mark.parametrize(
    "value, what",
    [
        ({"type": 7}, "$.type"),
        ({"a": 1}, "type"),
        ({"type": "Popen", "args": "reboot"}, "Popen"),
        ({"type": "Row", "do": "x", "to": [], "why": ""}, "Row"),
        ({"type": "Finish", "code": 1}, "reason"),
        ({"type": "Finish", "code": 1, "reason": "", "x": 1}, "x"),
        ({"type": "Send", "message": {"type": "Popen"}}, "Popen"),
        ({"type": "RankFault", **FAULT, "kind": "fun"}, "$.kind"),
        ({"type": "RankFault", **FAULT, "kind": []}, "$.kind"),
    ],
)
def test_what_no_core_writes_is_refused(value, what):
    with pytest.raises(ProtocolError, match=re.escape(what)):
        decode(value)


@pytest.mark.parametrize(
    "before, after, sentence",
    [
        ('"signum":15', '"signum":9', 'command 3 was {"type":"SignalWorkers","signum":9,"idle_s":0.8}, but now it is'),
        ('"state":"STOPPING"', '"state":"IDLE"', "the log says state 'IDLE', the core is in STOPPING"),
        (',{"type":"SignalWorkers","signum":15,"idle_s":0.8}', "", "command 3 was null"),
        ('"type":"WorkerExited"', '"type":"Teapot"', "Invalid value 'Teapot'"),
        ('"type":"WorkerExited"', '"type":"Tick"', "Object contains unknown field"),
        ('"commands":[', '"commands":7,"x":[', ""),
        ('"local_rank":1,"fault"', '"local_rank":[],"fault"', ""),
        ('"now":12.0', '"now":"noon"', "could not convert string to float: 'noon'"),
    ],
)
def test_an_altered_line_is_found_and_named(before, after, sentence):
    lines = agent_log()
    assert before in lines[4]
    lines[4] = lines[4].replace(before, after)
    [difference] = replay(lines)
    assert difference.line == 5
    assert not difference.torn
    assert str(difference).startswith(f"line 5: {sentence}")


def test_an_event_that_the_core_has_no_row_for_is_named_too():
    lines = agent_log()
    del lines[3]
    [difference] = replay(lines)
    assert str(difference) == "line 4: Agent: no row for WorkerExited in IDLE"


def test_a_torn_last_line_is_reported_as_that():
    lines = agent_log()
    lines[4] = lines[4][:70]
    assert replay(lines) == [Difference(5, "is torn: the program ended while writing it", torn=True)]


def test_a_torn_line_in_the_middle_is_no_accident():
    lines = agent_log()
    lines[3] = lines[3][:70]
    [difference] = replay(lines)
    assert str(difference) == "line 4: is not one line of JSON"


@pytest.mark.parametrize("end", ["", "\n"])
def test_the_next_life_of_a_node_writes_after_the_torn_line_of_its_last(end):
    lines = agent_log()
    text = "\n".join(lines[:4]) + "\n" + lines[4][:70] + end + "\n".join(lines)
    assert replay(text.splitlines()) == []


@pytest.mark.parametrize(
    "lines, sentence",
    [
        ([], "line 1: the log is empty"),
        (['{"now":1}'], "line 1: the log does not start with a header"),
        (["[]"], "line 1: the log does not start with a header"),
        (['{"nvrx":"1","core":"kettle","settings":{"type":"Tick"},"now":1}'], "line 1: a header"),
        (['{"nvrx":"1","core":"agent","settings":{"type":"Tick"},"now":1}'], "line 1: a header"),
        (['{"nvrx":"1"}'], "line 1: 'now'"),
    ],
)
def test_what_is_no_log(lines, sentence):
    [difference] = replay(lines)
    assert str(difference).startswith(sentence)


def test_a_line_has_a_longest_length(monkeypatch):
    monkeypatch.setattr(event_log, "MAX_LINE_CHARS", 300)
    with pytest.raises(ProtocolError, match="a log line of [0-9]+ characters is too long"):
        agent_log()


def test_a_big_plan_is_logged_once_and_of_other_commands_the_first_and_their_number():
    core = Coordinator(coordinator_settings(min_nodes=200, max_nodes=200), 0.0)
    lines = [header_line(core)]
    joins = [ev.Joined(Register(a_node(rank), 1000)) for rank in range(200)]
    for event in (*joins, ev.FromAgent("h1.0", RanksFailed(0, 0, (a_fault(1),)))):
        lines.append(step_line(event, 1.0, 2.0, core, core.step(event, 1.0)))
    plan, stop = json.loads(lines[-2]), json.loads(lines[-1])
    assert ([*map(len, (plan["commands"], plan["plans"], plan["plans"][0]["to"]))]) == [1, 1, 200]
    assert (len(stop["commands"]), stop["more"] > 100) == (64, True)
    assert replay(lines) == []
    for number, change in ((-2, plan["plans"][0]["to"].pop), (-1, lambda: stop.update(more=1))):
        change()
        altered = [*lines]
        altered[number] = json.dumps((plan, stop)[number])
        assert replay(altered)[0].line == len(lines) + 1 + number
