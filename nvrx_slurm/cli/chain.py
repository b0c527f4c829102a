"""A chain of jobs that continue each other, as the nvrx-run in front of each of them sees it.

`--until-done` requeues one job; `nvrx submit --chain N` makes several, whose ids are in a file. What became of earlier
links is read from their result.json, or the link.json of one whose coordinator left no result. A link without both was
ended from outside, for example at the time limit.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path

from nvrx_slurm.agent.run_dir import RunDir
from nvrx_slurm.config.layers import Config
from nvrx_slurm.core.chain import Decision, Limits, Link, Next, decide
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.slurm.api.interface import Slurm
from nvrx_slurm.slurm.env import SlurmContext
from nvrx_slurm.system.files import write_atomic

_MAX_EXCLUDED = 64  # nodes that one link hands on to the next
_TRIES, _PAUSE_S = 4, 0.5  # of the update of a requeued job
_MAX_RESULT_BYTES = 64 << 20
_LINK = "link.json"
_RUN = re.compile(r"r(\d{1,9})(?:_\w+)?", re.ASCII)


def limits(config: Config) -> Limits:
    """When a chain is given up, as the flags say."""
    signum = int(config.ft.warning_signal or 0)
    return Limits(config.launch.chain_failures, config.launch.chain_failure_window, signum)


class Chain:
    """This link's view of its chain."""

    def __init__(self, config: Config, context: SlurmContext, slurm: Slurm, say: Callable[[str], None]) -> None:
        launch = config.launch
        self._job, self._slurm, self._say = context, slurm, say
        self._links_file = Path(launch.chain_links) if launch.chain_links else None
        self._limits = limits(config)

    def begin(self, log_dir: Path) -> int | None:
        """The exit code of a link that has nothing to do, because an earlier one ended the chain; None: start."""
        if self._links_file is None:
            return None
        links = list(self._earlier(log_dir))
        found = decide(links, self._limits, time.time())
        if found.next is not Next.END:
            return None
        self._say(f"this job does not start: {found.why}")
        self._cancel_later()
        return max(links, key=lambda link: link.ended_s).code

    def after(self, code: int, run: RunDir) -> None:
        """This link has ended with `code`: requeue it, or tell the next ones. Slurm's refusals are only said."""
        now_s = time.time()
        if not run.result.exists():  # else a step that never starts would be requeued for ever
            self._write(
                run.path / _LINK, {"code": code, "ended": datetime.fromtimestamp(now_s, timezone.utc).isoformat()}
            )
        found = decide([*self._earlier(run.log_dir), Link(code, now_s)], self._limits, now_s)
        try:
            if self._links_file is None:
                self._requeue(found, run)
            elif found.next is Next.END:
                self._say(found.why)
                self._cancel_later()
            else:
                for job_id in self._later():
                    self._exclude(job_id, self._slurm.job(job_id).excluded, run)
        except SlurmError as error:
            self._say(f"Slurm: {error}")

    def _write(self, path: Path, content: dict[str, object]) -> None:
        try:
            write_atomic(path, json.dumps(content).encode())
        except OSError as error:
            self._say(f"{path} cannot be written: {error.strerror}; this link does not count as a failure later")

    def _requeue(self, found: Decision, run: RunDir) -> None:
        if found.next is not Next.CONTINUE:
            self._say(f"the job is not requeued: {found.why}")
            return
        known = self._slurm.job(self._job.job_id).excluded
        self._slurm.requeue(self._job.job_id)
        self._say(f"the job is requeued: {found.why}")
        # Slurm now sends SIGTERM to all processes here, also to the tool that asks it, and SIGKILL after KillWait.
        for _ in range(_TRIES - 1):
            try:
                return self._exclude(self._job.job_id, known, run)
            except SlurmError:
                time.sleep(_PAUSE_S)
        self._exclude(self._job.job_id, known, run)

    def _exclude(self, job_id: int, known: Sequence[str], run: RunDir) -> None:
        """Keep the nodes that this link excluded out of a job that waits and excludes `known` already."""
        nodes = _result(run.result).get("excluded_nodes", ())
        if not nodes:
            return
        wanted = tuple(dict.fromkeys((*known, *map(str, nodes))))[-_MAX_EXCLUDED:]
        self._slurm.update_job(job_id, excluded=wanted)
        self._say(f"job {job_id} does not get {', '.join(map(str, nodes[:8]))}, which this one excluded")

    def _cancel_later(self) -> None:
        for job_id in self._later():
            try:
                self._slurm.cancel(job_id)
                self._say(f"job {job_id} of the chain is cancelled")
            except SlurmError as error:
                self._say(f"job {job_id} of the chain cannot be cancelled: {error}")

    # --- the other links --------------------------------------------------------------------------------------

    def _earlier(self, log_dir: Path) -> Iterator[Link]:
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


def _links(job: Path, before: int | None = None) -> Iterator[Link]:
    """The lives of a job that left a result; only those of fewer than `before` requeues, if that is given."""
    for path in job.glob("r*"):
        run = _RUN.fullmatch(path.name)
        if run is None or (before is not None and int(run[1]) >= before):
            continue
        result = _result(path / "result.json") or _result(path / _LINK)
        try:
            yield Link(int(result["code"]), datetime.fromisoformat(result["ended"]).timestamp())
        except (KeyError, TypeError, ValueError):
            continue


def _result(path: Path) -> dict:
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_RESULT_BYTES))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
