"""Writes --ft-cycle-info-dir beside the coordinator: one file per cycle and a link to the newest."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from nvrx_slurm.core.coordinator import events as ev
from nvrx_slurm.core.coordinator.coordinator import Coordinator
from nvrx_slurm.core.logs.cycle_info import CycleFiles, document
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.node.output.writer import Writer
from nvrx_slurm.node.run_dir import replace_link
from nvrx_slurm.system.files import write_atomic


class CycleInfo:
    """Writes the file of each cycle twice: when the cycle begins, and when it is over."""

    def __init__(self, files: CycleFiles, core: Coordinator, writes: Writer) -> None:
        self._files = files
        self._core = core
        self._writes = writes
        self._now: dict[str, object] = {}
        self._cycle = -1

    def begun(self, command: ev.CycleBegan) -> None:
        """A cycle runs, or was taken over."""
        files = self._files
        assignment = self._core.job.assignment
        if assignment.shared is None:
            return  # it is over already
        self._cycle = command.cycle
        log_file = cycle_file(files.prefix, command.cycle) if files.prefix else ""
        self._now = document(files, assignment, self._core.roster.members.in_order(), log_file)
        self._now["cycle_start_time"] = _utc()
        self._write()

    def over(self, command: ev.CycleOver) -> None:
        """No worker of the cycle is left, or the end of the job is decided."""
        if self._now:
            self._now["cycle_end_time"] = _utc()
            self._write()

    def _write(self) -> None:
        name = self._files.name(self._cycle)
        data = json.dumps(self._now, indent=1).encode()
        path = Path(self._files.directory, name)
        self._writes.put(path, partial(self._put, name, data))

    def _put(self, name: str, data: bytes) -> None:
        """Write the file and its link, in a thread."""
        directory = Path(self._files.directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(directory / name, data)
        replace_link(Path(self._files.current), Path(name))


def _utc() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
