"""Tells the agent how the workers of a cycle ended: in their order, each with what it wrote."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nvrx_slurm.core.account.rank_times import RankTimes, node_spent
from nvrx_slurm.core.agent.events import WorkerExited
from nvrx_slurm.declared import replace
from nvrx_slurm.node.monitors.monitors import unix_s
from nvrx_slurm.node.output import faults
from nvrx_slurm.node.run_dir import ERROR_FILE
from nvrx_slurm.node.shell import Post
from nvrx_slurm.node.signals import ENDING
from nvrx_slurm.system import limits
from nvrx_slurm.types import LineRole, Plan, RankFault

_OWN_SIGNAL_S = 0.25  # how much later than a worker this process may get the signal that ends the step


class Exits:
    """The ends of the workers of one cycle.

    `in_step`: Slurm signals all processes of a step one after the other. A worker may end, even well, because of a
    signal that this process is yet to get; then the job is cancelled.
    """

    def __init__(self, plan: Plan, nproc: int, in_step: bool, post: Post, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._in_step = in_step
        self._post = post
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._began_s = self._loop.time()
        self._oom_kills = limits.oom_kills()
        self._due = nproc
        self._times: list[RankTimes] = []  # of the workers that have ended
        self._victims: list[int] = []  # ranks
        self._last: asyncio.Task[None] | None = None  # that is explained
        self.template_s = 0.0  # how long the plan waited for a template
        self._stopped_s = 0.0  # when the workers were stopped, unix time; 0 = not yet

    def stop(self) -> None:
        """The workers are stopped: what they say from now on may follow from that."""
        self._stopped_s = unix_s(self._loop.time())

    def ended(self, local_rank: int, fault: RankFault | None, times: RankTimes, early: bool, stopped: bool) -> None:
        """A worker has ended, well if it has no fault. `stopped`: because of another fault."""
        self._times.append(times)
        if fault is None:
            wait_s = _OWN_SIGNAL_S if self._in_step and not self._stopped_s else 0.0
            self._loop.call_later(wait_s, self.post, local_rank, None, early)
            return
        explaining = self._explain(local_rank, fault, times, self._last, stopped)
        self._last = asyncio.ensure_future(explaining)

    def post(self, local_rank: int, fault: RankFault | None, early: bool = False) -> None:
        """Tell the agent. With the last exit of a cycle comes how its ranks have spent their time."""
        self._due -= 1
        spent = None
        if not self._due:
            self._name_victims()
            spent = node_spent(
                self._times,
                self._began_s,
                self._loop.time(),
                self._plan.term,
                self._plan.cycle,
                self.template_s,
            )
        self._post(WorkerExited(local_rank, fault, early, spent))

    async def _explain(
        self,
        local_rank: int,
        fault: RankFault,
        times: RankTimes,
        before: asyncio.Task[None] | None,
        stopped: bool,
    ) -> None:
        """Add to the fault what the worker wrote, then post its exit after the one `before`."""
        beat_s = unix_s(times.last_s)
        stopped_s = self._stopped_s if stopped else 0.0
        told = await faults.explained(fault, ERROR_FILE, beat_s, self._oom_kills, stopped_s)
        if stopped and self._is_echo(told):
            told = fault
        if self._in_step and -told.exit_code in ENDING and not self._stopped_s:
            # our own signal may be next, and then this is no fault of the worker
            await asyncio.sleep(_OWN_SIGNAL_S)
        if before is not None:
            await asyncio.wait({before})
        silent_s = times.silent_s(fault.kind, self._loop.time())
        self.post(local_rank, replace(told, silent_s=silent_s))

    # --- victims ------------------------------------------------------------------------------------------------

    def _is_echo(self, told: RankFault) -> bool:
        """Whether the error of a rank that was stopped only follows from another one. Such a rank may be a victim.

        Only the console names it. The coordinator does not hear of it: each of 10,000 ranks may be a victim.
        """
        if told.finding is None or told.finding.role is not LineRole.ECHO:
            return False
        from nvrx_slurm.core.attribution.verdict import is_victim  # see `read_rules`

        if is_victim(told):
            self._victims.append(told.rank)
        return True

    def _name_victims(self) -> None:
        if self._victims:
            named = ", ".join(map(str, sorted(self._victims)))
            self._say(f"victims, whose errors follow from the end of another rank: rank {named}")
