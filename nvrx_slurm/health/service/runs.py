"""What the daemon of docs/nvhcd.md runs: one command at a time, whoever asks, and what its end means.

Who asks during a run waits for the next one, together with all that ask the same: a run that began before the question
may have looked before the fault. Nobody can keep the others from their answers: root's questions come first, a user's
one after those of users who have not just had a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import report
from nvrx_slurm.health.check import listed, one_line
from nvrx_slurm.health.checks.node_service import parse_output
from nvrx_slurm.system import processes, trust

MAX_OUTPUT_BYTES = 1 << 20  # of stdout; of what is longer the end is kept
MAX_ERROR_BYTES = 16384
MAX_QUEUED = 16  # different questions that wait, one of a user: each costs the others a run, and they wait 60 s at most
MAX_QUEUED_OF_ROOT = 4  # beside those, and of the daemon's own user
_REAP_S = 2.0  # for a killed command to end
_CANNOT_EXECUTE = (126, 127)  # as shells and our trampoline say it
_STOPPED = "the service was stopped"
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"

log = logging.getLogger(__name__)
Args = tuple[str, ...]


class Answer(NamedTuple):
    """A HealthCheckResponse."""

    success: bool
    exit_code: int
    output: str
    error: str


class NoAnswer(NamedTuple):
    """Nothing is known about the node, and why: the call fails. `status`: the name of a gRPC status code."""

    status: str
    text: str


class Ended(NamedTuple):
    """How a command ended. `code`: negative = by that signal, None = killed as its time was up."""

    code: int | None
    stdout: bytes
    stderr: bytes


class Script:
    """The site's health check script. Raises UsageError if it cannot be used."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.command(())

    def command(self, args: Args) -> list[str]:
        """The words to execute. Raises UsageError if it is not there, not executable, or others can change it."""
        trust.require(self.path, UsageError)
        if not os.path.isfile(self.path) or not os.access(self.path, os.X_OK):
            raise UsageError(f"{self.path} cannot be executed; give it mode 755")
        return [self.path, *args]

    def answer(self, ended: Ended) -> Answer | NoAnswer:
        """Its own JSON with a fail_count, be it all or the last such line that it printed; else one of the exit code.

        What is meant as JSON and cannot be read is a failure whatever the exit code, as it is to clients (seed 000).
        """
        error = ended.stderr.decode(errors="replace").strip()
        said = f": {error}" if error else ""
        if ended.code is None:
            return NoAnswer("ABORTED", f"{self.path} did not end in time and was killed{said}")
        if ended.code < 0:
            return NoAnswer("ABORTED", f"{self.path} was ended by signal {-ended.code}{said}")
        printed = ended.stdout.decode(errors="replace").strip()
        lines = [line for line in printed.split("\n") if "fail_count" in line]
        for output in (printed, *reversed(lines)):
            if parse_output(output) is not None:
                return Answer(ended.code == 0, ended.code, output, error)
        if ended.code in _CANNOT_EXECUTE:
            return NoAnswer("FAILED_PRECONDITION", f"{self.path} ended with {ended.code}, cannot be executed{said}")
        failed = [f"exit code {ended.code}"] if ended.code else []
        if not failed and (lines or printed.startswith("{")):
            failed = ["its output cannot be read"]
        return Answer(ended.code == 0, ended.code, _output(failed), error)


class OwnChecks:
    """Our checks of the preflight, in a process of their own; what a client wants of a script (its arguments) is not asked.

    `node-service` is left out: it would ask us.
    """

    def __init__(self, sysroot: str) -> None:
        module = [sys.executable, "-I", "-m", "nvrx_slurm.health"]
        self._command = [*module, "--when", "preflight", "--skip", "node-service", "--sysroot", sysroot]

    def command(self, args: Args) -> list[str]:
        """The words to execute."""
        return self._command

    def answer(self, ended: Ended) -> Answer | NoAnswer:
        """Failed is what the site does not only want to be warned of; unknown is no failure."""
        if ended.code is None:
            return NoAnswer("ABORTED", "the checks did not end in time and were killed")
        try:
            found = report.from_json(ended.stdout.decode(errors="replace"))
        except ValueError:
            why = one_line(ended.stderr.decode(errors="replace")) or f"they ended with {ended.code}"
            return NoAnswer("FAILED_PRECONDITION", f"the checks could not be run: {why}")
        error = "; ".join(f"{finding.check}: {finding.text}" for finding in found.grave)
        failed = [finding.check for finding in found.grave]
        return Answer(not failed, ended.code, _output(failed), error[:MAX_ERROR_BYTES])


def _output(failed: Sequence[str]) -> str:
    return json.dumps({"fail_count": len(failed), "failed_checks": list(failed)})


class Runs:
    """Answers questions, one run at a time, each of at most `timeout_s` seconds. To be made in the main thread, in
    which the loop runs: all processes are started and reaped there."""

    def __init__(self, what: Script | OwnChecks, timeout_s: float, env: Mapping[str, str]) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._env = {"PATH": _PATH, **env}
        self._orphans = processes.Orphans()
        self._child: processes.Child | None = None  # running, or killed and blocked in the kernel
        self._queued: dict[Args, asyncio.Future[Answer | NoAnswer]] = {}
        self._asked_by: dict[Args, int] = {}  # root, or the uid that was first with a question that waits
        self._roots = {0, os.geteuid()}
        self._last_uid = 0  # of the user for whom the last run was, root apart
        self._asked = asyncio.Event()
        self._closing = False

    async def ask(self, args: Args, uid: int) -> Answer | NoAnswer:
        """The answer of a run that begins after now, for the user `uid`."""
        key = args if isinstance(self._what, Script) else ()
        if key not in self._queued:
            if self._closing:
                return NoAnswer("UNAVAILABLE", _STOPPED)
            if self._too_many(uid):
                return NoAnswer("UNAVAILABLE", "too many different health checks are waiting")
            self._queued[key] = asyncio.get_running_loop().create_future()
            self._asked_by[key] = uid
            self._asked.set()
        elif uid in self._roots:
            self._asked_by[key] = uid  # what a user asked, and root asks, too, is root's question
        return await asyncio.shield(self._queued[key])

    async def work(self) -> None:
        """Run what is asked, until `stop`."""
        while not self._closing:
            await self._asked.wait()
            args = min(self._queued, key=self._order)  # the first of those that are equal
            future, uid = self._queued.pop(args), self._asked_by.pop(args)
            self._last_uid = self._last_uid if uid in self._roots else uid
            if not self._queued:
                self._asked.clear()
            try:
                answer = await self._run(args)
            except asyncio.CancelledError:
                future.set_result(NoAnswer("UNAVAILABLE", _STOPPED))
                raise
            future.set_result(answer)

    def _too_many(self, uid: int) -> bool:
        """Whether one more question would be."""
        waiting = [*self._asked_by.values()]
        if uid in self._roots:
            return waiting.count(uid) >= MAX_QUEUED_OF_ROOT
        users = [asked_by for asked_by in waiting if asked_by not in self._roots]
        return len(users) >= MAX_QUEUED or uid in users

    def _order(self, key: Args) -> tuple[bool, bool]:
        """The smallest is next."""
        uid = self._asked_by[key]
        return uid not in self._roots, uid == self._last_uid

    async def stop(self, working: asyncio.Task[None]) -> None:
        """End the run under way with all its processes; who still waits is told."""
        self._closing = True
        working.cancel()
        await asyncio.wait({working}, timeout=2 * _REAP_S)
        for future in self._queued.values():
            future.set_result(NoAnswer("UNAVAILABLE", _STOPPED))

    def reap_orphans(self) -> None:
        """On SIGCHLD."""
        self._orphans.reap([self._child.pid] if self._child else [])

    async def _run(self, args: Args) -> Answer | NoAnswer:
        if self._child is not None and await self._gone(self._child) is None:
            pid = self._child.pid
            return NoAnswer("ABORTED", f"process {pid} of an earlier run is blocked in the kernel and cannot be ended")
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
        log.debug("running %s", listed(argv, 20))
        out = _Tail(MAX_OUTPUT_BYTES)
        try:
            err = _Tail(MAX_ERROR_BYTES)
        except OSError:
            out.close()
            raise
        child = code = None
        try:
            child = self._child = processes.start(argv, self._env, out.theirs, err.theirs)
            out.follow()
            err.follow()
            in_time = await _readable(child.pidfd, self._timeout_s)
        finally:
            if child is not None:
                code = await self._end(child)
            stdout, stderr = out.close(), err.close()
        return Ended(code if in_time else None, stdout, stderr)

    async def _end(self, child: processes.Child) -> int | None:
        """Kill all that the run has left; its exit code, None if it is blocked in the kernel."""
        child.signal_group(signal.SIGKILL)
        code = await self._gone(child)
        self._orphans.kill([self._child.pid] if self._child else [])
        return code

    async def _gone(self, child: processes.Child) -> int | None:
        if not await _readable(child.pidfd, _REAP_S):
            return None
        self._child = None
        return child.reap()


class _Tail:
    """A pipe, of whose bytes the last `limit` are kept; whoever writes never waits long for us."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept = bytearray()
        self._ours, self.theirs = os.pipe()
        os.set_blocking(self._ours, False)

    def follow(self) -> None:
        """Give our copy of the writers' end away and read on the running loop."""
        os.close(self.theirs)
        self.theirs = -1
        asyncio.get_running_loop().add_reader(self._ours, self._read)

    def close(self) -> bytes:
        """What was kept. Who still holds the other end (nobody, unless blocked in the kernel) is not waited for."""
        asyncio.get_running_loop().remove_reader(self._ours)
        rounds = 64
        while rounds and self._read():  # a pipe holds a bounded number of bytes
            rounds -= 1
        for fd in (self._ours, self.theirs):
            if fd >= 0:
                os.close(fd)
        return bytes(self._kept[-self._limit :])

    def _read(self) -> bool:
        try:
            more = os.read(self._ours, 65536)
        except BlockingIOError:
            return False
        self._kept += more
        if len(self._kept) > 2 * self._limit:
            del self._kept[: -self._limit]
        if not more:
            asyncio.get_running_loop().remove_reader(self._ours)
        return bool(more)


async def _readable(fd: int, timeout_s: float) -> bool:
    """Whether `fd` can be read from within `timeout_s` seconds."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await asyncio.wait_for(ready.wait(), timeout_s)
    except asyncio.TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
    return True
