"""The log tree, in which each rank and cycle has one place.

<log-dir>/<job id>/r<Slurm restart>/cycle_<c>/node_<infra rank>_<host>/rank_<r>.{out,err}
                                   /cycle_<c>/hang.json
                                   /events/{coordinator,agent_<infra rank>,election_<infra rank>}.jsonl
                                   /status.json, /result.json, /srun_command, /console
<log-dir>/latest -> <job id>/r<Slurm restart>

Without infra ranks, the node id (<host>-<rank>-<life>) replaces <infra rank>_<host> and <infra rank>.
"""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import ExitStack, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO

from nvrx_slurm.declared import Record
from nvrx_slurm.errors import UsageError
from nvrx_slurm.system import bounded, owned
from nvrx_slurm.system.files import write_atomic
from nvrx_slurm.system.foreign import first_bytes
from nvrx_slurm.types import Node

_CONSOLE = "console"  # names the file that the coordinator writes its lines to
_DEPTH = 5  # names of a rank's file below the log directory
ERROR_FILE = ".error.json"  # torchelastic's, behind the stem of the logs


class RunDir(Record):
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
        """JSON that the coordinator writes last: exit code, reason, first cause, history (see `node.output.result`)."""
        return self.path / "result.json"

    @property
    def status(self) -> Path:
        """JSON that the coordinator keeps true while the job runs (see `node.publish.status`)."""
        return self.path / "status.json"

    @property
    def srun_command(self) -> Path:
        """The command line of the step, where nvrx-run in a batch script started it."""
        return self.path / "srun_command"

    def events(self, name: str) -> Path:
        """Event log `name` ("coordinator"; for an agent see `agent_events`)."""
        return self.path / "events" / f"{name}.jsonl"

    def coordinator_events(self, term: int, node: Node) -> Path:
        """Event log of the coordinator that stood for `term` on `node`. The first one's has the plain name."""
        return self.events("coordinator" if term == 1 else f"coordinator_term_{term}_node_{_node_name(node)}")

    def election_events(self, node: Node) -> Path:
        """Event log of a node's part in the elections."""
        return self.events(f"election_{_node_name(node)}")

    def agent_events(self, node: Node) -> Path:
        """Event log of the agent of `node`."""
        return self.events(f"agent_{_node_name(node)}")

    def launcher_log(self, node: Node) -> Path:
        """What the agent of `node` says, where --ft-nvrx-logfile asks for a copy."""
        return self.path / "agents" / f"launcher_{_node_name(node)}.log"

    def node_dir(self, cycle: int, node: Node) -> Path:
        """Directory of the logs of the ranks of `node` in one cycle."""
        name = f"{node.infra_rank}_{node.host}" if node.infra_rank >= 0 else node.node_id
        return self.path / f"cycle_{cycle}" / f"node_{name}"

    def hang_report(self, cycle: int) -> Path:
        """JSON: what all ranks did when one of them hung (see `node.output.result.write_hang`)."""
        return self.path / f"cycle_{cycle}" / "hang.json"

    def create_parent(self) -> None:
        """Make the job's directory. Raises UsageError where that is impossible."""
        self._make(self.path.parent, 1)

    def create(self) -> None:
        """Make the directories. Raises UsageError where that is impossible."""
        self._make(self.path / "events", 3)

    def _make(self, directory: Path, ours: int) -> None:
        try:
            owned.make(directory, ours)
        except OSError as error:
            raise UsageError(
                f"the log directory {directory} cannot be made: {error.strerror}; give another with --log-dir"
            ) from None

    def console_of(self) -> tuple[Path, int] | None:
        """The file that holds the newest coordinator's lines, and the byte where they begin; None: none has said so."""
        try:
            name, begin = first_bytes(self.path / _CONSOLE, 4096).decode().split()
            return self.path / "agents" / name, int(begin)
        except (OSError, ValueError):
            return None

    def take_console(self) -> None:
        """Tell the nvrx-run that started the step: the coordinator's lines are in this process's output from now on.

        Does nothing where the output is no file of this run.
        """
        with suppress(OSError):
            out = Path(os.readlink("/proc/self/fd/1"))
            if out.parent.name == "agents" and out.parent.parent.name == self.path.name:
                write_atomic(self.path / _CONSOLE, f"{out.name} {os.fstat(1).st_size}\n".encode())

    def link_latest(self) -> None:
        """Point `<log-dir>/latest` here, atomically; a directory of that name is kept."""
        with suppress(OSError):
            replace_link(self.log_dir / "latest", self.path.relative_to(self.log_dir))


def replace_link(link: Path, target: Path) -> None:
    """Point `link` to `target`, atomically. Raises OSError."""
    temporary = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    temporary.symlink_to(target)
    try:
        os.replace(temporary, link)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _node_name(node: Node) -> str:
    return str(node.infra_rank) if node.infra_rank >= 0 else node.node_id


class Logs:
    """The log files of one node's ranks in one cycle, opened in a thread: their file system may hang.

    `problem`: why a file is /dev/null instead, "" if none is.
    """

    def __init__(self, directory: Path, ranks: range) -> None:
        self._directory = directory
        self._ranks = ranks
        self._files: dict[int, list[IO[bytes]]] = {}
        self.problem = ""

    def stem(self, rank: int) -> Path:
        """The path of a rank's files, without their suffix."""
        return self._directory / f"rank_{rank}"

    def of(self, rank: int) -> list[IO[bytes]]:
        """Standard output and error of a rank. Raises OSError for lack of descriptors."""
        if rank not in self._files:
            self._files[rank] = [_nowhere(), _nowhere()]
        return self._files[rank]

    async def open(self, timeout_s: float) -> None:
        """Open the files, and remove older error files. After `timeout_s` seconds all are /dev/null."""
        try:
            self._files, self.problem = await bounded.call_async(self._open, timeout_s, "the log file system")
        except bounded.Overrun as error:
            self.problem = str(error)

    def _open(self) -> tuple[dict[int, list[IO[bytes]]], str]:
        """Open the files, in the thread. Those of an abandoned thread are closed when it ends."""
        files: dict[int, list[IO[bytes]]] = {}
        why = ""
        folder = -1
        with ExitStack() as stack:
            with suppress(OSError):  # open_log tells why
                folder = owned.folder(self._directory, _DEPTH - 1)
                stack.callback(os.close, folder)
            for rank in self._ranks:
                with suppress(OSError):
                    self.stem(rank).with_suffix(ERROR_FILE).unlink()
                with suppress(OSError):  # no descriptors: `of` raises it
                    opened = [open_log(self.stem(rank).with_suffix(suffix), folder) for suffix in (".out", ".err")]
                    files[rank] = [file for file, _ in opened]
                    why = why or next(filter(None, (problem for _, problem in opened)), "")
        return files, why

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for files in self._files.values():
                for file in files:
                    stack.callback(file.close)


def _nowhere() -> IO[bytes]:
    return open(os.devnull, "ab")


def open_log(path: Path, folder: int = -1) -> tuple[IO[bytes], str]:
    """Open `path`, in the open `folder`, to append to it: (file, "") or, where that is impossible, (/dev/null, why).

    A file on a full file system, or of a user whose quota is used up, can be opened, but the first print() of the
    training fails. Therefore one byte is written and taken back. Raises OSError for lack of descriptors.
    """
    try:
        open_it = partial(owned.append_in, folder, path) if folder >= 0 else partial(owned.append_to, path, _DEPTH)
        file: IO[bytes] = FileIO(path, "a", opener=lambda *_: open_it())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return _nowhere(), error.strerror or str(error)
    size = file.tell()
    try:
        os.write(file.fileno(), b" ")  # no newline: to a program that reads the file at this moment it is no line yet
        os.ftruncate(file.fileno(), size)
        file.seek(size)
    except OSError as error:
        file.close()
        return _nowhere(), error.strerror or str(error)
    return file, ""
