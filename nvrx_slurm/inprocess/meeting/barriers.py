"""What ranks tell each other in one iteration, and the barrier at its end, as keys in the store.

| key | set by | meaning |
|---|---|---|
| `records`, `record/<n>` | whoever sees a fault | how many there were, and the first ones |
| `completed` | active ranks | how many have returned from the function |
| `end`, then `ended` | the first to know | how the iteration ended, decided once; `ended` wakes all who wait |
| `assign/...` | all ranks | what rank assignment needs (`leader`) |
| `start` | rank 0 | where `init_process_group` shall meet |
| `out/<initial rank>` | the rank, or who knows it is gone | its word at the barrier (`core/inprocess/rollcall.py`) |
| `go`, then `went` | a coordinator | the verdict, decided once; `went` wakes all who wait |
| `latest` (of the call) | a coordinator | the last round that has a verdict, and the verdict |

Each rank does a constant number of operations. Arriving at the barrier is setting a key: doing it twice, or again for a
rank that died in the middle of it, changes nothing, so nobody has to know how far it got. One coordinator, the monitor
process of rank 0, waits for all these keys at once. If it is gone, a rank that waits too long does its work: the
verdict is the same whoever gives it, and only the first one counts.

Any process may die between any two writes, so their order matters, and whoever comes later writes all of them again:

- `record/<n>` before the word of a rank that is gone: with the last word the verdict is given, and says the cause.
- `end` before `ended`, `go` before `went`, `went` before `latest`: whoever was woken reads the other one at once, and a
  `get` of what is not there would block. No more than one value of `end` and `go` can ever be seen (compare_set).
- `end`, then `start` and what ranks wait for in `assign/...` (if the iteration has not begun yet), then `ended`: those
  who wait for a rank that may be the lost one are woken, and find in `end` that it is over. With `ended` all of it has
  been written. A `start` that rank 0 publishes after that is harmless: who follows it finds `ended`.
- `before_the_last` (no new call may use this server) before the last `go`: after it ranks return and may call again.
- The verdict of a round before the keys of the round before it are deleted: with their word in a round all its members
  have read the verdict of the one before. Who finds keys deleted all the same was declared gone while it was away
  (suspended, say). So nothing that is deleted is read with `get`, which would wait for it.
- A rank that leaves says so in the round that it is in. If it has come to that round's barrier already, that may be too
  late, and its monitor process says it in every round until a verdict knows it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from nvrx_slurm.core.inprocess.ranks import to_runs
from nvrx_slurm.core.inprocess.rollcall import Outcome, Stand, Verdict, Word, call_roll
from nvrx_slurm.inprocess.attribution import OUTRIGHT, Interruption, InterruptionRecord, clean
from nvrx_slurm.inprocess.exception import RankDiscarded
from nvrx_slurm.inprocess.meeting import leader
from nvrx_slurm.inprocess.meeting.store import StoreView
from nvrx_slurm.inprocess.watch.progress import OwnTime

ENTRY = -1  # the round before iteration 0: the initial barrier
COMPLETED, INTERRUPTED = b"completed", b"interrupted"
NO_START = b"-"  # instead of where to meet: the iteration is over before it began
FOREVER_S = 86400.0  # longest single wait for an event that may rightly never come; then it is waited for again
_LATEST = "latest"
_NOTHING = "~"  # no value of ours
_ASSIGN = "assign/"  # what a rank assignment gets as its store
_MAX_RECORDS = 64
_LOOK_S = (0.5, 10.0)  # shortest and longest between two looks at who is missing


class Round:
    """One iteration's keys. Used by one thread at a time."""

    def __init__(self, call: StoreView, number: int) -> None:
        self.call = call
        self.number = number
        self.keys = call.under(str(number))

    # --- how it ends --------------------------------------------------------------------------------------------------

    def interrupt(self, record: InterruptionRecord) -> None:
        """Note a fault; unless the iteration has ended already, it ends now, everywhere."""
        place = self.keys.add("records", 1)
        if place <= _MAX_RECORDS:
            self.keys.set(f"record/{place}", str(record))
        self._end(INTERRUPTED)

    def returned(self, active_world_size: int) -> None:
        """The function has returned on one more of the active ranks; with the last one the iteration ends."""
        if self.keys.add("completed", 1) >= active_world_size:
            self._end(COMPLETED)

    def _end(self, how: bytes) -> None:
        if self.keys.check(["ended"]):
            return
        self.keys.compare_set("end", "", how)
        if how == INTERRUPTED and not self.keys.check(["start"]):
            waited_for = [_ASSIGN + key for key in leader.waited_for(self.number)]
            self.keys.multi_set(["start", *waited_for], [NO_START, *[leader.OVER] * len(waited_for)])
        self.keys.set("ended", "1")

    def await_end(self) -> bool:
        """Until the iteration has ended; whether the function has returned everywhere. Raises RankDiscarded if the
        others have long gone on without this rank."""
        while not self.keys.look(["ended"], FOREVER_S):
            pass
        return self._decided("end") == COMPLETED

    def cause(self) -> InterruptionRecord | None:
        """What interrupted the iteration: the first that was told, but rather a rank that died or hung than one that
        raised, since such a rank makes its peers' collectives raise, which can be told sooner."""
        places = range(1, min(self.keys.add("records", 0), _MAX_RECORDS) + 1)
        told = filter(None, (_read(self.keys, f"record/{place}") for place in places))
        records = [InterruptionRecord.from_str(text.decode()) for text in told]
        outright = [record for record in records if record.interruption in OUTRIGHT]
        return next(iter(outright or records), None)

    # --- where the function's process group meets ---------------------------------------------------------------------

    def publish_start(self, address: str, port: int) -> None:
        """By the new rank 0."""
        self.keys.set("start", f"{port} {address}")

    def await_start(self, timeout_s: float) -> tuple[str, int] | None:
        """Address and port, or None if the iteration is over already. Raises TimeoutError, and RankDiscarded as
        `await_end` does."""
        if not self.keys.came(["start"], timeout_s):
            raise TimeoutError(f"the new rank 0 did not say within {timeout_s:g} s where to meet")
        value = self._decided("start")
        if value == NO_START:
            return None
        port, _, address = value.decode().partition(" ")
        return address, int(port)

    # --- the barrier --------------------------------------------------------------------------------------------------

    def arrive(self, initial_rank: int, word: Word) -> bool:
        """Say a rank's own word; False if it has been declared gone already."""
        key = f"out/{initial_rank}"
        if self.keys.check([key]):
            return False
        self.keys.set(key, str(word))
        return True

    def bury(self, initial_rank: int) -> None:
        """Say for a rank that it is gone; this counts whatever it has said itself, if it comes before the verdict."""
        self.keys.set(f"out/{initial_rank}", str(Word(Stand.TERMINATED)))

    def verdict(self, timeout_s: float) -> Verdict | None:
        """Wait for the verdict; None if there is none in time. Raises RankDiscarded as `await_end` does."""
        if not self._is_past() and not self.keys.came(["went"], timeout_s) and not self._is_past():
            return None
        return Verdict.from_text(self._decided("go").decode())

    def has_verdict(self) -> bool:
        """Whether everybody has come."""
        return self.keys.check(["went"])

    def says_gone(self, initial_rank: int) -> bool:
        """Whether the round knows already that a rank is gone, so that this is no new fault."""
        return _read(self.keys, f"out/{initial_rank}") == str(Word(Stand.TERMINATED)).encode()

    def _is_past(self) -> bool:
        known = latest(self.call)
        return known is not None and known[0] > self.number

    def _decided(self, key: str) -> bytes:
        """Something that is there as long as the round is not forgotten."""
        value = _read(self.keys, key)
        if value is None:
            raise RankDiscarded(f"the others have declared this rank gone in iteration {self.number}, and gone on")
        return value

    def forget(self, members: Collection[int]) -> None:
        """Delete the keys of a round that everybody has left."""
        fixed = ["records", "completed", "end", "ended", "start", "go", "went"]
        records = [f"record/{n}" for n in range(1, min(self.keys.add("records", 0), _MAX_RECORDS) + 1)]
        assigned = [_ASSIGN + key for key in leader.keys_of(self.number)]
        for key in [*fixed, *records, *assigned, *(f"out/{rank}" for rank in members)]:
            self.keys.delete_key(key)


def coordinate(
    this: Round, world_size: int, gone: Collection[int], overdue_s: float, before_the_last: Callable[[], None]
) -> Verdict:
    """Wait until all members of the round have said their word, and give the verdict.

    Members are the initial ranks 0..`world_size`-1 without `gone`. Who says nothing for `overdue_s` seconds after the
    iteration has ended is declared gone; at the initial barrier nobody may begin then. Time in which this process was
    stopped does not count. `before_the_last` is called before a verdict after which no round follows.
    """
    members = [rank for rank in range(world_size) if rank not in gone]
    keys = [f"out/{rank}" for rank in members]
    look_s = min(max(overdue_s / 10, _LOOK_S[0]), overdue_s, _LOOK_S[1])
    waited = OwnTime(look_s) if this.number == ENTRY or this.keys.check(["ended"]) else None
    while not this.keys.look(keys, look_s):
        if waited is None and this.keys.check(["ended"]):
            waited = OwnTime(look_s)
        if this.has_verdict():
            break
        if waited is not None and waited.seconds() > overdue_s:
            missing = [rank for rank, key in zip(members, keys, strict=True) if not this.keys.check([key])]
            if this.number == ENTRY:
                before_the_last()
                why = f"ranks {to_runs(missing)} did not call the wrapped function within {overdue_s:g} s"
                return publish(this, Verdict(Outcome.REFUSED, gone=frozenset(missing).union(gone), why=why))
            _declare_overdue(this, missing, overdue_s)
    if this.has_verdict():
        return _announced(this)
    words = dict(zip(members, (Word.parse(value.decode()) for value in this.keys.multi_get(keys)), strict=True))
    cause = this.cause()
    verdict = call_roll(words, gone, cause.sentence() if cause else "")
    if verdict.outcome is not Outcome.NEXT:
        before_the_last()
    return publish(this, verdict)


def _declare_overdue(this: Round, missing: list[int], overdue_s: float) -> None:
    for rank in missing:
        text = f"did not come to the iteration barrier within {overdue_s:g} s"
        this.interrupt(InterruptionRecord(rank, Interruption.UNRESPONSIVE, text))
        this.bury(rank)


def publish(this: Round, verdict: Verdict) -> Verdict:
    """Make this the verdict of the round, unless there is one; returns the one that counts."""
    this.keys.compare_set("go", "", clean(verdict.to_text()))
    this.keys.set("went", "1")
    return _announced(this)


def _announced(this: Round) -> Verdict:
    """The round's verdict; `latest` says it too, even if whoever gave it died before it could."""
    verdict = Verdict.from_text(this.keys.get("go").decode())
    this.call.set(_LATEST, f"{this.number}\n{verdict.to_text()}")
    return verdict


def latest(call: StoreView) -> tuple[int, Verdict] | None:
    """The last round with a verdict."""
    known = _read(call, _LATEST)
    if known is None:
        return None
    number, _, text = known.decode().partition("\n")
    return int(number), Verdict.from_text(text)


def _read(keys: StoreView, key: str) -> bytes | None:
    """Its value, or None if there is none: in one step, since it may be deleted at any moment."""
    value = keys.compare_set(key, _NOTHING, _NOTHING)
    return None if value == _NOTHING.encode() else value
