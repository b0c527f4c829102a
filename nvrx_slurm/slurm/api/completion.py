"""Ends a job that has lost its batch host, by slurm_complete_job of libslurm, which works for the job's owner, too.

libslurm can end the process that loads it, so a child process calls it: this module is its program.
"""

from __future__ import annotations

import ctypes
import glob
import os
import signal

from nvrx_slurm.child import bootstrap, bounded_process
from nvrx_slurm.slurm.api import text
from nvrx_slurm.slurm.api.facts import NoAnswer

TIMEOUT_S = 20.0  # libslurm itself waits for MessageTimeout, 10 s by default
_NO_VAL = 0xFFFFFFFE  # slurm.h


def run(job_id: int, code: int, version: str, plugins: str) -> None:
    """End the job with `code` (0..255). `version`, `plugins`: SLURM_VERSION and PluginDir. Raises SlurmError."""
    argv = bootstrap.command(
        "nvrx_slurm.slurm.api.completion", str(job_id), str(code), version, plugins
    )
    try:
        ended = bounded_process.run(argv, os.environ, TIMEOUT_S)
    except OSError as error:  # no process can be started now
        raise NoAnswer(f"slurm_complete_job: {error.strerror}") from None
    if ended.code in (0, -signal.SIGTERM, -signal.SIGKILL):  # Slurm ends this step with the job
        return
    if ended.code is None:
        raise NoAnswer(f"slurm_complete_job did not end within {TIMEOUT_S:g} s")
    said = (
        ended.stderr.decode(errors="replace").strip()
        or f"slurm_complete_job ended with {ended.code}"
    )
    raise text.error("slurm_complete_job", said.splitlines()[-1])


# --- in the child process -------------------------------------------------------------------------------------------


class _StepId(ctypes.Structure):
    """slurm_step_id_t of slurm.h, 25.11 and 26.05."""

    _fields_ = (
        ("sluid", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("job", "het_comp", "step")),
    )


def _job(job_id: int, version: str) -> ctypes.c_uint32 | ctypes._Pointer[_StepId]:
    """What this Slurm's slurm_complete_job takes: from 25.11 on a pointer to a step's id, before it a job's number."""
    if tuple(map(int, version.split(".")[:2])) < (25, 11):
        return ctypes.c_uint32(job_id)
    return ctypes.pointer(_StepId(0, job_id, _NO_VAL, _NO_VAL))


def _library(plugins: str) -> ctypes.CDLL:
    """libslurm of this Slurm: in its PluginDir, or where the linker finds it. Raises OSError."""
    found = [
        path for folder in plugins.split(":") for path in glob.glob(f"{folder}/libslurmfull*.so")
    ]
    path = found[0] if found else "libslurm.so"
    # its plugins need its symbols
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL, use_errno=True)


def main(arguments: list[str]) -> str | int:
    """Call slurm_complete_job. Returns Slurm's reason against it, 0 if there is none. Raises OSError."""
    job_id, code, version, plugins = arguments
    slurm = _library(plugins)
    slurm.slurm_init(None)
    # as wait(2) tells a code
    if slurm.slurm_complete_job(_job(int(job_id), version), ctypes.c_uint32(int(code) << 8)) == 0:
        return 0
    error = slurm.slurm_get_errno() if hasattr(slurm, "slurm_get_errno") else ctypes.get_errno()
    slurm.slurm_strerror.restype = ctypes.c_char_p
    return (slurm.slurm_strerror(error) or b"unknown error").decode(errors="replace")
