"""`nvrx health serve`: the daemon behind a node health check endpoint, nvhcd-compatible (docs/nvhcd.md).

One thread, one asyncio loop. Who may ask is looked at before gRPC learns of a connection, see `nvhcd_peers`.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import grp
import logging
import os
import pwd
import re
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.config.kinds import MAX_SOCKET_PATH_BYTES
from nvrx_slurm.errors import ExitCode, UsageError
from nvrx_slurm.health.check import one_line
from nvrx_slurm.health.checks.node_service import METHOD
from nvrx_slurm.health.service import nvhcd_pb2 as pb
from nvrx_slurm.health.service.peers import BACKLOG, Allowed, Door, uid_of
from nvrx_slurm.health.service.runs import NoAnswer, OwnChecks, Runs, Script
from nvrx_slurm.system import trust

MAX_ARGS = 64
MAX_CALLS = 256  # that wait for an answer
MAX_CALLS_PER_CONNECTION = 4  # with as many connections as one user may have, half of MAX_CALLS
# What options and names are made of. The script runs as root for whoever may connect, and is often written in shell.
_ARG = re.compile(r"[A-Za-z0-9_.,:=/@%+-]{1,256}")
_MAX_REQUEST_BYTES = 65536
_IDLE_MS = 600_000  # a connection without a call is closed
_SILENT_MS = 10_000  # and one whose peer says nothing at all
_GRACE_S = 0.5  # for last answers
_PROBE_S = 2.0  # for a daemon that is there already to take a connection

log = logging.getLogger(__name__)


def main(path: str, sysroot: str = "/") -> int:
    """Serve as the file at `path` says, until SIGTERM or SIGINT; returns the exit code. Raises UsageError.

    Called in the main thread of a process that does nothing else. `sysroot`: where our own checks look.
    """
    settings = config.load(trust.require(path, UsageError))
    shape = "nvrx health serve: %(levelname)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=shape)
    logging.getLogger("nvrx_slurm").setLevel(settings.log_level.upper())
    what = Script(settings.healthcheck_path) if settings.healthcheck_path else OwnChecks(sysroot)
    asyncio.run(_serve(settings, what))
    return ExitCode.OK


async def _serve(settings: config.Settings, what: Script | OwnChecks) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    runs = Runs(what, settings.timeout, os.environ)
    loop.add_signal_handler(signal.SIGCHLD, runs.reap_orphans)
    server, allowed = _server(runs), _allowed(settings)
    with _published(settings, allowed, server.add_insecure_port) as door:
        await server.start()
        working, serving = asyncio.ensure_future(runs.work()), asyncio.ensure_future(door.serve())
        log.info("listening on %s; runs %s", settings.socket_path, settings.healthcheck_path or "our own checks")
        waiting = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({working, serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping; %d connections were refused", door.refused)
    serving.cancel()
    await asyncio.wait({serving})
    await runs.stop(working)
    ending = asyncio.ensure_future(server.stop(_GRACE_S))
    await asyncio.wait({ending}, timeout=2 * _GRACE_S)  # a peer that does not read would hold it up for ever
    await door.close()
    await ending
    if not stopped.is_set():
        for task in (working, serving):
            if task.done() and not task.cancelled():
                task.result()  # raises what ended it, a defect


def _server(runs: Runs) -> Any:
    async def run_health_check(request: Any, context: Any) -> Any:
        args = tuple(request.args)
        if len(args) > MAX_ARGS or not all(map(_ARG.fullmatch, args)):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"args must be at most {MAX_ARGS}, each of 1 to 256 letters, digits and _.,:=/@%+-",
            )
        uid = uid_of(context.peer())
        log.debug("uid %d asked with %s", uid, args)
        answer = await runs.ask(args, uid)
        if isinstance(answer, NoAnswer):
            await context.abort(grpc.StatusCode[answer.status], one_line(answer.text))
        return pb.HealthCheckResponse(**answer._asdict())

    server = grpc.aio.server(
        maximum_concurrent_rpcs=MAX_CALLS,
        options=[
            ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.server_handshake_timeout_ms", _SILENT_MS),
            ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ],
    )
    _, service, name = METHOD.split("/")
    handler = grpc.unary_unary_rpc_method_handler(
        run_health_check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    return server


# --- the socket -----------------------------------------------------------------------------------------------------


@contextmanager
def _published(settings: config.Settings, allowed: Allowed, listen: Callable[[str], int]) -> Iterator[Door]:
    """The socket, listening, at its path as long as this lasts. Raises UsageError.

    It and gRPC's own are made in a directory that is ours alone. The one is renamed when owner and mode are right, so
    that one which a killed daemon left is replaced in one step; the other loses its name: only we can reach it.
    """
    path = settings.socket_path
    only_group = settings.group is not None and settings.users is None  # then the kernel keeps others away, too
    gid, mode = (allowed.gid or 0, 0o660) if only_group else (-1, 0o666)
    listener = socket.socket(socket.AF_UNIX)
    with _locked(os.path.dirname(path)):
        _require_free(path)
        try:
            with tempfile.TemporaryDirectory(prefix=".", dir=os.path.dirname(path)) as private:
                made, inner = f"{private}/s", f"{private}/g"
                if len(os.fsencode(made)) > MAX_SOCKET_PATH_BYTES:
                    raise UsageError(f"socket_path {path}: its directory has too long a name; choose a shorter one")
                listen(f"unix:{quote(inner)}")
                fd = os.open(inner, os.O_PATH | os.O_CLOEXEC)
                listener.bind(made)
                os.chown(made, -1, gid)
                os.chmod(made, mode)
                listener.setblocking(False)
                listener.listen(BACKLOG)
                number = os.lstat(made).st_ino
                os.rename(made, path)
        except RuntimeError as error:  # gRPC's
            raise UsageError(f"socket_path {path}: {error}; choose another directory") from None
        except OSError as error:
            raise UsageError(f"socket_path {path}: {error.strerror}; correct it or choose another path") from None
    try:
        yield Door(listener, fd, allowed)
    finally:
        _remove(path, number)


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Of two daemons that start at the same time one sees the other. Raises UsageError if it is no place for us."""
    try:
        fd = os.open(trust.require(directory, UsageError), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise UsageError(f"socket_path: {directory}: {error.strerror}; make the directory") from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"socket_path: another daemon is just starting in {directory}; try again") from None
        yield
    finally:
        os.close(fd)


def _require_free(path: str) -> None:
    """Raises UsageError unless there is nothing, or a socket on which nobody listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"socket_path {path} is there already and no socket; remove it or choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ETIMEDOUT) and not isinstance(error, TimeoutError):
            raise UsageError(f"socket_path {path}: {error.strerror}; remove it or choose another path") from None
    raise UsageError(f"socket_path {path}: somebody listens there already; stop that daemon or choose another path")


def _allowed(settings: config.Settings) -> Allowed:
    """Names looked up, once. Raises UsageError."""
    if settings.group is None and settings.users is None:
        return Allowed()
    gid = None if settings.group is None else _gid(settings.group)
    return Allowed(frozenset(map(_uid, settings.users or ())), gid)


def _gid(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(f"group: there is no group {group!r} on this node") from None


def _uid(user: str) -> int:
    """Of a name or, where nobody has it, a number, as chown(1) takes it."""
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        if user.isascii() and user.isdecimal():
            return int(user)
        raise UsageError(f"users: there is no user {user!r} on this node") from None


def _remove(path: str, number: int) -> None:
    """Unless somebody put something else there."""
    try:
        if os.lstat(path).st_ino == number:
            os.unlink(path)
    except FileNotFoundError:
        return
