"""The coordinator's decisions: the scenarios of `scenarios/*.txt` (see `stories`), its snapshot and its report."""

import random
import re
from pathlib import Path

import pytest

from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator import report
from nvrx_slurm.core.coordinator.status import snapshot
from nvrx_slurm.declared import replace
from nvrx_slurm.types import FaultKind, History, Plan, RestartRecord

from .samples import a_fault
from .stories import SCENARIOS, Story, scenarios, stories
from .walks import walk

pytestmark = pytest.mark.fast


STORIES = scenarios(SCENARIOS)
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "what-follows-a-cause.md"


@pytest.mark.parametrize("lines", [pytest.param(lines, id=title) for title, lines in STORIES])
def test_scenario(lines):
    Story().play(lines)


def test_each_row_about_causes_has_a_scenario():
    rows = re.findall(r"^\| ([^|]+) \| .+ \|$", PAGE.read_text().partition("\n## ")[0], re.MULTILINE)
    titles = " ".join(title for title, _ in stories(SCENARIOS / "follows_cause.txt"))
    assert len(rows) > 12 and not [row for row in rows[1:] if row not in titles]


@pytest.mark.parametrize("seeds", [range(1000, 1100), pytest.param(range(100, 1000), marks=pytest.mark.matrix)])
def test_any_messages_from_any_node_in_any_order_break_nothing(seeds):
    """A row that is missing, or leads elsewhere, and any defect of a handler would end the job (D14)."""
    ends = {walk(seed).state.name for seed in seeds}
    assert "CLOSED" in ends and "RUNNING" in ends


def test_a_plan_says_where_each_node_is():
    story = Story()
    story.begin("nodes", "2 of 2")
    story.tell("joins", "1")
    commands = story.core.step(story.event("joins", ["0"]), 0.0)
    plans = {c.node_id: c.message for c in commands if isinstance(c, ev.SendTo)}
    assert replace(plans["h1.0"], history=History()) == Plan(
        1, 0, History(), 3, 2, 4, "10.0.0.0", 1000, group_rank=1, rank_offset=2
    )
    assert (plans["h0.0"].group_rank, plans["h0.0"].rank_offset) == (0, 0)


def test_while_ranks_may_run_elsewhere_no_node_is_said_to_be_waited_for():
    story = Story()
    title = "ranks may run on a node that is out of reach until its lease is over"
    story.play(dict(STORIES)[f"electing: {title}"])
    said = " ".join(story.said)
    assert "out of reach" in said and "segment" not in said


def test_a_snapshot_tells_which_nodes_can_fork_ranks():
    story = Story()
    story.play(["running 2 of 4", "warm 0", "warm 1", "cold 3"])
    found = snapshot(story.core)()
    assert [row[0] for row in found["table"]] == ["h0", "h1"] and found["spares"] == ["h2", "h3"]
    texts = [found["warmth"][number] for number in found["warmth_of"]]
    assert texts == ["warm: torch", "warm: torch", "", "cold: its template still imports"]


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.matrix)])
def test_rejected_results_end_after_a_bounded_number_of_cycles(seeds):
    """Whatever Megatron-LM's ranks say: 1,000 jobs with exit codes 16 and 17 and their texts, in any order."""
    said = ["code=16", "code=16 rule=megatron-rerun", "code=17", "code=17 rule=rejected-persistent"]
    said += ["code=17 rule=rejected-transient"]
    for seed in seeds:
        rng, story = random.Random(seed), Story()
        nodes, budget = rng.choice((1, 2, 3)), rng.choice((0, 1, 3))
        story.begin("running", f"{nodes} of {nodes + rng.choice((0, 0, 1, 2))} max_restarts={budget} crash_loop_s=0")
        cycles, job = 0, story.core.job
        while story.core.state.name == "RUNNING":
            cycles, places = cycles + 1, {g: int(node_id[1]) for g, node_id in job.assignment.places.items()}
            g, cycle = rng.choice(list(places)), job.cycle
            story.tell("fails", f"{places[g]} {cycle} local={2 * (g - places[g])} {rng.choice(said)}")
            for node in places.values() if story.core.state.name == "STOPPING" else ():
                story.tell("stops", f"{node} {cycle}")
        assert story.core.state.name == "FINISHED" and cycles <= 4 * (budget + 1), seed


def the_report(*lines):
    """Of a job that is closed by the last line."""
    story = Story()
    for line in lines[:-1]:
        story.play([line])
    word, _, rest = lines[-1].partition(" ")
    commands = story.core.step(story.event(word, rest.split()), story.now)
    (done,) = [command for command in commands if isinstance(command, ev.JobOver)]
    found = done.report
    return found


def test_the_report_tells_the_whole_history():
    found = the_report(
        "running 2 of 4",
        "sleeps 10",
        "fails 0 -> STOPPING stop(0 1)",
        "fails 1",
        "fails 1",
        "sleeps 1",
        "stops 0,1 -> RUNNING plan:1/1(0=0 1=1 2=- 3=-)",
        "sleeps 20",
        "loses 1 -> STOPPING stop(0)",
        "sleeps 0.5",
        "stops 0 1 -> RUNNING plan:2/2(0=0 2=1 3=-)",
        "asks 2 exclude -> STOPPING refuse(2) stop(0)",
        "sleeps 4",
        "ends 0 -> FINISHED end:143(0 3)",
        "loses 3",
        "loses 0",
    )
    assert [(f.at_s, f.cycle, f.kind, f.host, f.rank, f.exit_code) for f in found.faults] == [
        (10.0, 0, FaultKind.EXIT, "h0", 0, 1),
        (10.0, 0, FaultKind.EXIT, "h1", 2, 1),
        (31.0, 1, FaultKind.NODE_LOST, "h1", -1, 0),
        (31.5, 2, FaultKind.EXCLUDED, "h2", 4, 0),
    ]
    assert [(r.cycle, r.at_s, r.down_s) for r in found.restarts] == [(0, 10.0, 1.0), (1, 31.0, 0.5), (2, 31.5, 4.0)]
    assert (found.duration_s, found.down_s, found.cycles, found.restarts_used) == (35.5, 5.5, 3, 3)
    assert (found.lost_nodes, found.excluded_nodes, found.spares_used) == (("h1",), ("h2",), ("h2",))
    assert [fault.host for fault in found.last_faults] == ["h2"]
    twice = report.Ledger(0.0)
    for at in (1.0, 2.0):
        twice.cycle_began(History(), ["h4"], at)
    assert twice.build(History(), 2, 3.0).spares_used == ("h4", "h4")


def test_the_report_names_lost_spares_that_have_not_come_back():
    found = the_report(
        "running 1 of 4",
        "loses 1",
        "loses 2",
        "loses 3",
        "joins 2 -> RUNNING plan:0/0(2=-)",
        "joins 3' -> RUNNING plan:0/0(3'=-)",
        "ends 0 -> FINISHED end:143(0 2 3')",
        "loses 2",
        "loses 3'",
        "loses 0",
    )
    assert (found.lost_nodes, found.restarts, found.faults) == (("h1",), (), ())


def test_the_report_lists_all_ranks_of_the_last_cycle_that_failed():
    found = the_report("running 2 of 2 max_restarts=1", "fails 0 -> STOPPING stop(0 1)", "fails 1", "loses 1",
                       "stops 0 -> JOINING", "waits 300 -> FINISHED end:94(0)", "loses 0")  # fmt: skip
    assert [(f.rank, f.cycle) for f in found.last_faults] == [(0, 0), (2, 0), (-1, 0)]
    assert (found.restarts[0].down_s, found.lost_nodes) == (300.0, ("h1",))


def test_the_report_is_bounded():
    builder = report.Ledger(0.0)
    for cycle in range(2):
        for rank in range(report.LISTED + 1):
            builder.add_fault(a_fault(rank), cycle, float(rank))
        builder.cause = a_fault(0)
        builder.failed(cycle, 0.0, True, 0.0)
    for cycle in range(report.LISTED + 1):
        builder.failed(cycle, 0.0, True, float(cycle))
        builder.cycle_began(History(), [], cycle + 0.5)
    found = builder.build(History(), 0, 1.0)
    assert (len(found.faults), found.faults_not_listed) == (report.LISTED, report.LISTED + 2)
    assert (len(found.last_faults), len(found.restarts)) == (report.LISTED, report.LISTED)
    assert found.down_s == (report.LISTED + 1) / 2 + 1.0  # the first fault of cycle 1 was known 1 s before
    assert found.restarts[0] == RestartRecord(0, 0.0, 0.5, found.restarts[0].cause)
