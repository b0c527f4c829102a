"""The job of a batch host that is gone: no batch script ends it any more, so the last agents of its step do.

`srun` and the batch script die with the batch host. With `--no-kill` and output to files, the step lives on, and the
job stays RUNNING after the step's end. Slurm can end it with the right code (slurm_complete_job), for its owner too.
"""

from __future__ import annotations

from enum import Enum

from nvrx_slurm.slurm.api.facts import NoAnswer, NotInstalled, NotKnown, SlurmError
from nvrx_slurm.slurm.control import Control, is_gone
from nvrx_slurm.system.probe import is_refused

_SLURMD_PORT = 6818
_CONNECT_S = 2.0


class BatchHost(Enum):
    """What is known of the host of the batch script."""

    ALIVE = "it answers; or the job has no batch script, or has ended"
    GONE = "Slurm says that it is down, or nothing listens at the port of its slurmd"
    SILENT = "it does not answer, and Slurm has not given it up yet; or Slurm does not answer"


def check(control: Control, job_id: int) -> BatchHost:
    """Ask Slurm and the host itself. Blocks up to 32 s. Raises NotInstalled where Slurm cannot be asked."""
    try:
        name = control.slurm.job(job_id).batch_host
        if not name:
            return BatchHost.ALIVE
        host = control.slurm.nodes([name])[name]
    except NotKnown:
        return BatchHost.ALIVE
    except NotInstalled:
        raise
    except SlurmError:
        return BatchHost.SILENT
    if is_gone(host.states):
        return BatchHost.GONE
    refused = is_refused(host.address or name, host.port or _SLURMD_PORT, _CONNECT_S)
    if refused is None:
        return BatchHost.SILENT
    return BatchHost.GONE if refused else BatchHost.ALIVE


def end_if_gone(control: Control, job_id: int, code: int, with_scancel: bool, requeue: bool = False) -> str:
    """End the job of a batch host that is gone with `code` (0 to 255). Returns what was done; "": the host is alive.

    `with_scancel`: scancel the job where Slurm refuses. `requeue`: the job is to start again. Blocks up to 62 s.
    Raises NoAnswer when Slurm or the host does not answer, or Slurm refuses: try again. NotInstalled: as `check`.
    """
    found = check(control, job_id)
    if found is BatchHost.SILENT:
        raise NoAnswer("neither Slurm nor the host tells whether it is alive")
    if found is BatchHost.ALIVE:
        return ""
    gone = f"the batch host of job {job_id} is gone"
    try:
        if requeue:
            control.slurm.requeue(job_id)
            return f"{gone}: the job is requeued"
        control.slurm.complete(job_id, code)
        return f"{gone}: the job was ended with code {code}"
    except SlurmError as error:
        if isinstance(error, NoAnswer) or not with_scancel:
            raise NoAnswer(str(error)) from None
        control.slurm.cancel(job_id)
        return f"{gone}, and {'requeue' if requeue else 'slurm_complete_job'} failed ({error}); scancel ended the job"
