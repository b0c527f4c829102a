"""One rank computes for all.

The lowest healthy rank computes and publishes; every rank reads only its own part. Each rank knows the leader without
asking, and a leader finds all that it needs in the store, so the next lowest rank succeeds a leader that died. The
wrapper's store ends a wait for others when a rank is lost, also the leader: ranks are then assigned again.

What is needed of a store (torch.distributed's API): `set`, `get`, `add`, `check`, `compare_set`, `multi_get`
and `wait(keys, timedelta)`, which raises RuntimeError or TimeoutError after the timeout. `ctx.store` is the
store of one iteration. Keys that outlive an iteration go to `ctx.store.stable`, if it exists (the same view in all
iterations of one call of the wrapper, and in no other call), else to `ctx.store` itself.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from nvrx_slurm.core.inprocess.ranks import lowest_healthy
from nvrx_slurm.inprocess.attribution import describe, message
from nvrx_slurm.inprocess.exception import InternalError, RankDiscarded, RestartError, TimeoutError

MOST = 8  # computations in one iteration
_DONE, _FAILED, _DISCARDED = b"=", b"!", b"-"  # first byte of a rank's value and of the decision


class Leadership:
    """One computation in one iteration, as seen by one healthy rank; see `RankAssignmentCtx` for `ctx`.

    `name` and `place` (0 <= place < MOST) tell computations in the same iteration apart. A wait for other ranks lasts
    at most twice `timeout`.
    """

    def __init__(self, ctx: Any, name: str, place: int, timeout: timedelta) -> None:
        self.store, self.name, self.place, self.timeout = ctx.store, name, place, timeout
        self.iteration, self.rank = ctx.state.iteration, ctx.state.rank
        self.healthy = lowest_healthy(ctx.state.world_size, ctx.state.world_size, ctx.terminated_ranks)

    def _given_keys(self, ranks: Sequence[int]) -> list[str]:
        """Keys in the stable store, one per rank."""
        return [f"given/{self.place}/{rank}" for rank in ranks]

    @property
    def _stable(self) -> Any:
        """The store whose keys outlive the iteration."""
        return getattr(self.store, "stable", self.store)

    def _key(self, what: str) -> str:
        return _key(self.place, self.iteration, what)

    # --- from every rank to the leader -------------------------------------------------------------------------------

    def give(self, make: Callable[[], str]) -> None:
        """Give `make()` to the leader. If it raises, that is the decision, and raised here."""
        try:
            value = _DONE + make().encode()
        except BaseException as error:
            try:
                self._fail(f"rank {self.rank}", error)
            finally:
                self._hand_in(_FAILED)  # no rank shall wait for it
        self._hand_in(value)

    def _hand_in(self, value: bytes) -> None:
        self._stable.set(self._given_keys([self.rank])[0], value)
        if self.store.add(self._key("count"), 1) == len(self.healthy):
            self.store.set(self._key("all"), b"1")

    def given(self) -> list[bytes]:
        """The values of the healthy ranks (see `text_of`), as soon as all have given one.

        Raises InternalError if the `make` of one raised, TimeoutError if one gave nothing.
        """
        if not _came(self.store, self._key("all"), self.timeout):
            came, wait_s = self.store.add(self._key("count"), 0), self.timeout.total_seconds()
            raise TimeoutError(f"only {came} of {len(self.healthy)} ranks took part within {wait_s:g} s")
        values = list(self._stable.multi_get(self._given_keys(self.healthy)))
        if _FAILED in values:
            raise InternalError("one rank could give nothing")  # its own decision says why
        return values

    # --- from the leader to every rank -------------------------------------------------------------------------------

    def decide(self, compute: Callable[[], str]) -> str:
        """`compute()` of the leader, on every rank.

        If it raises, every rank raises RankDiscarded (if it raised that) or InternalError, with the same sentence.
        Raises TimeoutError if there is no decision in time.
        """
        decided = self._key("decided")
        leader = self.healthy[0]
        if self.rank == leader:
            self._compute(compute)
        elif not _came(self.store, decided, self.timeout * 2):
            raise TimeoutError(
                f"{self.name}: rank {leader}, which computes the rank assignment for all, gave none within "
                f"{(self.timeout * 2).total_seconds():g} s"
            )
        return self._read(self.store.get(decided))

    def _compute(self, compute: Callable[[], str]) -> None:
        try:
            value = _DONE + compute().encode()
        except RestartError as error:
            value = (_DISCARDED if isinstance(error, RankDiscarded) else _FAILED) + message(error).encode()
        except BaseException as error:
            self._fail(f"rank {self.rank}, computing for all", error)
        self._publish(value)

    def _publish(self, value: bytes) -> bytes:
        """The first decision counts. Before torch 2.9 `compare_set` wakes no waiter."""
        decision = bytes(self.store.compare_set(self._key("decision"), "", value))
        self.store.set(self._key("decided"), decision)
        return decision

    def _fail(self, where: str, error: BaseException) -> NoReturn:
        text = f"{where}: {describe(error)}"[:2000]
        decision = self._publish(_FAILED + text.encode())
        if not isinstance(error, Exception):
            raise error  # RestartAbort or an interrupt, which takes precedence
        try:
            self._read(decision)
        except RestartError as said:
            raise said from error
        raise InternalError(f"{self.name}: {text}") from error

    def _read(self, decision: bytes) -> str:
        kind, text = bytes(decision[:1]), bytes(decision[1:]).decode()
        if kind != _DONE:
            raise (RankDiscarded if kind == _DISCARDED else InternalError)(f"{self.name}: {text}")
        return text


def text_of(given: bytes) -> str:
    """The return value of a rank's `make`."""
    return given[1:].decode()


def _key(place: int, iteration: int, what: str) -> str:
    return f"{place}/{iteration}/{what}"


def keys_of(iteration: int) -> list[str]:
    """All keys that computations leave in an iteration's store."""
    return [_key(place, iteration, what) for place in range(MOST) for what in ("count", "all", "decision", "decided")]


def _came(store: Any, key: str, timeout: timedelta) -> bool:
    """Whether the key exists before the time is over; a lost store raises its own error."""
    try:
        store.wait([key], timeout)
    except (RuntimeError, builtins.TimeoutError):
        return bool(store.check([key]))
    return True
