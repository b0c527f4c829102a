"""The job of a batch host that is gone: no batch script ends it any more, so the last agents of its step do.

`srun` and the batch script die with the batch host. With `--no-kill` and output to files, the step lives on, and the
job stays RUNNING after the step's end. libslurm's `slurm_complete_job` ends it with the right code, for its owner too.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import signal
import sys
from enum import Enum

from nvrx_slurm.slurm import control
from nvrx_slurm.system import bounded_process
from nvrx_slurm.system.probe import is_refused

_COMPLETE_S = 20.0  # libslurm itself waits for MessageTimeout, 10 s by default
_SLURMD_PORT = 6818
_CONNECT_S = 2.0
_NO_VAL = 0xFFFFFFFE  # slurm.h
_NO_ANSWER = 75  # exit code of the child process; sysexits.h, EX_TEMPFAIL


class BatchHost(Enum):
    """What is known of the host of the batch script."""

    ALIVE = "it answers; or the job has no batch script, or has ended"
    GONE = "Slurm says that it is down, or nothing listens at the port of its slurmd"
    SILENT = "it does not answer, and Slurm has not given it up yet; or Slurm does not answer"


def look(job_id: int) -> BatchHost:
    """Ask Slurm and the host itself. Blocks up to 32 s."""
    try:
        host = control.batch_host(job_id)
    except control.NoAnswer:
        return BatchHost.SILENT
    if host is None:
        return BatchHost.ALIVE
    if control.is_gone(host.states):
        return BatchHost.GONE
    refused = is_refused(host.address, host.port or _SLURMD_PORT, _CONNECT_S)
    if refused is None:
        return BatchHost.SILENT
    return BatchHost.GONE if refused else BatchHost.ALIVE


def end_if_gone(job_id: int, code: int, with_scancel: bool) -> str:
    """End the job of a batch host that is gone with `code` (0 to 255). Returns what was done; "": the host is alive.

    `with_scancel`: scancel the job where Slurm refuses. Blocks up to 62 s. Raises control.NoAnswer when Slurm or the
    host does not answer, or Slurm refuses: try again.
    """
    found = look(job_id)
    if found is BatchHost.SILENT:
        raise control.NoAnswer("neither Slurm nor the host tells whether it is alive")
    return end_job(job_id, code, with_scancel) if found is BatchHost.GONE else ""


def end_job(job_id: int, code: int, with_scancel: bool) -> str:
    """End the job with `code` (0 to 255). Returns what was done, one sentence.

    `with_scancel`: scancel the job where Slurm refuses; else that raises NoAnswer, too. libslurm can end the process
    that loads it, so a child process calls it. Blocks up to 30 s. Raises control.NoAnswer when Slurm does not answer.
    """
    argv = [sys.executable, "-P", "-m", "nvrx_slurm.slurm.batch_host", str(job_id), str(code)]
    if sys.version_info < (3, 11):
        argv.remove("-P")
    ended = bounded_process.run(argv, os.environ, _COMPLETE_S)
    if ended.code in (0, -signal.SIGTERM, -signal.SIGKILL):  # Slurm ends this step with the job
        return f"the batch host of job {job_id} is gone: the job was ended with code {code}"
    why = (ended.stderr.decode(errors="replace").strip() or f"exit code {ended.code}").splitlines()[-1]
    if ended.code == _NO_ANSWER or not with_scancel or not control.cancel(job_id):
        raise control.NoAnswer(why)
    return f"the batch host of job {job_id} is gone, and slurm_complete_job failed ({why}); scancel ended the job"


# --- in the child process -------------------------------------------------------------------------------------------


class _StepId(ctypes.Structure):
    """slurm_step_id_t of slurm.h, 25.11 and 26.05."""

    _fields_ = (("sluid", ctypes.c_uint64), *((name, ctypes.c_uint32) for name in ("job", "het_comp", "step")))


def _job(job_id: int, config: str) -> ctypes.c_uint32 | ctypes._Pointer[_StepId]:
    """What this Slurm's slurm_complete_job takes: from 25.11 on a pointer to a step's id, before it a job's number."""
    version = re.search(r"^SLURM_VERSION\s*=\s*(\d+)\.(\d+)", config, re.MULTILINE)
    if version is None or (int(version[1]), int(version[2])) < (25, 11):
        return ctypes.c_uint32(job_id)
    return ctypes.pointer(_StepId(0, job_id, _NO_VAL, _NO_VAL))


def _library(config: str) -> ctypes.CDLL:
    """libslurm of this Slurm: in its PluginDir, or where the linker finds it. Raises OSError."""
    found = re.search(r"^PluginDir\s*=\s*(\S+)", config, re.MULTILINE)
    folders = found[1].split(":") if found else []
    candidates = [path for folder in folders for path in glob.glob(f"{folder}/libslurmfull*.so")]
    for path in (*candidates, "libslurm.so"):
        try:
            return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # its plugins need its symbols
        except OSError as error:
            last = error
    raise last


def complete(job_id: int, code: int) -> None:
    """Call slurm_complete_job. Raises OSError with Slurm's reason, and NoAnswer."""
    config = control.configuration()
    if not config:
        raise control.NoAnswer("Slurm does not answer")
    slurm = _library(config)
    if hasattr(slurm, "slurm_init"):  # from 22.05 on
        slurm.slurm_init(None)
    if slurm.slurm_complete_job(_job(job_id, config), ctypes.c_uint32(code << 8)):  # as wait(2) tells an exit code
        slurm.slurm_strerror.restype = ctypes.c_char_p
        error = slurm.slurm_get_errno()
        raise OSError(error, (slurm.slurm_strerror(error) or b"").decode(errors="replace"))


if __name__ == "__main__":
    try:
        complete(int(sys.argv[1]), int(sys.argv[2]))
    except control.NoAnswer as failed:
        print(failed, file=sys.stderr)
        sys.exit(_NO_ANSWER)
    except OSError as failed:
        sys.exit(str(failed))
