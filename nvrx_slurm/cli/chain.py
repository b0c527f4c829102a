"""A chain of jobs that continue each other, as the nvrx-run in front of each of them sees it.

`--until-done` requeues one job; `nvrx submit --chain N` makes several, whose ids are in a file. What became of earlier
links is read from their result.json. A link without one was ended from outside, for example at the time limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from nvrx_slurm.config.layers import Config
from nvrx_slurm.core.chain import ChainDecision, ChainLimits, ChainLink, Next, Outside, decide
from nvrx_slurm.core.words import unix_s
from nvrx_slurm.node.run_dir import RunDir
from nvrx_slurm.slurm.api.cli import Slurm
from nvrx_slurm.slurm.api.facts import NoAnswer, SlurmError
from nvrx_slurm.slurm.control import start_again
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.views.log_tree import RUN, result_of

_MAX_EXCLUDED = 64  # nodes that one link hands on to the next
_ASK_S, _PAUSE_S = 900.0, 0.5  # slurmctld may be restarted when many jobs end


def limits(config: Config) -> ChainLimits:
    """When a chain is given up, as the flags say."""
    launch = config.launch
    signum = int(config.ft.warning_signal or 0)
    final = config.ft.no_restart_exit_code
    return ChainLimits(launch.chain_failures, launch.chain_failure_window, signum, final)


def _until_answered(ask: Callable[[], None]) -> None:
    """Ask until Slurm answers, at most 15 minutes. Raises SlurmError."""
    until_s = time.monotonic() + _ASK_S
    while True:
        try:
            return ask()
        except NoAnswer:
            if time.monotonic() > until_s:
                raise
            time.sleep(_PAUSE_S)


class Chain:
    """This link's view of its chain."""

    def __init__(
        self, config: Config, context: SlurmContext, slurm: Slurm, say: Callable[[str], None]
    ) -> None:
        launch = config.launch
        self._job = context
        self._slurm = slurm
        self._say = say
        self._links_file = Path(launch.chain_links) if launch.chain_links else None
        self._limits = limits(config)

    @property
    def requeues(self) -> bool:
        """Whether its links are lives of one job."""
        return self._links_file is None

    def begin(self, log_dir: Path) -> int | None:
        """The exit code of a link that has nothing to do, because an earlier one ended the chain; None: start."""
        if self._links_file is None:
            self._warn_if_it_cannot_be_requeued()
            return None
        links = list(self._earlier(log_dir))
        found = decide(links, self._limits, time.time())
        if found.next is not Next.END:
            return None
        self._say(f"this job does not start: {found.why}")
        self._cancel_later()
        return max(links, key=lambda link: link.ended_s).code

    def _warn_if_it_cannot_be_requeued(self) -> None:
        with suppress(SlurmError):
            job = self._slurm.job(self._job.job_id)
            if not (job.requeue and job.batch_host):
                self._say(
                    f"--until-done has no effect: Slurm does not requeue job {job.job_id}; use sbatch --requeue"
                )

    def after(self, code: int, run: RunDir, outside: Outside | None) -> None:
        """This link has ended with `code`, by `outside`: requeue it, or tell the next one. Slurm's refusals are only
        said."""
        result = result_of(run.path)
        now_s = time.time()
        last = ChainLink(code, now_s, bool(result.get("out_of_time")), outside)
        found = decide([*self._earlier(run.log_dir), last], self._limits, now_s)
        excluded = tuple(map(str, result.get("excluded_nodes", ())))
        try:
            if self._links_file is None:
                self._requeue(found, excluded, outside)
            elif found.next is Next.END:
                self._say(found.why)
                self._cancel_later()
            elif excluded and (later := self._later()):
                _until_answered(lambda: self._exclude(later[0], excluded))
        except SlurmError as error:
            self._say(f"Slurm: {error}")

    def _requeue(
        self, found: ChainDecision, excluded: Sequence[str], outside: Outside | None
    ) -> None:
        if found.next is not Next.CONTINUE:
            slurm_does = outside is Outside.REQUEUED
            self._say(found.why if slurm_does else f"the job is not requeued: {found.why}")
            return
        _until_answered(lambda: start_again(self._slurm, self._job.job_id))
        self._say(f"the job is requeued: {found.why}")
        # Slurm now sends SIGTERM to all processes here, also to the tool that asks it, and SIGKILL after KillWait.
        if excluded:
            _until_answered(lambda: self._exclude(self._job.job_id, excluded))

    def _exclude(self, job_id: int, nodes: Sequence[str]) -> None:
        """Keep these nodes out of a job that waits, as far as enough others are left for it."""
        job = self._slurm.job(job_id)
        others = {
            name for name, node in self._slurm.nodes().items() if job.partition in node.partitions
        }
        others -= {*job.excluded}
        room = 0 if job.reservation else max(0, min(_MAX_EXCLUDED, len(others) - job.num_nodes))
        wanted = [name for name in nodes if name in others]
        if taken := wanted[:room]:
            names = ",".join([*job.excluded, *taken])
            self._slurm.update_job(job_id, f"ExcNodeList={names}")
            self._say(f"job {job_id} does not get {', '.join(taken[:8])}, which this one excluded")
        if left := wanted[room:]:
            self._say(f"job {job_id} may get {', '.join(left[:8])} again: it needs the node")

    def _cancel_later(self) -> None:
        for job_id in self._later():
            try:
                self._slurm.cancel(job_id)
                self._say(f"job {job_id} of the chain is cancelled")
            except SlurmError as error:
                self._say(f"job {job_id} of the chain cannot be cancelled: {error}")

    # --- the other links --------------------------------------------------------------------------------------

    def _earlier(self, log_dir: Path) -> Iterator[ChainLink]:
        if self._links_file is None:
            yield from _links(log_dir / self._job.job_name_id, self._job.restart_count)
            return
        jobs = self._jobs()
        if self._job.job_id in jobs:
            yield from _links(log_dir / str(self._job.job_id), self._job.restart_count)
            jobs = jobs[: jobs.index(self._job.job_id)]
        for job_id in jobs:
            yield from _links(log_dir / str(job_id))

    def _later(self) -> Sequence[int]:
        jobs = self._jobs()
        return jobs[jobs.index(self._job.job_id) + 1 :] if self._job.job_id in jobs else ()

    def _jobs(self) -> list[int]:
        assert self._links_file is not None
        try:
            return [int(line) for line in self._links_file.read_text().split() if line.isdecimal()]
        except (OSError, ValueError) as error:
            self._say(f"the jobs of the chain are unknown: {self._links_file}: {error}")
            return []


def _links(job: Path, before: int | None = None) -> Iterator[ChainLink]:
    """The lives of a job that left a result; only those of fewer than `before` requeues, if that is given."""
    for path in job.glob("r*"):
        run = RUN.fullmatch(path.name)
        if run is None or (before is not None and int(run[1]) >= before):
            continue
        result = result_of(path)
        try:
            ended_s = unix_s(result["ended"])
            yield ChainLink(int(result["code"]), ended_s, bool(result.get("out_of_time")))
        except (KeyError, TypeError, ValueError):
            continue
