"""The open sections of a rank and their longest durations. Pure, without imports.

Times are monotonic nanoseconds (> 0). Sections may nest and overlap; one name is open at most once. The caller copies
changes into the shared page: a slot's word on start() and end(), and `outside_ns`.
The meanings are NVRx's.
"""

from __future__ import annotations

from nvrx_slurm.core.rank.watch import STEP_SECTION, WARMUP_SECTION, slots_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def kind_of(name: str) -> str:
    """The bucket of the account (`core.account`) for the time in section `name`; "" = of its own name.

    Megatron's sections are "setup", "step" and "checkpointing".
    """
    low = name.lower()
    if low == STEP_SECTION:
        return "productive"
    if low == WARMUP_SECTION or any(word in low for word in ("load", "restore", "resume")):
        return "reload"
    if any(word in low for word in ("checkpoint", "ckpt", "save", "saving")):
        return "checkpoint"
    return "init" if low in ("setup", "init") else ""


def is_wait(name: str) -> bool:
    """Whether ranks wait for each other in section `name`, by its name."""
    return any(
        word in name.lower() for word in ("wait", "barrier", "allreduce", "all_reduce", "sync")
    )


class SectionError(ValueError):
    """A section is started twice, or ended while it is not open; the text is one sentence."""


class Sections:
    """The sections of one rank, from `now_ns` on.

    `names`: the configured sections, in the order of the page. `warmup_iterations` (>= 0): number of first steps that
    count as section "warmup", if there is one. `iteration()`: the training's own count; None: count the steps here.

    `spent_ns`: by slot, what an earlier client of this process has counted; () = nothing.

    `slots`: slot by name. `saves`: those that save a checkpoint. `spent_ns`: by slot, the time in which this
    section was the last one that began. `turn`: the slot whose time the last start() or end() counted. `outside_ns`:
    since when the rank has been in no section, 0 = it is in one, or the time does not count yet: without "warmup", the
    time before the first "step" is preparation without a limit.
    """

    def __init__(
        self,
        names: Sequence[str],
        warmup_iterations: int,
        now_ns: int,
        iteration: Callable[[], int | None] = lambda: None,
        spent_ns: Sequence[int] = (),
    ) -> None:
        slots = slots_of(list(names))
        self.slots = {name: slot for slot, (name, own) in enumerate(slots) if own}
        self._owners = [name for name, _ in slots]
        self.saves = frozenset(
            slot for slot, (name, _) in enumerate(slots) if kind_of(name) == "checkpoint"
        )
        self._others = [slot for slot, (name, _) in enumerate(slots) if name != STEP_SECTION]
        # Slot of a "step" during warm-up; -1: there is no warm-up, or it is over.
        self._warm_step = next((slot for slot, (_, own) in enumerate(slots) if not own), -1)
        self._warmup_iterations = warmup_iterations
        self._iteration = iteration
        self._first: int | None = None
        self._steps = 0
        self._open: dict[str, tuple[int, int]] = {}  # name -> (slot, since)
        self._last = -1  # slot of the open section that began last; -1: none is open
        self._longest_ns = [0] * len(slots)
        self.spent_ns, self.turn, self._turn_ns = list(spent_ns) or [0] * len(slots), 0, now_ns
        self._longest_outside_ns = 0
        self._outside_counts = bool(names) and (
            STEP_SECTION not in self.slots or WARMUP_SECTION in self.slots
        )
        self.outside_ns = now_ns if self._outside_counts else 0

    @property
    def open(self) -> tuple[str, ...]:
        """The open sections, in the order of their start."""
        return tuple(self._open)

    def start(self, name: str, now_ns: int) -> int:
        """Section `name` begins; returns its slot. Raises SectionError (it is open), KeyError (not configured)."""
        slot = self.slots[name]
        if name in self._open:
            raise SectionError(f"section {name!r} is already open: end_section({name!r}) first")
        if name == STEP_SECTION:
            self._outside_counts = True
            if self._warm_step >= 0 and self._is_warming_up():
                slot = self._warm_step
        self._end_outside(now_ns)
        self.outside_ns = 0
        # the time since the last start or end is of the section that began last
        if self._last >= 0:
            self.turn = self._last
            self.spent_ns[self._last] += now_ns - self._turn_ns
        self._turn_ns = now_ns
        self._last = slot
        self._open[name] = (slot, now_ns)
        return slot

    def end(self, name: str, now_ns: int) -> int:
        """Section `name` is over; returns its slot. Raises SectionError (it is not open), KeyError (not configured)."""
        found = self._open.pop(name, None)
        if found is None:
            self.slots[name]  # raises KeyError for a name that is not configured
            raise SectionError(f"section {name!r} is not open: start_section({name!r}) first")
        # as in start(): a method for both would cost a tenth of the whole call
        self.turn = turn = self._last
        self.spent_ns[turn] += now_ns - self._turn_ns
        self._turn_ns = now_ns
        slot, since_ns = found
        if now_ns - since_ns > self._longest_ns[slot]:
            self._longest_ns[slot] = now_ns - since_ns
        self._last = next(reversed(self._open.values()))[0] if self._open else -1
        if not self._open and self._outside_counts:
            self.outside_ns = now_ns
        return slot

    def longest_ns(self, now_ns: int) -> tuple[dict[str, int], int]:
        """The longest time in each section, and in no section (up to now): ns, 0 = never ended, never outside.

        A "step" that had the limit of "warmup" counts as "warmup".
        """
        self._end_outside(now_ns)
        longest = dict.fromkeys(self.slots, 0)
        for owner, took_ns in zip(self._owners, self._longest_ns, strict=True):
            longest[owner] = max(longest[owner], took_ns)
        return longest, self._longest_outside_ns

    def in_all_ns(self, now_ns: int) -> int:
        """The time in all sections other than "step" until now."""
        open_ns = now_ns - self._turn_ns if self._last in self._others else 0
        return open_ns + sum(self.spent_ns[slot] for slot in self._others)

    def _end_outside(self, now_ns: int) -> None:
        if self.outside_ns and now_ns - self.outside_ns > self._longest_outside_ns:
            self._longest_outside_ns = now_ns - self.outside_ns

    def _is_warming_up(self) -> bool:
        iteration = self._iteration()
        if iteration is None:
            iteration, self._steps = self._steps, self._steps + 1
        if self._first is None:
            self._first = iteration
        if iteration - self._first >= self._warmup_iterations:
            self._warm_step = -1
            return False
        return True
