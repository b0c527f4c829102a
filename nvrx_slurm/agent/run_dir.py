"""The log tree, in which each rank and cycle has one place.

<log-dir>/<job id>/r<Slurm restart>/cycle_<c>/node_<infra rank>_<host>/rank_<r>.{out,err}
                                   /events/{coordinator,agent_<infra rank>}.jsonl
                                   /result.json, /srun_command
<log-dir>/latest -> <job id>/r<Slurm restart>

Without infra ranks, the node id (<host>-<rank>-<life>) replaces <infra rank>_<host> and <infra rank>.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from nvrx_slurm.errors import UsageError
from nvrx_slurm.types import Node


@dataclass(frozen=True)
class RunDir:
    """Paths of one run, i.e. one Slurm restart of one job."""

    log_dir: Path
    job_id: str
    run: str  # "r<Slurm restart>", and which step of several in one allocation

    @property
    def path(self) -> Path:
        """Directory of this run."""
        return self.log_dir / self.job_id / self.run

    @property
    def result(self) -> Path:
        """JSON that the coordinator writes last: exit code, reason, first cause, history (see agent.result)."""
        return self.path / "result.json"

    @property
    def srun_command(self) -> Path:
        """The command line of the step, where nvrx-run in a batch script started it."""
        return self.path / "srun_command"

    def events(self, name: str) -> Path:
        """Event log `name` ("coordinator"; for an agent see `agent_events`)."""
        return self.path / "events" / f"{name}.jsonl"

    def agent_events(self, node: Node) -> Path:
        """Event log of the agent of `node`."""
        return self.events(f"agent_{node.infra_rank if node.infra_rank >= 0 else node.node_id}")

    def node_dir(self, cycle: int, node: Node) -> Path:
        """Directory of the logs of the ranks of `node` in one cycle."""
        name = f"{node.infra_rank}_{node.host}" if node.infra_rank >= 0 else node.node_id
        return self.path / f"cycle_{cycle}" / f"node_{name}"

    def create_parent(self) -> None:
        """Make the job's directory. Raises UsageError where that is impossible."""
        self._make(self.path.parent)

    def create(self) -> None:
        """Make the directories. Raises UsageError where that is impossible."""
        self._make(self.path / "events")

    def _make(self, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"the log directory {directory} cannot be made: {error.strerror}; give another with --log-dir"
            ) from None

    def link_latest(self) -> None:
        """Point `<log-dir>/latest` here, atomically; a directory of that name is kept."""
        link = self.log_dir / "latest"
        temporary = self.log_dir / f".latest.{secrets.token_hex(4)}"
        try:
            temporary.symlink_to(self.path.relative_to(self.log_dir))
            os.replace(temporary, link)
        except OSError:
            temporary.unlink(missing_ok=True)


def open_log(path: Path) -> tuple[IO[bytes], str]:
    """Open `path` to append to it: (file, "") or, where that is impossible, (/dev/null, why).

    A file on a full file system, or of a user whose quota is used up, can be opened, but the first print() of the
    training fails. Therefore one byte is written and taken back. Raises OSError for lack of descriptors.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return open(os.devnull, "ab"), error.strerror or str(error)
    size = file.tell()
    try:
        os.write(file.fileno(), b"\n")
        os.ftruncate(file.fileno(), size)
        file.seek(size)
    except OSError as error:
        file.close()
        return open(os.devnull, "ab"), error.strerror or str(error)
    return file, ""
