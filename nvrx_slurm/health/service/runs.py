"""What the daemon of docs/reference/node-health-service.md runs: one command at a time, and what its end means.

A question that arrives during a run waits for the next one, together with all equal questions: the run under way may
have looked before the fault. A question is its arguments.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nvrx_slurm.child import bounded_process, processes
from nvrx_slurm.child.bounded_process import Ended
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import report
from nvrx_slurm.health.check import listed, one_line
from nvrx_slurm.health.checks.node_service import parse_output
from nvrx_slurm.health.service import nvhcd_pb2 as pb
from nvrx_slurm.system import trust

MAX_OUTPUT_BYTES = 1 << 20  # of stdout; the end of a longer output is kept
MAX_ERROR_BYTES = 16384
MAX_QUEUED = 16  # different questions that wait: each costs a run, and clients wait for 60 s at most
_STOP_S = 4.0  # for a killed command to end
_CANNOT_EXECUTE = (126, 127)  # as shells and our trampoline report it
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

log = logging.getLogger(__name__)
Args = tuple[str, ...]


class NoAnswer(NamedTuple):
    """The call fails, because nothing is known about the node. `status`: the name of a gRPC status code."""

    status: str
    text: str


_STOPPED = NoAnswer("UNAVAILABLE", "the service was stopped")


class Script:
    """The site's health check script. Raises UsageError if it cannot be used."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.command(())

    def command(self, args: Args) -> list[str]:
        """The words to execute. Raises UsageError if the script is missing, not executable or not trusted."""
        trust.require(self.path, UsageError)
        if not os.path.isfile(self.path) or not os.access(self.path, os.X_OK):
            raise UsageError(f"{self.path} cannot be executed; give it mode 755")
        return [self.path, *args]

    def answer(self, ended: Ended) -> pb.HealthCheckResponse | NoAnswer:
        """The script's JSON with a fail_count, as a whole or on its last such line; else JSON made of the exit code.

        Output that is meant as JSON and cannot be read is a failure whatever the exit code, as for clients (seed 000).
        """
        error = ended.stderr[-MAX_ERROR_BYTES:].decode(errors="replace").strip()
        said = f": {error}" if error else ""
        if ended.code is None:
            return NoAnswer("ABORTED", f"{self.path} did not end in time and was killed{said}")
        if ended.code < 0:
            return NoAnswer("ABORTED", f"{self.path} was ended by signal {-ended.code}{said}")
        printed = ended.stdout.decode(errors="replace").strip()
        lines = [line for line in printed.split("\n") if "fail_count" in line]
        for output in (printed, *reversed(lines)):
            if parse_output(output) is not None:
                return pb.HealthCheckResponse(success=ended.code == 0, exit_code=ended.code, output=output, error=error)
        if ended.code in _CANNOT_EXECUTE:
            return NoAnswer("FAILED_PRECONDITION", f"{self.path} ended with {ended.code}, cannot be executed{said}")
        failed = [f"exit code {ended.code}"] if ended.code else []
        if not failed and (lines or printed.startswith("{")):
            failed = ["its output cannot be read"]
        return pb.HealthCheckResponse(
            success=ended.code == 0, exit_code=ended.code, output=_output(failed), error=error
        )


class OwnChecks:
    """Our preflight checks in a process of their own. The arguments of a client are for scripts and are ignored.

    `node-service` is left out, because it would ask this daemon.
    """

    def __init__(self, sysroot: str) -> None:
        module = [sys.executable, "-I", "-m", "nvrx_slurm.health"]
        self._command = [*module, "--when", "preflight", "--skip", "node-service", "--sysroot", sysroot]

    def command(self, args: Args) -> list[str]:
        """The words to execute."""
        return self._command

    def answer(self, ended: Ended) -> pb.HealthCheckResponse | NoAnswer:
        """Only findings with the action drain or fail count as failures."""
        if ended.code is None:
            return NoAnswer("ABORTED", "the checks did not end in time and were killed")
        try:
            found = report.from_json(ended.stdout.decode(errors="replace"))
        except ValueError:
            why = one_line(ended.stderr.decode(errors="replace")) or f"they ended with {ended.code}"
            return NoAnswer("FAILED_PRECONDITION", f"the checks could not be run: {why}")
        error = "; ".join(f"{finding.check}: {finding.text}" for finding in found.grave)
        failed = [finding.check for finding in found.grave]
        return pb.HealthCheckResponse(
            success=not failed, exit_code=ended.code, output=_output(failed), error=error[:MAX_ERROR_BYTES]
        )


def _output(failed: Sequence[str]) -> str:
    return json.dumps({"fail_count": len(failed), "failed_checks": list(failed)})


class Runs:
    """Answers questions, one run at a time, each of at most `timeout_s` seconds.

    All methods belong to the main thread, in which the event loop runs: all processes are started and reaped there.
    """

    def __init__(self, what: Script | OwnChecks, timeout_s: float, env: Mapping[str, str]) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._env = {"PATH": _PATH, **env}
        self._orphans = processes.Orphans()
        self._pid = 0  # of the command that runs, or that is blocked in the kernel
        self._waiting: dict[Args, asyncio.Task[pb.HealthCheckResponse | NoAnswer]] = {}
        self._turns: set[asyncio.Task[pb.HealthCheckResponse | NoAnswer]] = set()
        self._closing = False
        self._one = asyncio.Lock()  # its waiters go on in the order in which they came

    async def ask(self, args: Args) -> pb.HealthCheckResponse | NoAnswer:
        """The answer of a run that begins after this call."""
        key = args if isinstance(self._what, Script) else ()
        if self._closing:
            return _STOPPED
        if key not in self._waiting:
            if len(self._waiting) >= MAX_QUEUED:
                return NoAnswer("UNAVAILABLE", "too many different health checks are waiting")
            turn = self._waiting[key] = asyncio.ensure_future(self._turn(key))
            self._turns.add(turn)
            turn.add_done_callback(self._turns.discard)
        return await asyncio.shield(self._waiting[key])

    async def _turn(self, key: Args) -> pb.HealthCheckResponse | NoAnswer:
        try:
            async with self._one:
                del self._waiting[key]
                return await self._run(key)
        except asyncio.CancelledError:
            return _STOPPED

    async def stop(self) -> None:
        """End the run under way with all its processes; questions that wait are answered UNAVAILABLE."""
        self._closing = True
        for turn in self._turns:
            turn.cancel()
        if self._turns:
            await asyncio.wait(self._turns, timeout=_STOP_S)

    def reap_orphans(self) -> None:
        """Call it on SIGCHLD."""
        self._orphans.reap([self._pid] if self._pid else [])

    async def _run(self, args: Args) -> pb.HealthCheckResponse | NoAnswer:
        if self._pid and _runs(self._pid):
            text = f"process {self._pid} of an earlier run is blocked in the kernel and cannot be ended"
            return NoAnswer("ABORTED", text)
        try:
            answer = self._what.answer(await self._execute(self._what.command(args)))
        except UsageError as error:
            answer = NoAnswer("FAILED_PRECONDITION", str(error))
        except OSError as error:
            answer = NoAnswer("RESOURCE_EXHAUSTED", f"no process could be started: {error.strerror}")
        if isinstance(answer, NoAnswer):
            log.error("no answer: %s", one_line(answer.text))
        else:
            level = logging.INFO if answer.success else logging.WARNING
            log.log(level, "exit code %d: %s", answer.exit_code, one_line(f"{answer.output} {answer.error}"))
        return answer

    async def _execute(self, argv: list[str]) -> Ended:
        """Run a command to its end; kill what it left running, in whatever session."""
        log.debug("running %s", listed(argv, 20))
        process = bounded_process.execute(argv, self._env, self._timeout_s, limit=MAX_OUTPUT_BYTES, last=True)
        self._pid = process.pid
        try:
            return await process.finish_async()
        finally:
            self._pid = 0 if process.gone else process.pid
            self._orphans.kill([])


def _runs(pid: int) -> bool:
    """Whether our child `pid` has not ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
