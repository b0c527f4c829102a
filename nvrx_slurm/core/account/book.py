"""The account of a job while it runs: `follower` tells what happens, `account` says where the time went.

Times are the coordinator's monotonic seconds. What earlier coordinators have counted comes by `load`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from nvrx_slurm.core.account.account import (
    BUCKETS,
    SECTION,
    Bucketed,
    Marks,
    Role,
    account,
    kind,
)
from nvrx_slurm.core.checkpoint.loading import DISK
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Account, NodeTime, SectionTime, Spent

TOLD = 32  # nodes that a plan tells one by one; where there are more, their sum
LISTED = 1000  # the same at the end of the job
_NAMES = [*BUCKETS]
_MOST_NAMES = 16  # buckets of sections


@dataclass(slots=True)
class _Row:
    """One node."""

    key: str
    host: str
    roles: list[tuple[float, Role]]
    # until the last plan
    times: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spent: Spent | None = None  # in this cycle
    done_at: float | None = None

    @property
    def role(self) -> Role:
        return self.roles[-1][1]

    def becomes(self, role: Role, now: float) -> None:
        if self.role is not role:
            self.roles.append((now, role))

    def adds(self, bucket: str, took_s: float) -> None:
        is_full = len(self.times) >= len(BUCKETS) + _MOST_NAMES
        if is_full and bucket.startswith(SECTION) and bucket not in self.times:
            bucket = "other"
        self.times[bucket] += took_s


class Book:
    """`expected`: hosts by infra rank, as far as they are known."""

    def __init__(self, now: float, expected: Iterable[str] = ()) -> None:
        self._rows = {
            str(rank): _Row(str(rank), host, [(now, Role.AWAY)])
            for rank, host in enumerate(expected)
        }
        # of the cycle that runs; its end is not known yet
        self._marks = Marks(now, now, first=True)
        self._estimated: set[str] = set()
        # what ranks of this job tell: "import" and "init" are over, "checkpoint"
        self._told: set[str] = set()
        self._saves = SectionTime("", 0.0)  # of all nodes
        self._reloads: dict[str, float] = defaultdict(float)  # by source, of all nodes
        self.reached = -1  # iteration of the last cycle that was counted; -1 = not known
        self._productive_s = 0.0
        self._found_at = float("-inf")  # the last save, as the files say

    # --- what happens ---------------------------------------------------------------------------------------

    def load(self, past: Account, counted_at: float) -> None:
        """What was counted until a plan that an earlier coordinator has sent at `counted_at`. Nodes that have
        registered here, or not yet, have that role since then."""
        self._marks = replace(
            self._marks,
            plan_s=counted_at,
            first=False,
        )
        self._productive_s = past.productive_s
        self._estimated = {*past.estimated}
        self._saves = past.saves
        for reload in past.reloads:
            self._reloads[reload.name] = reload.took_s
        for row in self._rows.values():
            (_, role), *later = row.roles[1:] or row.roles
            row.roles = [(counted_at, role), *later]
        for told in past.nodes:
            row = self._rows.setdefault(told.key, _Row(told.key, told.host, []))
            row.roles = [(counted_at, Role(told.role))]
            row.times.update(zip(_NAMES, told.seconds, strict=False))
            for section in told.sections:
                row.times[f"{SECTION}{section.name}"] = section.took_s
            for bucket in ("import", "init", "checkpoint"):
                if row.times.get(bucket) and bucket not in self._estimated:
                    self._told.add(bucket)

    def resume(
        self, active: Collection[str], here: Collection[str], lost_at: float, gap: bool = False
    ) -> None:
        """After `load`: these nodes run the cycle; of the others, those that are not here are lost since then. `gap`:
        there was another plan in between. Where only a sum was told, a node that has not come was lost or excluded
        before: a cycle ran without it."""
        if gap:
            self._estimated |= {"productive", "recomputed"}
        plan_s = self._marks.plan_s
        only_a_sum = "" in self._rows
        for key, row in self._rows.items():
            was_here = row.role in (Role.ACTIVE, Role.HERE)
            if key in active:
                row.roles = [(plan_s, Role.ACTIVE)]
            elif only_a_sum and row.role is Role.AWAY:
                row.roles = [(plan_s, Role.OUT)]
            elif was_here and key not in here:
                row.becomes(Role.OUT, lost_at)

    def here(self, key: str, host: str, now: float) -> None:
        """A node has joined, or come back."""
        row = self._rows.get(key)
        if row is None:
            self._rows[key] = _Row(key, host, [(now, Role.HERE)])
        elif row.role in (Role.AWAY, Role.OUT):
            row.becomes(Role.HERE, now)

    def gone(self, key: str, now: float) -> None:
        """A node is lost or excluded."""
        if key in self._rows:
            self._rows[key].becomes(Role.OUT, now)

    def spent(self, key: str, spent: Spent, now: float) -> None:
        """No rank is left on a node."""
        row = self._rows.get(key)
        if row is not None and row.done_at is None:
            row.spent = spent
            row.done_at = now

    def failed(self, fault_at: float, sign_at: float) -> None:
        """The cycle has failed. Later its first cause may be known better."""
        self._marks = replace(
            self._marks,
            fault_s=fault_at,
            sign_s=min(sign_at, fault_at),
        )

    def stops(self, now: float) -> None:
        """The end was decided while ranks ran."""
        if self._marks.fault_s is None:
            self.failed(now, now)

    def found_save(self, at: float) -> None:
        """A complete checkpoint was found that was saved then. It counts where no section tells of saves."""
        self._found_at = at

    def loaded(self, source: str, took_s: float) -> None:
        """What ranks of the cycle that runs have loaded. From the disk: what was in memory is lost as well."""
        if source == DISK and self.reached >= 0:
            self._estimated.add("recomputed")
        self._marks = replace(
            self._marks,
            source=source,
            loaded_s=took_s,
        )

    def waits(self, now: float) -> None:
        """Too few nodes are ready for a plan."""
        if self._marks.waits_s is None:
            self._marks = replace(self._marks, waits_s=now)

    def planned(self, active: Collection[str], now: float) -> Mapping[str, float]:
        """A plan is sent; the mean of each bucket over the nodes that were active in the cycle before."""
        means = self._settle(now, lost=True, again=True)
        for key, row in self._rows.items():
            role: Role = row.role
            if key in active:
                role = Role.ACTIVE
            elif role is Role.ACTIVE:
                role = Role.HERE
            row.roles = [(now, role)]
            row.spent = None
            row.done_at = None
        self._marks = Marks(now, now)
        return means

    def ended(self, now: float, well: bool) -> Mapping[str, float]:
        """The job is over; the same for its last cycle. Nothing happens after that."""
        means = self._settle(now, lost=not well, again=False)
        self._marks = Marks(now, now)
        return means

    # --- what follows ---------------------------------------------------------------------------------------

    def _settle(self, now: float, lost: bool, again: bool) -> Mapping[str, float]:
        """Add the cycle to what was counted. `again`: another one follows."""
        found = self._of_cycle(now, lost, again)
        were_active = {
            key
            for key, row in self._rows.items()
            if any(role is Role.ACTIVE for _, role in row.roles)
        }
        means: dict[str, float] = defaultdict(float)
        for key, times in found.items():
            row = self._rows[key]
            self._estimated |= times.estimated
            for bucket, took_s in times.items():
                row.adds(bucket, took_s)
                if key in were_active:
                    means[bucket] += took_s / len(were_active)
        if source := self._marks.source:
            self._reloads[source] += sum(times["reload"] for times in found.values())
        saves = [self._saves, *_saves(self._rows.values())]
        took_s = sum(save.took_s for save in saves)
        self._saves = SectionTime("", took_s, sum(save.times for save in saves))
        self._productive_s += means["productive"]
        return means

    def _of_cycle(self, now: float, lost: bool, again: bool) -> dict[str, Bucketed]:
        rows = [row for key, row in self._rows.items() if key]
        spents: list[Spent] = []
        ends: list[float] = []
        saves: list[float] = []
        self.reached = -1
        for row in rows:
            spent = row.spent
            if spent is None or row.done_at is None:
                continue
            self.reached = max(self.reached, spent.reached)
            spents.append(spent)
            ends.append(row.done_at)
            if spent.import_s >= 0.0:
                self._told.add("import")
            if spent.init_s >= 0.0:
                self._told.add("init")
            if spent.saved_s >= 0.0:
                saves.append(row.done_at - spent.saved_s)
        if _saves(rows):
            self._told.add("checkpoint")
        marks = self._marks
        stopped_s = marks.waits_s
        goes_on = again or marks.waits_s is not None
        if ends and goes_on and marks.fault_s is not None:
            stopped_s = max(ends)
        cycle = replace(
            marks,
            end_s=max(now, marks.plan_s),
            stopped_s=stopped_s,
            saved_s=min(saves) if saves else self._saved_at(),
            lost=lost,
            tells_init="import" in self._told,
            tells_steps="init" in self._told,
        )
        typical = _typical(spents[:TOLD]) if len(spents) < len(rows) else None
        return {
            row.key: account(cycle, row.roles, row.spent or typical, row.done_at) for row in rows
        }

    def _saved_at(self) -> float | None:
        """The last save in this cycle, where no rank has told it: -inf = none, None = not known."""
        if "checkpoint" in self._told:
            return float("-inf")
        at = self._found_at
        if at == float("-inf"):
            return None
        return at if at >= self._marks.plan_s else float("-inf")

    @property
    def save_s(self) -> float:
        """Mean time of a section that saves; 0 = there was none."""
        return self._saves.took_s / self._saves.times if self._saves.times else 0.0

    # --- what is told ---------------------------------------------------------------------------------------

    @property
    def counted_at(self) -> float:
        """When the last plan was sent."""
        return self._marks.plan_s

    def told(self, wall_s: float, most: int = LISTED) -> Account:
        """The account until the last plan; after `ended`, of the whole job. Beyond `most` nodes their sum."""
        return Account(
            wall_s,
            self._productive_s,
            _nodes(self._rows.values(), most),
            tuple(sorted(self._estimated)),
            self._saves,
            tuple(SectionTime(*reload) for reload in self._reloads.items()),
        )


def _saves(rows: Iterable[_Row]) -> list[SectionTime]:
    return [
        section
        for row in rows
        if row.spent is not None
        for section in row.spent.sections
        if section.times and kind(section.name) == "checkpoint"
    ]


def _told(row: _Row) -> NodeTime:
    times = {bucket: round(took_s, 6) for bucket, took_s in row.times.items()}
    sections = [
        SectionTime(name.removeprefix(SECTION), took_s)
        for name, took_s in times.items()
        if took_s and name.startswith(SECTION)
    ]
    return NodeTime(
        row.key,
        row.host,
        row.role.value,
        tuple(times.get(name, 0.0) for name in _NAMES),
        tuple(sections[:_MOST_NAMES]),
    )


def _nodes(rows: Iterable[_Row], most: int) -> tuple[NodeTime, ...]:
    shown = list(rows)
    if len(shown) > most:
        others = shown[most - 1 :]
        rest = _Row("", f"{len(others)} nodes", [(0.0, Role.OUT)])
        for row in others:
            for bucket, took_s in row.times.items():
                rest.times[bucket] += took_s
        shown = [*shown[: most - 1], rest]
    return tuple(map(_told, shown))


def _typical(spents: Collection[Spent]) -> Spent | None:
    """What the others did, for a node that could not report."""
    if not spents:
        return None
    names = "start_s", "import_s", "init_s", "reload_s", "suspended_s"
    middle = {name: median(getattr(one, name) for one in spents) for name in names}
    return replace(next(iter(spents)), **middle)
