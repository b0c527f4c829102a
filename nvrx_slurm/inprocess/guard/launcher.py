"""What the wrapper and the agents of nvrx-run tell each other: dead ranks, and restarts in process.

NVRX_BOARD names a file to which the agent appends JSON lines `{"v": 1, "cycle": C, "ranks": [...], "why": "..."}`:
ranks (as the launcher numbered them in cycle C) that are gone. Invalid lines are logged and skipped.
"""

from __future__ import annotations

import json
import logging
import os
import select
from pathlib import Path

from nvrx_slurm.inprocess.attribution import MAX_TEXT, Interruption, InterruptionRecord
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import IN_PROCESS_NAME
from nvrx_slurm.system.inotify import Inotify
from nvrx_slurm.system.owned import append_to

logger = logging.getLogger(__name__)

_MAX_READ_BYTES = 1 << 20
_NOTE_S = 1.0  # for the log tree's file system


def note_restart(iteration: int, why: str) -> None:
    """Add a line to the log tree of nvrx-run, for `result.json`: the iteration has ended, and another one follows."""
    run_dir, cycle = os.environ.get("NVRX_RUN_DIR"), os.environ.get("NVRX_CYCLE", "")
    path = os.path.join(run_dir or "", f"cycle_{cycle}", IN_PROCESS_NAME)
    note = json.dumps({"cycle": cycle, "iteration": iteration, "why": why[:MAX_TEXT]})

    def write() -> None:
        with open(append_to(Path(path), 4), "a") as file:
            file.write(note + "\n")

    if run_dir and cycle:
        try:
            bounded.call(write, _NOTE_S, "nvrx log tree")
        except (OSError, bounded.Overrun) as error:
            logger.info(
                "result.json will not tell of the restart after iteration %d: %s", iteration, error
            )


class LauncherFile:
    """The file of dead ranks, which need not exist yet. `fd` is readable when there may be news, or None."""

    def __init__(self, path: str, cycle: int | None) -> None:
        self._path = path
        self._cycle = cycle
        self._offset = 0
        self._rest = b""
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
            self._inotify.watch(os.path.dirname(path) or ".")
        except OSError as error:
            logger.info("%s is read every few seconds: %s", path, error)
            self._inotify = None

    @classmethod
    def from_env(cls) -> LauncherFile | None:
        """The file that NVRX_BOARD names, for the cycle NVRX_CYCLE."""
        path, cycle = os.environ.get("NVRX_BOARD"), os.environ.get("NVRX_CYCLE", "")
        return (
            cls(path, int(cycle) if cycle.isdecimal() and len(cycle) < 10 else None)
            if path
            else None
        )

    @property
    def fd(self) -> int | None:
        """A descriptor to wait for."""
        return self._inotify.fd if self._inotify else None

    def read(self) -> list[InterruptionRecord]:
        """The new lines."""
        if self._inotify and select.select([self._inotify.fd], [], [], 0)[0]:
            self._inotify.wait()
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(_MAX_READ_BYTES)
        except OSError:  # it does not exist yet
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [record for line in lines if line.strip() for record in self._parse(line)]

    def _parse(self, line: bytes) -> list[InterruptionRecord]:
        try:
            entry = json.loads(line)
            if entry["v"] != 1 or (self._cycle is not None and int(entry["cycle"]) != self._cycle):
                return []
            ranks, why = [int(rank) for rank in entry["ranks"]], str(entry.get("why", ""))
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("%s: %s: %s in %r", self._path, type(error).__name__, error, line[:120])
            return []
        return [
            InterruptionRecord(rank, Interruption.TERMINATED, f"launcher: {why}") for rank in ranks
        ]
