"""The way from a process to the keeper of its node: its name, its start, and one request at a time. No torch."""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from nvrx_slurm.checkpoint import messages as m
from nvrx_slurm.child import bounded_process
from nvrx_slurm.child.bootstrap import command
from nvrx_slurm.errors import NvrxError, ProtocolError

THREAD_NAME = "nvrx-keeper"  # as ps shows it
LIMIT = "NVRX_KEEPER_BYTES"  # bytes; unset = what the cgroup and the machine allow
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "TMPDIR")
LINGER_S = 30.0  # that a keeper waits for ranks of another launcher when its own has ended
_START_S = 30.0
_ANSWER_S = 30.0
_LONG_S = 600.0  # for an answer after making memory, or a checksum, of hundreds of gigabytes
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid: struct ucred

A = TypeVar("A")


class CheckpointError(NvrxError, RuntimeError):
    """A checkpoint in memory is not possible as asked; the text is one sentence."""


class KeeperGone(CheckpointError):
    """There is no keeper, or no longer."""


def is_stranger(connection: socket.socket) -> bool:
    """Whether the peer is a process of another user. Root is no stranger."""
    _, uid, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return uid not in (0, os.geteuid())


def launcher_pid(environ: Mapping[str, str]) -> int:
    """The process that started this rank: it made the rank's session. Without a launcher, the parent."""
    if "NVRX_RUN_DIR" not in environ and "TORCHELASTIC_RUN_ID" not in environ:
        return os.getppid()
    leader = os.getsid(0)
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{leader}/stat", "rb") as file:
        return int(file.read().rpartition(b")")[2].split()[1])
    return os.getppid()


def address(environ: Mapping[str, str], launcher: int) -> str:
    """The keeper's name, in the abstract namespace of Unix sockets: nothing of it is left on a disk.

    The same for all processes of a node and a job, and for those of the next cycle.
    """
    run = environ.get("NVRX_RUN_DIR") or f"{launcher} {environ.get('TORCHELASTIC_RUN_ID', '')}"
    node = environ.get("NVRX_INFRA_RANK", "")
    if node == "-1":  # several agents of one host may have none
        node = f"launcher {launcher}"
    digest = hashlib.sha256(
        f"{os.geteuid()}\0{run}\0{node}".encode("utf-8", "surrogateescape")
    ).hexdigest()
    return f"nvrx-keeper-{digest[:32]}"


def start(name: str, environ: Mapping[str, str], launcher: int, linger_s: float = LINGER_S) -> None:
    """Start the keeper unless there is one; it listens when this returns. Raises KeeperGone."""
    limit = environ.get(LIMIT) or "0"
    argv = command("nvrx_slurm.checkpoint.keeper", name, limit, str(launcher), str(linger_s))
    env = {key: environ[key] for key in _PASSED_ON if key in environ}
    what = "the keeper of checkpoints cannot be started"
    try:
        ended = bounded_process.run(argv, env, _START_S, dies_with_parent=False)
    except OSError as error:
        raise KeeperGone(f"{what}: {error}") from None
    if ended.code != 0:
        last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise KeeperGone(f"{what}: {last or f'exit code {ended.code}'}")


def connect(name: str) -> socket.socket:
    """A connection to the keeper. Raises KeeperGone, or CheckpointError where it is a stranger."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect("\0" + name)
        if not is_stranger(connection):
            return connection
    except OSError as error:
        connection.close()
        raise KeeperGone(f"there is no keeper of checkpoints: {error}") from None
    connection.close()
    raise CheckpointError("a process of another user answers as the keeper of checkpoints")


class Link:
    """A connection to the keeper. Raises KeeperGone where nobody listens, CheckpointError where it is a stranger."""

    def __init__(self, name: str, joins: m.Join) -> None:
        self.joins = joins
        self._connection = connect(name)
        self._asks = False
        self.ask(joins, m.Accepted)

    def ask(self, request: m.Request, kind: type[A]) -> tuple[A, int]:
        """The answer and its descriptor, which the caller closes (-1 = none).

        Raises KeeperGone at the end of the connection, CheckpointError with the keeper's sentence.
        """
        if self._asks:  # an exception came between a request and its answer
            self.close()
        self._asks, fds = True, list[int]()
        try:
            self._connection.settimeout(
                _LONG_S if isinstance(request, (m.AskSpace, m.AskSaved)) else _ANSWER_S
            )
            self._connection.send(m.requests.encode(request), socket.MSG_NOSIGNAL)
            flags = socket.MSG_CMSG_CLOEXEC
            data, fds, _, _ = socket.recv_fds(self._connection, m.MAX_PACKET_BYTES, 1, flags)
            answer = m.answers.decode(data) if data else None
        except (OSError, ProtocolError) as error:
            answer, problem = None, str(error)
        else:
            self._asks, problem = False, "it has closed the connection"
        if isinstance(answer, kind):
            return answer, fds[0] if fds else -1
        for fd in fds:
            os.close(fd)
        if isinstance(answer, m.NotKept):
            raise CheckpointError(answer.why)
        self.close()
        raise KeeperGone(f"the keeper of checkpoints has gone: {problem}")

    def close(self) -> None:
        """A save that was begun is lost."""
        self._connection.close()
