"""The output file of a batch script whose host is lost: the coordinator's node goes on to write its lines there."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

from nvrx_slurm.node.output.console import Console
from nvrx_slurm.slurm.api.facts import SlurmError
from nvrx_slurm.slurm.control import BatchHost, Control
from nvrx_slurm.system import bounded

OUT_ENV = "NVRX_OUT"  # the file that nvrx-run in front of the step writes to; set by it for the tasks
_TRIES = 64
_PAUSE_S = 15.0


class OutFile:
    """Make it where a coordinator begins: from there on this process's output is copied, unless the batch host lives.

    A thread asks Slurm for that, again while a silent host may live: Slurm gives it up after SlurmdTimeout (300 s).
    """

    def __init__(self, control: Control, job_id: int) -> None:
        self._console: Console | None = None
        self._over = threading.Event()
        with suppress(OSError):  # a pipe has no position: the file is the batch host's alone
            begin = os.lseek(1, 0, os.SEEK_CUR)
            bounded.begin(partial(self._take, control, job_id, begin), "the output file")

    def _take(self, control: Control, job_id: int, begin: int) -> None:
        with suppress(OSError, SlurmError):  # not every node may have the file
            out = os.environ.get(OUT_ENV)
            found = BatchHost.SILENT
            for turn in range(_TRIES if out else 0):
                found = control.batch_host(job_id)
                if found is not BatchHost.SILENT or self._over.wait(min(_PAUSE_S, 0.5 * 2**turn)):
                    break
            if out and found is BatchHost.GONE:
                fd = os.open(out, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
                console = Console("nvrx-run")
                console.follow(Path(os.readlink("/proc/self/fd/1")), "", fd, begin)
                self._console = console

    def finish(self, timeout_s: float) -> None:
        """Copy the rest, for at most `timeout_s`."""
        self._over.set()
        if self._console is not None:
            self._console.finish(timeout_s)
