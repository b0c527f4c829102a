"""`nvrx health serve`: the daemon behind a node health check endpoint, nvhcd-compatible.

gRPC's only worker thread takes one call after the other, and each call has a run of its own. The mode and group of the
Unix socket decide which users may ask.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import quote

from nvrx_slurm.errors import NEEDS_GRPC, ExitCode, UsageError

try:
    import grpc
except ModuleNotFoundError:
    raise ModuleNotFoundError(NEEDS_GRPC, name="grpc") from None

from nvrx_slurm.child import bounded_process, processes
from nvrx_slurm.child.descendants import children
from nvrx_slurm.config import nvhcd as config
from nvrx_slurm.core.words import one_line
from nvrx_slurm.health import outcome
from nvrx_slurm.health.checks.node_service import METHOD, parse_output
from nvrx_slurm.health.checks.site_checks import require_usable
from nvrx_slurm.health.service import nvhcd_pb2 as pb
from nvrx_slurm.system import trust

MAX_ARGS = 64
MAX_CALLS = 256  # most calls that wait for an answer
MAX_OUTPUT_BYTES = 1 << 20  # most bytes of stdout; the end of a longer output is kept
MAX_ERROR_BYTES = 16384
_LIMITS = [
    ("grpc.max_receive_message_length", 65536),
    ("grpc.max_connection_idle_ms", 600_000),  # without a call
    ("grpc.server_handshake_timeout_ms", 10_000),  # a peer that says nothing
    ("grpc.max_concurrent_streams", 4),  # calls of one connection
]
_CANNOT_EXECUTE = (126, 127)  # as shells and our trampoline report it
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_PROBE_S = 2.0  # for another daemon at the same path to take a connection
_STOPPING = (signal.SIGTERM, signal.SIGINT)

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
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # before gRPC's threads begin
    runs = Runs(settings, sysroot)
    server = _server(runs, frozenset(settings.args))
    with _published(settings, server.add_insecure_port):
        server.start()
        log.info(
            "listening on %s; runs %s",
            settings.socket_path,
            settings.healthcheck_path or "our own checks",
        )
        signal.sigwait(_STOPPING)
    runs.kill()
    # calls end with their connection; gRPC would wait for a peer that does not read
    os._exit(ExitCode.OK)


def _server(runs: Runs, known: frozenset[str]) -> grpc.Server:
    def run_health_check(request: Any, context: Any) -> Any:
        args = tuple(request.args)
        if len(args) > MAX_ARGS or not known.issuperset(args):
            text = f"args must be at most {MAX_ARGS} of the words that the administrator has listed in args"
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        if not context.is_active():
            return pb.HealthCheckResponse()  # the caller has left, and reads no answer
        try:
            answer = runs.answer(args)
        except (UsageError, OSError) as error:  # nothing is known about the node
            log.error("no answer: %s", one_line(error))
            context.abort(grpc.StatusCode.ABORTED, one_line(error))
        level = logging.INFO if answer.success else logging.WARNING
        log.log(
            level, "exit code %d: %s", answer.exit_code, one_line(f"{answer.output} {answer.error}")
        )
        return answer

    server = grpc.server(ThreadPoolExecutor(1), maximum_concurrent_rpcs=MAX_CALLS, options=_LIMITS)
    _, service, name = METHOD.split("/")
    handler = grpc.unary_unary_rpc_method_handler(
        run_health_check, pb.HealthCheckRequest.FromString, pb.HealthCheckResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    return server


# --- runs -------------------------------------------------------------------------------------------------------------


class Runs:
    """Runs of the site's script, or of our own preflight checks. Raises UsageError for a script that cannot be used."""

    def __init__(self, settings: config.NvhcdFile, sysroot: str) -> None:
        self._script = settings.healthcheck_path
        self._timeout_s = settings.timeout
        # Without `node-service`, which would ask this daemon.
        own = ("--when", "preflight", "--skip", "node-service", "--sysroot", sysroot)
        self._own_checks = [sys.executable, "-I", "-m", "nvrx_slurm.health", *own]
        self._orphans = processes.Orphans()
        self._blocked = 0  # pid of a command that SIGKILL did not end
        if self._script:
            require_usable([self._script])

    def answer(self, args: Sequence[str]) -> pb.HealthCheckResponse:
        """The answer of one run. `args` are for scripts. Raises UsageError and OSError where the run tells nothing."""
        if self._blocked in children(os.getpid()):
            raise UsageError(
                f"process {self._blocked} of an earlier run is blocked in the kernel and cannot be ended"
            )
        if not self._script:
            return _of_own_checks(*self._run(self._own_checks))
        require_usable([self._script])
        return _of_script(*self._run([self._script, *args]))

    def kill(self) -> None:
        """SIGKILL to all processes of a run, in whatever session."""
        self._orphans.kill()

    def _run(self, argv: list[str]) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of a command. Kills what it leaves running. Raises as `answer`."""
        log.debug("running %s", one_line(" ".join(argv)))
        env = {"PATH": _PATH, **os.environ}
        try:
            ended = bounded_process.run(
                argv, env, self._timeout_s, limit=MAX_OUTPUT_BYTES, last=True
            )
        finally:
            self.kill()
        self._blocked = ended.blocked
        error = ended.stderr[-MAX_ERROR_BYTES:].decode(errors="replace").strip()
        if ended.code is None or ended.code < 0:
            how = (
                "did not end in time and was killed"
                if ended.code is None
                else f"was ended by signal {-ended.code}"
            )
            raise UsageError(f"{argv[0]} {how}: {error}")
        return ended.code, ended.stdout.decode(errors="replace").strip(), error


def _of_script(code: int, printed: str, error: str) -> pb.HealthCheckResponse:
    """The script's JSON with a fail_count, as a whole or on its last such line; else JSON made of the exit code.

    Output that is meant as JSON and cannot be read is a failure whatever the exit code, as for clients.
    """
    lines = [line for line in printed.split("\n") if "fail_count" in line]
    readable = (text for text in (printed, *reversed(lines)) if parse_output(text) is not None)
    output = next(readable, "")
    if not output and code in _CANNOT_EXECUTE:
        raise UsageError(f"the script ended with {code}, cannot be executed: {error}")
    if not output:
        failed = [f"exit code {code}"] if code else []
        if not failed and (lines or printed.startswith("{")):
            failed = ["its output cannot be read"]
        output = _output(failed)
    return pb.HealthCheckResponse(success=code == 0, exit_code=code, output=output, error=error)


def _of_own_checks(code: int, printed: str, error: str) -> pb.HealthCheckResponse:
    """Only findings with the action drain or fail count as failures."""
    try:
        grave = outcome.from_json(printed).grave
    except ValueError:
        raise UsageError(
            f"the checks could not be run: {error or f'they ended with {code}'}"
        ) from None
    said = "; ".join(f"{finding.check}: {finding.text}" for finding in grave)[:MAX_ERROR_BYTES]
    output = _output([finding.check for finding in grave])
    return pb.HealthCheckResponse(success=not grave, exit_code=code, output=output, error=said)


def _output(failed: list[str]) -> str:
    return json.dumps({"fail_count": len(failed), "failed_checks": failed})


# --- the socket -------------------------------------------------------------------------------------------------------


def _mode(settings: config.NvhcdFile) -> int:
    """The mode of the socket: who may ask."""
    if settings.everybody:
        return 0o666
    return 0o660 if settings.group is not None else 0o600


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
            listen(f"unix:{quote(made)}")
            if settings.group is not None:
                shutil.chown(made, group=settings.group)
            os.chmod(made, _mode(settings))
            os.rename(made, path)
    # LookupError: the group is unknown; RuntimeError: gRPC cannot listen
    except (OSError, LookupError, RuntimeError) as error:
        raise UsageError(
            f"socket_path {path}: {error}; correct it or choose another path"
        ) from None
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _require_free(path: str) -> None:
    """Raises UsageError unless there is nothing, or a socket on which no process listens."""
    if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise UsageError(
            f"socket_path {path} is there already and not a socket; remove it or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        if probe.connect_ex(path) not in (errno.ENOENT, errno.ECONNREFUSED):
            raise UsageError(
                f"socket_path {path}: a process listens there already; stop it or choose another path"
            )
