"""Where each second of each allocated node went: one pure function of a cycle's marks and a node's facts.

All times are seconds of one clock, the coordinator's. What an agent reports are durations of its own clock.
Definitions: Meta's ETTR (arXiv 2410.21680) and Google's ml-goodput-measurement, extended by what a launcher knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache

from nvrx_slurm.core.rank.sections import kind_of
from nvrx_slurm.declared import Record
from nvrx_slurm.types import Spent


class Grade(str, Enum):
    """How well a number is known."""

    COUNTED = "counted"  # measured between two events, to 0.1 s
    BOUNDED = "bounded"  # the truth is between 0 and this number
    ESTIMATED = "estimated"  # some part of it is assumed


# Name -> grade at best, and definition. Time in other named sections has the bucket "section:NAME".
BUCKETS: dict[str, tuple[Grade, str]] = {
    "queue": (
        Grade.COUNTED,
        "of the job, not of its nodes: from submission to the start of the allocation",
    ),
    "wait_nodes": (
        Grade.COUNTED,
        "until enough nodes are ready: before the first plan, or before a later one",
    ),
    "start": (
        Grade.COUNTED,
        "from the plan until the last rank of the node was executed or released, without waits for imports",
    ),
    "import": (
        Grade.COUNTED,
        "waits for a template that imports; then until the last rank called init_workload_monitoring(), or "
        "had imported torch",
    ),
    "init": (
        Grade.COUNTED,
        'from there until its first heartbeat, "step" or step of an optimizer, and sections "init" and '
        '"setup"',
    ),
    "reload": (
        Grade.COUNTED,
        "how much longer the first step was than the others; loads from memory, sections that load, and warm-up",
    ),
    "productive": (Grade.COUNTED, "the ranks train, and the work was not lost"),
    "recomputed": (
        Grade.BOUNDED,
        "work between the last checkpoint and the last sign of life of the culprit",
    ),
    "checkpoint": (Grade.COUNTED, "sections that save"),
    "detect": (Grade.COUNTED, "from the culprit's last sign of life until its fault was reported"),
    "stop": (
        Grade.COUNTED,
        "from there until no rank of the job was left; at the end, until the job was over",
    ),
    "plan": (
        Grade.COUNTED,
        "from there until the next plan: health checks, progress, fences, pauses",
    ),
    "spare_idle": (Grade.COUNTED, "the node was a spare"),
    "excluded": (Grade.BOUNDED, "the node was excluded, or lost: it may have left the allocation"),
    "suspended": (
        Grade.COUNTED,
        "the node's processes were stopped (scontrol suspend, a paused machine)",
    ),
    "other": (Grade.COUNTED, "nothing is known"),
}
SECTION = "section:"
Part = tuple[str, float, bool]  # bucket, seconds at most, whether they are estimated
kind = lru_cache(maxsize=256)(kind_of)  # asked for each section of each node
START_GRACE_S = 5.0  # of a script that does not say when its imports, or its first step, are done


class Role(str, Enum):
    """What a node does for the job."""

    AWAY = "away"  # expected, not here yet
    HERE = "here"  # it waits for the first plan, or is a spare
    ACTIVE = "active"
    OUT = "out"  # excluded, or lost


class Marks(Record):
    """One cycle: from its plan (or the beginning of the job) to the next plan, or the end. None: it did not come."""

    plan_s: float
    end_s: float
    first: bool = False  # no plan has been sent: all nodes wait
    sign_s: float | None = None  # last sign of life of the culprit
    fault_s: float | None = None  # its fault became known, or the end was decided
    stopped_s: float | None = None  # no rank was left
    waits_s: float | None = None  # too few nodes were ready for the next plan
    saved_s: float | None = None  # last save; -inf: none in this cycle; None: not known
    lost: bool = False  # work since `saved_s` is lost
    tells_init: bool = False  # ranks of this job call init_workload_monitoring()
    tells_steps: bool = False  # they send heartbeats, or have sections "step"
    loaded_s: float = 0.0  # a load from memory took so long
    source: str = ""  # of what was loaded; "" = ranks have not told


class Bucketed(defaultdict[str, float]):
    """Seconds by bucket. `estimated`: buckets in which something was assumed."""

    def __init__(self) -> None:
        super().__init__(float)
        self.estimated: set[str] = set()

    def spread(self, seconds: float, parts: Iterable[Part]) -> None:
        """Put so many seconds into buckets, the parts in their order: each takes at most its own seconds."""
        left = seconds
        for bucket, most_s, estimated in parts:
            took = min(max(0.0, most_s), left)
            if took > 0.0:
                self[bucket] += took
                left -= took
                self.estimated.update({bucket} if estimated else ())


def _all(bucket: str, estimated: bool = False) -> Part:
    """All that is left."""
    return bucket, float("inf"), estimated


def account(
    cycle: Marks,
    roles: Sequence[tuple[float, Role]],
    spent: Spent | None = None,
    done_s: float | None = None,
) -> Bucketed:
    """The buckets of one node in one cycle: each >= 0, their sum is `end_s` - `plan_s` (to rounding).

    `roles`: since when it has which role, at least one; it may be older than the cycle. `done_s`: no rank was left
    on it.
    """
    found = Bucketed()
    starts = [_within(cycle, since_s) for since_s, _ in roles]
    for (_, role), begin_s, end_s in zip(roles, starts, [*starts[1:], cycle.end_s], strict=True):
        if role is Role.ACTIVE and not cycle.first:
            _active(cycle, spent, done_s, begin_s, end_s, found)
        else:
            waits = cycle.first or role is Role.AWAY
            bucket = "excluded" if role is Role.OUT else "wait_nodes" if waits else "spare_idle"
            found.spread(end_s - begin_s, [_all(bucket)])
    found.spread(starts[0] - cycle.plan_s, [_all("wait_nodes")])
    if cycle.lost and cycle.saved_s is None and found.get("productive"):
        found.estimated.add("recomputed")
    return found


def _within(cycle: Marks, at_s: float) -> float:
    return min(max(at_s, cycle.plan_s), max(cycle.plan_s, cycle.end_s))


def _active(
    cycle: Marks,
    spent: Spent | None,
    done_s: float | None,
    begin_s: float,
    end_s: float,
    found: Bucketed,
) -> None:
    """Its ranks run; then the fault is noticed, they are stopped, the next cycle is planned."""
    fault_s = end_s if cycle.fault_s is None else min(max(cycle.fault_s, begin_s), end_s)
    sign_s = fault_s if cycle.sign_s is None else min(max(cycle.sign_s, begin_s), fault_s)
    ran_until_s = sign_s if done_s is None else min(max(done_s, begin_s), sign_s)
    found.spread(ran_until_s - begin_s, _run(cycle, spent, ran_until_s))
    at_s = ran_until_s
    detected = done_s is None or done_s >= sign_s
    for bucket, until_s in (
        ("detect" if detected else "stop", fault_s),
        ("stop", cycle.stopped_s),
        ("plan", cycle.waits_s),
        ("wait_nodes", end_s),
    ):
        until_s = end_s if until_s is None else min(max(until_s, at_s), end_s)
        found.spread(until_s - at_s, [_all(bucket)])
        at_s = until_s


def _run(cycle: Marks, spent: Spent | None, until_s: float) -> Iterator[Part]:
    if spent is None:
        yield _all("other")
        return
    yield "start", spent.start_s, False
    if spent.import_s >= 0.0:
        yield "import", spent.import_s, False
        yield from ((bucket, seconds, False) for bucket, seconds in inside(spent).items())
        if spent.init_s >= 0.0:
            is_told = any(kind(section.name) == "reload" for section in spent.sections)
            loaded_s = 0.0 if is_told else min(cycle.loaded_s, spent.init_s)
            yield "reload", loaded_s, False
            yield "init", spent.init_s - loaded_s, False
        elif spent.idle:
            yield _all("init")
        else:
            yield _all("init") if cycle.tells_steps else ("init", START_GRACE_S, True)
    else:
        yield _all("import") if cycle.tells_init else ("import", START_GRACE_S, True)
    guess = not (cycle.tells_init and cycle.tells_steps)
    if cycle.lost and cycle.saved_s is not None:
        yield "recomputed", until_s - cycle.saved_s - spent.after_s, guess
    yield _all("productive", guess)


def inside(spent: Spent) -> Mapping[str, float]:
    """What a node's ranks did between their first step and their end besides training, by bucket."""
    found: dict[str, float] = defaultdict(float)
    found["reload"], found["suspended"] = spent.reload_s, spent.suspended_s
    for section in spent.sections:
        found[kind(section.name) or f"{SECTION}{section.name}"] += section.took_s
    found.pop("productive", None)
    return found
