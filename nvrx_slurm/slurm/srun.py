"""What the srun processes of this host tell, and how a step outlives its srun (Slurm 22.05 to 26.05)."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from nvrx_slurm.child.descendants import children

# -k among other letters, cut short; or another word
_NO_KILL = re.compile(rb"-[A-Za-z]*k|--no-k|SLURM_NO_KILL=")


def hold(srun: int) -> int:
    """A descriptor that keeps the step of the srun with pid `srun` alive when srun is killed; -1: none (yet).

    srun's shepherd, a child of it, kills the step when srun dies: then a pipe ends that only srun could write to. Who
    opens it too defers that until this process ends.
    """
    with suppress(OSError):  # srun has ended
        for shepherd in children(srun):
            read, written = _pipes(shepherd, stat.S_IRUSR), _pipes(shepherd, stat.S_IWUSR)
            for pipe, path in _pipes(srun, stat.S_IWUSR).items():
                if pipe in read and pipe not in written:
                    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    return -1


def _pipes(pid: int, mode: int) -> dict[str, str]:
    """The pipes that a process has open in this mode, each with its path in /proc."""
    found = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        target = os.readlink(entry.path)
        if target.startswith("pipe:") and entry.stat(follow_symlinks=False).st_mode & mode:
            found[target] = entry.path
    return found


def without_no_kill(job_id: int) -> bool:
    """Whether this host has an srun of the job, and none of them was told --no-kill."""
    told = []
    # another cluster may use the job id, too
    conf = b"SLURM_CONF=" + os.environ.get("SLURM_CONF", "").encode()
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError):  # another user's, or gone
            process = Path("/proc", entry)
            if (
                process.stat().st_uid == os.getuid()
                and (process / "comm").read_bytes() == b"srun\n"
            ):
                words = b"\0".join(
                    (process / name).read_bytes() for name in ("environ", "cmdline")
                ).split(b"\0")
                of_others = any(word != conf for word in words if word.startswith(b"SLURM_CONF="))
                if b"SLURM_JOB_ID=%d" % job_id in words and not of_others:
                    told.append(any(map(_NO_KILL.match, words)))
    return bool(told) and not any(told)
