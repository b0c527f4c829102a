"""What the coordinator's agent says before the job starts: settings without effect, cut short, or unsafe."""

from __future__ import annotations

import os
import shutil

from nvrx_slurm.cli import rendezvous
from nvrx_slurm.cli.here import RUN_ENV, Here
from nvrx_slurm.cli.job import hang_limits, kill_wait_s, term_timeout_s
from nvrx_slurm.core.words import in_words
from nvrx_slurm.node.job import NodeJob
from nvrx_slurm.node.workers.worker_spec import WorkerSpec
from nvrx_slurm.slurm import share, srun
from nvrx_slurm.slurm.control import END_TIME
from nvrx_slurm.system import numa


def notes(here: Here, job: NodeJob) -> list[str]:
    """What the coordinator's agent says before the job starts: settings without effect, cut short, or unsafe."""
    if job.coordinator is None:
        return []
    found = [
        rendezvous.token_note(here, job.meeting),
        _term_note(here),
        _numa_note(job),
        _tools_note(here),
        _srun_note(here),
        _share_note(here),
        "" if job.spec.wrapped else _hang_note(job.spec) if job.spec.monitored else _UNMONITORED,
        here.ft.attribution_note,
    ]
    if job.logs is not None:
        from nvrx_slurm.cli.job_logs import log_note

        found.append(log_note(here, job.logs))
    return [*here.resolved.notes, *filter(None, found)]


_UNMONITORED = "hangs are not watched for: NVRX_DISABLE_RANK_MONITORS is set"


def _hang_note(spec: WorkerSpec) -> str:
    """Whether hangs are noticed, and how."""
    if found := hang_limits(spec.limits):
        return f"hangs are watched for: {', '.join(found)}"
    if spec.inspects_stalls:
        after = in_words(spec.step_timeout_s)
        return f"hangs are looked for after {after} without a step; with heartbeats and their timeout sooner"
    return "hangs are not watched for: set --ft-rank-heartbeat-timeout or section timeouts; nvrx stacks shows ranks now"


def _term_note(here: Here) -> str:
    """Slurm leaves workers less time to end than the user asked for."""
    wanted_s = here.launch.term_timeout
    origin = here.resolved.origins["term_timeout"]
    left_s = term_timeout_s(here)
    if left_s >= wanted_s or origin.layer == "default":
        return ""
    return (
        f"{origin.with_value(f'{wanted_s:g}')} is cut to {left_s:g} s: Slurm kills everything KillWait"
        f" ({kill_wait_s(here.env):g} s) after its SIGTERM; use #SBATCH --signal to warn workers earlier"
    )


def _tools_note(here: Here) -> str:
    """Slurm cannot be asked from here, as in most images."""
    slurm = here.slurm
    env = here.env
    if (
        slurm is None
        or shutil.which("scontrol", path=env.get("PATH")) is not None
        or here.control.slurm.name != "cli"
    ):
        return ""
    gone = f"if the batch host is lost, the job goes on, but stays RUNNING after its end: scancel {slurm.job_id}"
    limit = "the time limit is unknown, so no rank is warned or stopped before it"
    timed = (
        bool(here.ft.warn_before_end or here.resolved.config.stop_before_end_s)
        and END_TIME not in env
    )
    found = [gone] * (slurm.nnodes > 1) + [limit] * timed
    return f"Slurm's tools are not on PATH here: {'; '.join(found)}" if found else ""


def _srun_note(here: Here) -> str:
    """The user's own srun, as in NeMo-Run's template; it is seen where it runs on this host."""
    slurm = here.slurm
    if slurm is None or slurm.nnodes == 1 or RUN_ENV in here.env:
        return ""
    if not srun.without_no_kill(slurm.job_id):
        return ""
    return (
        "srun was started without --no-kill: Slurm ends the step when a node is lost;"
        " add --no-kill --kill-on-bad-exit=0 --wait=0 to that srun"
    )


def _share_note(here: Here) -> str:
    """The step, perhaps of a srun of the user's own, has less than its job."""
    if here.slurm is None or here.slurm.launchers > 1:
        return ""
    usable, machine = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    return share.lost(here.env, usable, machine, RUN_ENV in here.env)


def _numa_note(job: NodeJob) -> str:
    """Workers of this node are not bound though NUMA binding is on."""
    loose = [str(rank) for rank, prefix in enumerate(job.spec.prefixes) if not prefix]
    if not loose:
        return ""
    return f"{numa.BY_GPU}: local ranks {','.join(loose)} are not bound; --dry-run on this node says why"
