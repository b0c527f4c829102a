"""`nvrx health serve`: the daemon behind a node health check endpoint, nvhcd-compatible.

One thread with one asyncio loop. The mode and group of its Unix socket decide which users may ask; gRPC's own limits
bound calls and connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from nvrx_slurm.errors import NEEDS_GRPC, ExitCode, UsageError

try:
    import grpc
    import grpc.aio
except ModuleNotFoundError:
    raise ModuleNotFoundError(NEEDS_GRPC, name="grpc") from None

from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.health.check import one_line
from nvrx_slurm.health.checks.node_service import METHOD
from nvrx_slurm.health.service import nvhcd_pb2 as pb
from nvrx_slurm.health.service.runs import NoAnswer, OwnChecks, Runs, Script
from nvrx_slurm.system import trust
from nvrx_slurm.system.files import MAX_SOCKET_PATH_BYTES

MAX_ARGS = 64
MAX_CALLS = 256  # that wait for an answer
# The characters of options and names: the script runs as root for all users that may connect, and is often shell.
_ARG = re.compile(r"[A-Za-z0-9_.,:=/@%+-]{1,256}")
_LIMITS = [
    ("grpc.max_receive_message_length", 65536),
    ("grpc.max_connection_idle_ms", 600_000),  # without a call
    ("grpc.server_handshake_timeout_ms", 10_000),  # a peer that says nothing
    ("grpc.max_concurrent_streams", 4),  # calls of one connection
]
_GRACE_S = 0.5  # for last answers
_PROBE_S = 2.0  # for another daemon at the same path to take a connection

log = logging.getLogger(__name__)


def main(path: str, sysroot: str = "/") -> int:
    """Serve as the file at `path` says, until SIGTERM or SIGINT; returns the exit code. Raises UsageError.

    To be called in the main thread of a process that does nothing else. `sysroot`: the root of the node for our own
    checks.
    """
    settings = config.load(trust.require(path, UsageError))
    shape = "nvrx health serve: %(levelname)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=shape)
    logging.getLogger("nvrx_slurm").setLevel(settings.log_level.upper())
    what = Script(settings.healthcheck_path) if settings.healthcheck_path else OwnChecks(sysroot)
    asyncio.run(_serve(settings, what))
    return ExitCode.OK


async def _serve(settings: config.NvhcdFile, what: Script | OwnChecks) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    runs = Runs(what, settings.timeout, os.environ)
    loop.add_signal_handler(signal.SIGCHLD, runs.reap_orphans)
    server = _server(runs)
    with _published(settings, server.add_insecure_port):
        await server.start()
        log.info("listening on %s; runs %s", settings.socket_path, settings.healthcheck_path or "our own checks")
        await stopped.wait()
    await runs.stop()
    ending = asyncio.ensure_future(server.stop(_GRACE_S))
    if not (await asyncio.wait({ending}, timeout=2 * _GRACE_S))[0]:
        os._exit(ExitCode.OK)  # gRPC waits for a peer that does not read, and cannot be interrupted


def _server(runs: Runs) -> Any:
    async def run_health_check(request: Any, context: Any) -> Any:
        args = tuple(request.args)
        if len(args) > MAX_ARGS or not all(map(_ARG.fullmatch, args)):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"args must be at most {MAX_ARGS}, each of 1 to 256 letters, digits and _.,:=/@%+-",
            )
        log.debug("asked with %s", args)
        answer = await runs.ask(args)
        if isinstance(answer, NoAnswer):
            await context.abort(grpc.StatusCode[answer.status], one_line(answer.text))
        return answer

    server = grpc.aio.server(maximum_concurrent_rpcs=MAX_CALLS, options=_LIMITS)
    _, service, name = METHOD.split("/")
    handler = grpc.unary_unary_rpc_method_handler(
        run_health_check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
    return server


# --- the socket -------------------------------------------------------------------------------------------------------


@contextmanager
def _published(settings: config.NvhcdFile, listen: Callable[[str], int]) -> Iterator[None]:
    """Keep gRPC's socket at its path during the block. Raises UsageError.

    gRPC makes the socket in a private directory. It is renamed once group and mode are right, which also replaces a
    socket that a killed daemon left.
    """
    path = settings.socket_path
    directory = os.path.dirname(path)
    try:
        trust.require(directory, UsageError)
        _require_free(path)
        with tempfile.TemporaryDirectory(prefix=".", dir=directory) as private:
            made = f"{private}/s"
            if len(os.fsencode(made)) > MAX_SOCKET_PATH_BYTES:
                raise UsageError(f"socket_path {path}: the name of its directory is too long; choose a shorter one")
            listen(f"unix:{quote(made)}")
            if settings.group is not None:
                shutil.chown(made, group=settings.group)
            os.chmod(made, 0o666 if settings.group is None else 0o660)
            os.rename(made, path)
    except LookupError:
        raise UsageError(f"group: there is no group {settings.group!r} on this node") from None
    except RuntimeError as error:  # gRPC's
        raise UsageError(f"socket_path {path}: {error}; choose another directory") from None
    except OSError as error:
        raise UsageError(f"socket_path {path}: {error.strerror}; correct it or choose another path") from None
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _require_free(path: str) -> None:
    """Raises UsageError unless there is nothing, or a socket on which no process listens."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise UsageError(f"socket_path {path} is there already and not a socket; remove it or choose another path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return
    except (BlockingIOError, TimeoutError):
        pass  # a process listens, and takes no connections
    raise UsageError(f"socket_path {path}: a process listens there already; stop that daemon or choose another path")
