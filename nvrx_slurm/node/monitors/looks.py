"""Looks at the workers of this node while a rank of the job hangs: their monitors answer, this puts it together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.attribution.verdict import frames
from nvrx_slurm.node.monitors.monitors import RankMonitor
from nvrx_slurm.types import Collective, RankEvidence, RankFault

_MOST_FRAMES, _MOST_GROUPS = 12, 8
_TEXT_CHARS = 120  # 64 ranks fit into one message of 1 MiB, whatever they write
_MOST_SEQ = 1 << 62


class Looks:
    """One look at a time. `post`: gets the answer."""

    def __init__(self, post: Callable[[ag.Looked], None]) -> None:
        self._post = post
        self._cycle = -1
        self._workers: dict[int, RankFault] = {}  # that are looked at, by local rank
        self._seen: dict[int, RankEvidence] = {}  # by local rank
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, command: ag.LookAtRanks, workers: Mapping[int, RankFault], monitors: list[RankMonitor]) -> None:
        """`workers`: where the living ones run, by local rank."""
        self._cycle, self._workers, self._seen = command.cycle, dict(workers) if monitors else {}, {}
        for local_rank in self._workers:
            monitors[local_rank].look(command.within_s)
        self._timer = asyncio.get_running_loop().call_later(command.within_s, self._end)
        self._end_if_complete()

    def looked(self, local_rank: int, message: Mapping[str, Any]) -> None:
        """A monitor has answered."""
        where = self._workers.get(local_rank)
        if self._timer is not None and where is not None and where.pid == message["pid"]:
            self._seen[local_rank] = _evidence(where, message)
            self._end_if_complete()

    def gone(self, local_rank: int) -> None:
        """A worker has ended: its monitor does not answer any more."""
        if self._timer is not None and local_rank not in self._seen:
            self._workers.pop(local_rank, None)
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if len(self._seen) == len(self._workers):
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._post(ag.Looked(self._cycle, tuple(self._seen.values())))


def _evidence(where: RankFault, message: Mapping[str, Any]) -> RankEvidence:
    """From what a monitor says. The rank itself has written stack and record: neither is trusted."""
    found = tuple(_text(place) for place, _ in frames(message["stack"])[:_MOST_FRAMES])
    try:
        collectives = tuple(
            Collective(_text(group), min(max(0, int(seq)), _MOST_SEQ), _text(what), bool(is_open))
            for group, seq, what, is_open in list(json.loads(message["record"] or "[]"))[:_MOST_GROUPS]
        )
    except (ValueError, TypeError, OverflowError, RecursionError):
        collectives = ()
    return RankEvidence(
        where.rank, where.infra_rank, where.host, message["state"], message["moves"], found, message["section"],
        message["silent_s"], collectives, where.local_rank, where.pid, where.log,
    )  # fmt: skip


def _text(value: object) -> str:
    """For the console and logs: its end, without control characters. A path matters less than a line."""
    return "".join(c if c.isprintable() else " " for c in str(value)[-_TEXT_CHARS:])
