"""An attribution service's answer: it ends the job only where the user chose so, and only while it holds."""

from __future__ import annotations

from typing import Any

import pytest

from nvrx_slurm import types as t
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.machine import Say

from .stories import Story

STOP, GO_ON = (ev.Advised(0, stop, "word: why (test)") for stop in (True, False))


def failed_once(*settings: str, after_s: float = 5.0) -> Story:
    """Two nodes; cycle 0 has failed after `after_s` seconds, and cycle 1 runs."""
    story = Story()
    story.begin("running", " ".join(("2 of 2", "attributes=1", *settings)))
    fail(story, 0, after_s)
    return story


def fail(story: Story, cycle: int, after_s: float, node: str = "0") -> list[Any]:
    """The running cycle fails on a node after so long, and the next one begins."""
    story.now += after_s
    did = step(story, story.event("fails", [node, str(cycle)]))
    for one in ("0", "1"):
        did += step(story, ev.FromAgent(f"h{one}.0", t.Stopped(1, cycle, 2000)))
    assert story.core.state.name == "RUNNING" and story.core.job.cycle == cycle + 1
    return did


def step(story: Story, event: Any) -> list[Any]:
    return list(story.core.step(event, story.now))


def test_the_service_is_told_of_each_cycle_and_why_it_failed() -> None:
    story = Story()
    story.begin("running", "2 of 2 attributes=1")
    commands = fail(story, 0, 5.0)
    news = [c for c in commands if isinstance(c, (ev.CycleBegan, ev.CycleOver))]
    assert [type(c) for c in news] == [ev.CycleOver, ev.CycleBegan] and [c.cycle for c in news] == [0, 1]
    assert news[0].cause is not None and news[0].cause.kind is t.FaultKind.EXIT
    commands = step(story, ev.FromAgent("h0.0", t.EndJob(143, "told to")))
    assert [c for c in commands if isinstance(c, ev.CycleOver)] == [ev.CycleOver(1, None)]


def test_without_a_service_nothing_is_told() -> None:
    story = Story()
    story.begin("running", "2 of 2")
    assert not [c for c in fail(story, 0, 1.0) if isinstance(c, (ev.CycleBegan, ev.CycleOver))]


@pytest.mark.parametrize(
    ("settings", "later_s", "event", "ends"),
    [
        (["stops_on_advice=1"], 4.0, STOP, True),
        (["stops_on_advice=1"], 6.0, STOP, False),  # the job has got further than the failure
        (["stops_on_advice=1"], 4.0, GO_ON, False),
        (["stops_on_advice=1"], 4.0, ev.Advised(1, True, "x"), False),  # a cycle that has not failed
        (["stops_on_advice=1"], 4.0, ev.Advised(-7, True, "x"), False),
        ([], 4.0, STOP, False),
    ],
)
def test_an_answer_ends_the_job_or_is_one_line(settings: list[str], later_s: float, event: Any, ends: bool) -> None:
    story = failed_once(*settings)
    story.now += later_s
    commands = step(story, event)
    assert (story.core.state.name == "FINISHED") is ends
    if ends:
        assert story.core.job.end.code == 93 and "word: why (test)" in story.core.job.end.reason
    else:
        assert [type(c) for c in commands] == [Say] and f"cycle {event.cycle}: {event.text}" in commands[0].text


def test_a_late_answer_holds_while_the_failures_are_alike() -> None:
    story = failed_once("stops_on_advice=1")
    fail(story, 1, 5.0)
    story.now += 1.0
    step(story, STOP)
    assert story.core.state.name == "FINISHED"


def test_an_answer_after_the_end_changes_nothing() -> None:
    story = failed_once("stops_on_advice=1")
    step(story, ev.FromAgent("h1.0", t.EndJob(143, "told to")))
    assert step(story, STOP) == [] and story.core.job.end.code == 143


def test_another_failure_makes_older_answers_void() -> None:
    story = failed_once("stops_on_advice=1")
    other = t.RankFault(t.FaultKind.HANG, "h1", 1, 2, message="no heartbeat")
    step(story, ev.FromAgent("h1.0", t.Failed(1, 1, (other,))))
    said = step(story, STOP)
    assert story.core.state.name == "STOPPING" and "otherwise" in said[0].text
    step(story, ev.Advised(1, True, "x"))
    assert story.core.state.name == "FINISHED"
