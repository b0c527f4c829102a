"""Where the time went: the buckets of a node fill its time exactly, whatever happened, also over a takeover."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvrx_slurm.core.account.account import BUCKETS, SECTION, Marks, Role, account
from nvrx_slurm.core.account.book import TOLD, Book
from nvrx_slurm.core.account.figures import to_json
from nvrx_slurm.core.account.follower import JobAccount
from nvrx_slurm.core.account.rank_times import RankTimes, node_spent
from nvrx_slurm.core.attribution.verdict import judge
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.coordinator.report import Ledger
from nvrx_slurm.core.coordinator.states import Stage
from nvrx_slurm.core.coordinator.status import status
from nvrx_slurm.core.machine import Entered
from nvrx_slurm.declared import replace
from nvrx_slurm.types import FaultKind, History, RankFault, SectionTime, Spent

from .stories import SCENARIOS, Story, scenarios

pytestmark = pytest.mark.fast


BUSY = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # of a busy machine
TIMES = st.floats(-10.0, 200.0)
SECTIONS = st.builds(SectionTime, st.sampled_from(["step", "checkpointing", "load", "evaluation", "setup"]), TIMES)
SPENT = st.builds(Spent, st.just(1), st.just(0), *(TIMES,) * 7, st.lists(SECTIONS, max_size=4).map(tuple))
MAYBE = st.none() | TIMES
MARKS = st.builds(
    Marks, TIMES, TIMES, st.booleans(), *(MAYBE,) * 4, MAYBE | st.just(float("-inf")), *(st.booleans(),) * 3
)
ROLES = st.lists(st.tuples(TIMES, st.sampled_from(Role)), min_size=1, max_size=4).map(
    lambda found: tuple(sorted(found))
)


@BUSY
@given(MARKS, ROLES, st.none() | SPENT, MAYBE)
def test_the_buckets_of_a_node_fill_its_time(cycle, roles, spent, done_s):
    found = account(cycle, roles, spent, done_s)
    wall_s = max(0.0, cycle.end_s - cycle.plan_s)
    assert sum(found.values()) == pytest.approx(wall_s, abs=1e-6)
    assert all(took_s >= 0.0 for took_s in found.values())
    assert all(bucket in BUCKETS or bucket.startswith(SECTION) for bucket in found)


def cycle(**marks):
    known = {"sign_s": 60.0, "fault_s": 65.0, "stopped_s": 66.0, "saved_s": 50.0, "lost": True}
    known |= {"tells_init": True, "tells_steps": True}
    return Marks(10.0, 70.0, **{**known, **marks})


ALL = Spent(1, 0, 1.0, 4.0, 5.0, 2.0, 3.0, 16.0, 4.0, (SectionTime("save", 6.0), SectionTime("eval", 7.0)))
ENDS = {"detect": 5.0, "stop": 1.0, "plan": 4.0}
BEGINS = {"start": 1.0, "import": 4.0, "init": 5.0, "reload": 2.0, "suspended": 3.0, "checkpoint": 6.0}
CASES = {
    "each phase": (
        cycle(), (((10.0, Role.ACTIVE),), ALL, 66.0),
        BEGINS | ENDS | {"section:eval": 7.0, "recomputed": 6.0, "productive": 16.0},
    ),
    "nothing was saved": (
        cycle(saved_s=float("-inf")), (((10.0, Role.ACTIVE),), Spent(1, 0, 1.0, 4.0, 5.0), 66.0),
        ENDS | {"start": 1.0, "import": 4.0, "init": 5.0, "recomputed": 40.0},
    ),
    "no client": (
        cycle(tells_init=False, tells_steps=False, saved_s=None),
        (((10.0, Role.ACTIVE),), Spent(1, 0, 1.0), 66.0),
        ENDS | {"start": 1.0, "import": 5.0, "productive": 44.0},
    ),
    "too few nodes": (
        cycle(waits_s=67.0), (((10.0, Role.ACTIVE),), Spent(1, 0, 1.0, 4.0, 5.0), 66.0),
        {"start": 1.0, "import": 4.0, "init": 5.0, "productive": 30.0, "recomputed": 10.0, "detect": 5.0,
         "stop": 1.0, "plan": 1.0, "wait_nodes": 3.0},
    ),
    "a spare that is lost": (
        cycle(), (((0.0, Role.HERE), (30.0, Role.OUT)),), {"spare_idle": 20.0, "excluded": 40.0}
    ),
    "it comes late": (
        cycle(), (((0.0, Role.AWAY), (20.0, Role.HERE)),), {"wait_nodes": 10.0, "spare_idle": 50.0}
    ),
    "an active node is lost, and nobody can say what it did": (
        cycle(), (((10.0, Role.ACTIVE), (40.0, Role.OUT)),), {"other": 30.0, "excluded": 30.0}
    ),
    "before the first plan": (
        cycle(first=True), (((0.0, Role.HERE),),), {"wait_nodes": 60.0}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_each_second_is_where_it_belongs(name):
    marks, node, wanted = CASES[name]
    assert account(marks, *node) == pytest.approx(wanted)


def test_the_slowest_rank_of_a_node_counts():
    fast = RankTimes(1.0, 30.0, 2.0, 3.0, 4.0, 29.0, 20.0, 20.0, beats=27)
    slow = RankTimes(1.5, 30.0, 4.0, 6.0, 9.0, 29.0, 21.0, 21.0, 0.5, 1.0, 22, sections=(SectionTime("save", 2.0, 1),))
    spent = node_spent([fast, slow], 0.5, 31.0, 1, 0)
    assert (spent.start_s, spent.import_s, spent.init_s, spent.saved_s) == (1.0, 2.5, 2.0, 11.0)
    assert (spent.reload_s, spent.after_s, spent.sections) == (2.0, 1.0, slow.sections)
    warmed = node_spent([fast, slow], 0.5, 31.0, 1, 0, template_s=0.75)
    assert (warmed.start_s, warmed.import_s) == (0.25, 3.25)
    assert node_spent([], 0.0, 1.0, 1, 0) == Spent(1, 0)
    assert fast.silent_s(FaultKind.EXIT, 31.0) == 1.0 and fast.silent_s(FaultKind.HANG, 31.0) == 2.0
    assert RankTimes(1.0, 60.0, 2.0, 3.0, 4.0, 29.0, beats=27).silent_s(FaultKind.EXIT, 61.0) == 32.0


def test_a_node_has_trained_when_one_of_its_ranks_has_made_a_step():
    counts = RankTimes(1.0, 30.0, 2.0, counts=True)
    never = node_spent([counts, counts], 0.5, 31.0, 1, 0)
    assert (never.idle, never.init_s) == (True, -1.0)
    assert account(cycle(), ((10.0, Role.ACTIVE),), never, 66.0).get("productive", 0.0) == 0.0
    begun = node_spent([counts, replace(counts, first_s=5.0)], 0.5, 31.0, 1, 0)
    assert (begun.idle, begun.init_s) == (False, 3.0)
    assert not node_spent([replace(counts, counts=False)], 0.5, 31.0, 1, 0).idle


@pytest.mark.parametrize("saved_at, recomputed", [(30.0, 20.0), (5.0, 40.0), (None, 0.0)])
def test_a_checkpoint_that_was_found_bounds_what_is_repeated(saved_at, recomputed):
    """The cycle begins at 10 and fails at 50; no section tells of saves."""
    book = Book(0.0, ["n0"])
    book.here("0", "n0", 0.0)
    book.planned(["0"], 10.0)
    if saved_at is not None:
        book.found_save(saved_at)
    book.failed(50.0, 50.0)
    book.spent("0", Spent(1, 0, 0.0, 0.0, 0.0), 50.0)
    assert book.planned(["0"], 50.0).get("recomputed", 0.0) == pytest.approx(recomputed)


DOINGS = st.lists(
    st.tuples(
        st.sampled_from(["plan", "fail", "gone", "here", "spent", "wait", "takeover"]),
        st.integers(0, TOLD + 3),
        st.floats(0.0, 20.0),
    ),
    max_size=30,
)


def seconds(nodes):
    return sum(sum(node.seconds) + sum(section.took_s for section in node.sections) for node in nodes)


@BUSY
@given(DOINGS, st.sampled_from([2, 5, TOLD + 4]))
def test_counters_never_go_back_and_nothing_is_lost_over_a_takeover(doings, count):
    now, hosts = 100.0, [f"n{rank}" for rank in range(count)]
    keys = [str(rank) for rank in range(count)]
    book = Book(now, hosts)
    for key, host in zip(keys, hosts, strict=True):
        book.here(key, host, now)
    counted_s, productive_s, planned = 0.0, 0.0, False
    for what, which, sleep_s in doings:
        now, key = now + sleep_s, keys[which % count]
        if what == "plan":
            book.planned(keys[: max(1, count // 2)], now)
            planned = True
        elif what == "takeover" and planned:
            past, at = book.told(now, TOLD), book.counted_at
            book = Book(now)
            book.load(past, at)
            for other, host in zip(keys, hosts, strict=True):
                book.here(other, host, now)
            book.resume(keys[: max(1, count // 2)], keys, now)
        elif what == "fail":
            book.failed(now, now - 1.0)
        elif what in ("gone", "here"):
            book.gone(key, now) if what == "gone" else book.here(key, f"n{key}", now)
        elif what == "spent":
            book.spent(key, Spent(1, 0, 0.1, 1.0, 1.0, saved_s=2.0, sections=(SectionTime("save", 1.0, 1),)), now)
        elif what == "wait":
            book.waits(now)
        told = book.told(now)
        assert seconds(told.nodes) >= counted_s - 1e-3 and told.productive_s >= productive_s
        counted_s, productive_s = seconds(told.nodes), told.productive_s
    book.ended(now, well=False)
    told = book.told(now - 100.0)
    if count <= TOLD:
        assert seconds(told.nodes) == pytest.approx(count * (now - 100.0), abs=1e-3)
        walls = [node["wall_s"] for node in to_json(told)["nodes"]]
        assert walls == pytest.approx([now - 100.0] * count, abs=1e-3)


class CountedStory(Story):
    """At each plan, and at the end, the seconds of each node are those since the job began."""

    account: JobAccount

    @property
    def is_over(self):
        return self.core.state is Stage.CLOSED

    def tell(self, word, rest):
        if self.core.follower is None:
            self.account = JobAccount(self.core)
        done = super().tell(word, rest)
        told = self.account.count().account
        found = [seconds((node,)) for node in told.nodes]
        assert all(took_s == pytest.approx(told.wall_s, abs=1e-4) for took_s in found if took_s or self.is_over)
        return done


@pytest.mark.parametrize("title, lines", scenarios(SCENARIOS))
def test_every_story_of_a_coordinator_is_counted(title, lines):
    CountedStory().play(lines)


def test_each_row_of_the_account_is_an_event_of_the_coordinator():
    heard = {event for _, event in Coordinator.table} | {Entered}
    assert {event for _, event in JobAccount.table} <= heard
    assert all(hasattr(JobAccount, row.do) and not row.to for row in JobAccount.table.values())


class TakenOver(CountedStory):
    """The agents have been told what was counted until cycle 1, 15 s after the job began."""

    def __init__(self, counted):
        super().__init__()
        self.counted = counted

    def event(self, word, rest):
        event = super().event(word, rest)
        if word != "joins" or event.message.plan is None:
            return event
        plan = replace(event.message.plan, history=replace(event.message.plan.history, began_s=1000.0))
        return replace(event, message=replace(event.message, plan=plan, counted=self.counted))


@pytest.mark.parametrize("carries_on", [True, False])
def test_the_next_coordinator_goes_on_with_what_was_counted(carries_on):
    first = CountedStory()
    first.play(["running 2 of 3 began_s=1000", "sleeps 10", "spent 0,1", "fails 0 -> STOPPING stop(0 1)"])
    first.play(["sleeps 5", "stops 0", "stops 1 -> RUNNING plan:1/1(0=0 1=1 2=-)"])
    counted = first.account.count()
    assert (counted.cycle, counted.account.wall_s, [cost.cycle for cost in counted.costs]) == (1, 15.0, [-1, 0])
    assert 0.0 < counted.account.productive_s < 10.0
    second = TakenOver(counted)
    second.begin("nodes", "2 of 3 term=2 began_s=1020 max_restarts=0")
    for line in ("0 running as 0 of 2 in 1", "1 running as 1 of 2 in 1" if carries_on else "2 running as - of 2 in 1"):
        second.now += 1.0
        second.tell("joins", line)
    for line in (
        ("succeeds 0 1", "succeeds 1 1", "loses 0", "loses 1") if carries_on else ("tick", "loses 0", "loses 2")
    ):
        second.tell(*line.partition(" ")[::2])
    told = second.account.count().account
    assert second.is_over and told.wall_s == second.now + 20.0
    assert told.productive_s >= counted.account.productive_s and len(told.nodes) == 3
    assert [node.role for node in told.nodes] == (
        ["active", "active", "out"] if carries_on else ["active", "out", "here"]
    )


def test_a_job_that_waits_for_a_node_keeps_what_it_has_trained_until_the_fault():
    story = CountedStory()
    story.play(["running 2 of 2", "sleeps 100", "fails 0 -> STOPPING stop(0 1)", "loses 0", "stops 1 -> JOINING"])
    counted = story.account.count().account
    for now in (100.0, 700.0):
        told = status(story.core, 0.0, now, now, counted)["account"]
        assert (told["allocated_s"], told["productive_s"]) == (2 * now, 2 * 95.0)


def test_too_few_nodes_come_for_a_takeover_the_cycle_that_its_coordinator_left_counts_to_the_end():
    first = CountedStory()
    first.play(["running 2 of 3 began_s=1000", "sleeps 10", "fails 0 -> STOPPING stop(0 1)"])
    first.play(["sleeps 5", "stops 0", "stops 1 -> RUNNING plan:1/1(0=0 1=1 2=-)"])
    second = TakenOver(first.account.count())
    second.begin("nodes", "2 of 3 term=2 began_s=1020 join_timeout_s=60")
    second.tell("joins", "1 idle as 1 of 2 in 1")
    second.tell("spent", "1 1")
    second.now = 61.0
    assert second.tell("tick", "") == ["end:94(1)"]
    second.tell("loses", "1")
    told = second.account.count().account
    times = dict(zip(BUCKETS, told.nodes[1].seconds, strict=False))
    assert second.is_over and told.nodes[1].role == "active"
    assert times["wait_nodes"] >= 60.0 and times["productive"] > 2.0 and times["spare_idle"] == 0.0


def test_of_many_nodes_a_takeover_remembers_who_was_a_spare_and_who_was_gone():
    hosts = [f"n{rank}" for rank in range(TOLD + 4)]
    keys = [str(rank) for rank in range(len(hosts))]
    before, after = Book(0.0, hosts), Book(50.0, hosts)
    for key, host in zip(keys, hosts, strict=True):
        before.here(key, host, 0.0)
    before.planned(keys[:2], 10.0)
    for key, host in zip(keys[:-1], hosts[:-1], strict=True):
        after.here(key, host, 50.0)
    after.load(before.told(10.0, TOLD), 10.0)
    after.resume(keys[:2], keys[:-1], 50.0)
    after.ended(60.0, well=True)
    found = {node["node"]: node["seconds"] for node in to_json(after.told(60.0))["nodes"]}
    assert found[keys[-2]] == {"spare_idle": 50.0} and found[keys[-1]] == {"excluded": 50.0}
    assert found[keys[2]] == {"wait_nodes": 10.0, "spare_idle": 50.0}


def test_a_check_that_fails_after_a_hang_does_not_hide_how_long_it_was_silent():
    ledger = Ledger(0.0, 1e9)
    hang = RankFault(FaultKind.HANG, "n0", 0, 3, 3, silent_s=120.0)
    ledger.add((hang,), 0, 200.0)
    ledger.cause = hang
    ledger.failed(0, 200.0, True, 200.0)
    ledger.add((sick := RankFault(FaultKind.UNHEALTHY, "n0", 0, -1),), 0, 201.0)
    verdict = judge(ledger.faults, 1)
    assert verdict.cause == sick
    ledger.cause_known(verdict, False, True)
    ledger.cycle_began(History(), [], 202.0)
    assert [one.detect_s for one in ledger.restarts] == [120.0]
