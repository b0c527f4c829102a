"""Judges the losses that the ranks of this node report in their pages, and acts on a wrong one (--ft-loss-action)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.core.rank.loss import Agreement, LossJudge
from nvrx_slurm.node.monitors.monitors import RankMonitor
from nvrx_slurm.node.shell import Post
from nvrx_slurm.types import Plan, WorkloadAction

_EVERY_S = {"warn": 2.0, "restart": 0.1, "stop": 0.1}  # where it acts, a save waits for the judgement


class LossWatch:
    """Role: reads the pages of `monitors`, which are there once the workers' role has started.

    Each node judges. Where the loss is the same on all ranks, only the first and the last node speak: with pipeline
    stages it may be known on one of them only.
    """

    def __init__(self, action: str, monitors: Sequence[RankMonitor], post: Post) -> None:
        self._action, self._monitors, self._post = action, monitors, post
        self._timer: asyncio.TimerHandle | None = None

    def handlers(self) -> Mapping[type, Callable[[Any], None]]:
        """Each cycle begins anew."""
        return {ag.StartWorkers: lambda command: self._begin(command.plan)}

    async def start(self) -> None:
        """Nothing is there to read yet."""

    async def close(self) -> None:
        """Read no more."""
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self, plan: Plan) -> None:
        self._plan, self._agreement, self._judges = plan, Agreement(), defaultdict[int, LossJudge](LossJudge)
        self._read, self._with_loss, self._right = defaultdict[int, int](int), set[int](), True
        if self._timer is None and self._monitors:
            self._wake()

    def _wake(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_EVERY_S[self._action], self._judge)

    def _judge(self) -> None:
        self._wake()
        plan, agreement, learned, wrong = self._plan, self._agreement, self._agreement.learned, list[tuple[int, str]]()
        found = [(n, *monitor.reports(self._read[n], self._right)) for n, monitor in enumerate(self._monitors)]
        self._with_loss |= {n for n, _, reports in found if any(report.loss is not None for report in reports)}
        for n, self._read[n], reports in found:
            for report in reports:
                compared = report.loss is not None
                odd = agreement.judge(plan.rank_offset + n, report, len(self._with_loss)) if compared else ""
                wrong += [(n, why) for why in (self._judges[n].judge(report), odd) if why]
        if not wrong or not self._right:
            return
        self._right = self._action == "warn"
        if not (learned and agreement.learned) or plan.group_rank in (0, plan.active_nodes - 1):
            self._act(*wrong[0])

    def _act(self, local_rank: int, why: str) -> None:
        if self._action == "restart":
            return self._monitors[local_rank].fail(why)
        action = WorkloadAction.ShutdownWorkload if self._action == "stop" else WorkloadAction.Continue
        self._post(ag.RankAsked(local_rank, action, why))
