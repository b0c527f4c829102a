"""Bounded work in child processes: start or fork, feed, read with a limit, stop at a deadline, kill, reap.

A child leads its own session and process group. At its deadline the whole group gets SIGKILL. A child that is blocked
in the kernel cannot be reaped: it is given up after at most REAP_S, and init reaps it when this process has ended.

`run` does everything for one command. Callers that poll several children use `execute` or `fork`, then `fds`, `wake_s`
and `go_on` until `done`; `finish` is that loop for one child.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from nvrx_slurm.child.descendants import kill_tree

# for a killed child to end; one that is blocked in the kernel must not use up the time of a prolog
REAP_S = 0.3
DEFAULT_LIMIT_BYTES = 65536
_CHUNK_BYTES = 65536
_MAX_READS = 64  # reads of a pipe whose child has ended; a pipe holds a bounded number of bytes
# pids of children, also of `processes`, that were not reaped: none of them is an orphan
own: set[int] = set()
# a forked child ends itself that long after its deadline, should this process be gone
_ALARM_S = 2.0
JOB_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_RESET = (*JOB_SIGNALS, signal.SIGALRM, signal.SIGPIPE, signal.SIGXFSZ)
_TRAMPOLINE = os.path.join(os.path.dirname(__file__), "trampoline.py")
_BUNDLE = _TRAMPOLINE.partition("/nvrx_slurm/child")[0]
_BARE = [_TRAMPOLINE]  # runs the trampoline; from a bundle of `nvrx health bundle` as well
if os.path.isfile(_BUNDLE):
    _BARE = [
        "-c",
        f"import sys; sys.path.insert(0, {_BUNDLE!r}); import nvrx_slurm.child.trampoline",
    ]


class Ended(NamedTuple):
    """How a child ended. `code`: exit code, negative for a signal, None if it was killed at its deadline.
    `truncated`: it wrote more to stdout or stderr than was kept. `blocked`: its pid if it could not be reaped, else
    0."""

    code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    blocked: int = 0


class Output:
    """The reading end of a pipe; keeps the first (or the `last`) `limit` bytes and drops the rest.

    The writer never waits for the reader for long: everything is read. `fd` is -1 once the pipe is closed.
    """

    def __init__(self, fd: int, limit: int, last: bool) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.kept = bytearray()
        self.total = 0  # bytes read so far
        self._limit = limit
        self._last = last

    def read(self) -> bytes:
        """The bytes that are there now, at most 64 KiB; b"" if there are none. Closes the pipe at its end."""
        if self.fd < 0:
            return b""
        try:
            more = os.read(self.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return b""
        if not more:
            self.close()
        self.total += len(more)
        if self._last:
            self.kept += more
            del self.kept[: -self._limit]
        else:
            self.kept += more[: self._limit - len(self.kept)]
        return more

    def close(self) -> None:
        """Close the pipe; a second call does nothing."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class BoundedProcess:
    """A child process under way. `until_s` (time.monotonic(), may be changed): when it is killed.

    `done`: it was reaped, or given up. `gone`: it was reaped. All methods belong to the thread that started it; none
    waits, except `finish`.
    """

    def __init__(self, pid: int, stdout: Output, stderr: Output | None, until_s: float) -> None:
        self.pid = pid
        own.add(pid)
        self.stdout = stdout
        self.stderr = stderr
        self.until_s = until_s
        self.code: int | None = None
        self.gone = False
        self.killed = False
        self._give_up_s = math.inf
        try:
            self.pidfd = os.pidfd_open(pid)
        except OSError:
            self._kill_group()
            os.waitpid(pid, 0)
            own.discard(pid)
            self._close_outputs()
            raise

    @property
    def done(self) -> bool:
        """Whether nothing remains to be waited for."""
        return self.gone or time.monotonic() >= self._give_up_s

    def fds(self) -> list[int]:
        """File descriptors to poll for reading."""
        if self.gone:
            return []
        return [self.pidfd, *(output.fd for output in self._outputs() if output.fd >= 0)]

    def wake_s(self) -> float:
        """When to call `go_on` at the latest (time.monotonic()); inf if there is no need."""
        if self.done:
            return math.inf
        return self._give_up_s if self.killed else self.until_s

    def go_on(self, ready: Iterable[int]) -> None:
        """Read what came, reap an ended child, kill an overdue one. `ready`: those of `fds` that can be read."""
        ready = frozenset(ready)
        if self.gone:
            return
        for output in self._outputs():
            if output.fd in ready:
                output.read()
        if self.pidfd in ready:
            self._reap()
        elif time.monotonic() >= self.until_s:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the child, its descendants and its group. `go_on` reaps it, or gives it up within REAP_S."""
        if self.gone or self.killed:
            return
        kill_tree(self.pid, (os.getpid(),))
        self._kill_group()
        self.killed = True
        self._give_up_s = time.monotonic() + REAP_S
        self._close_outputs()

    def result(self) -> Ended:
        """How it ended, once it is `done`."""
        outputs = self._outputs()
        stdout, stderr = bytes(self.stdout.kept), bytes(self.stderr.kept) if self.stderr else b""
        truncated = any(output.total > len(output.kept) for output in outputs)
        return Ended(
            None if self.killed else self.code,
            stdout,
            stderr,
            truncated,
            0 if self.gone else self.pid,
        )

    def finish(self) -> Ended:
        """Wait until it is done, at most until its deadline and REAP_S more. The child is killed if this raises."""
        try:
            self._wait()
            return self.result()
        finally:
            self.end()

    def end(self) -> None:
        """Kill it unless it has ended, and reap it if that takes no longer than REAP_S."""
        self.kill()
        self._wait()
        self.release()

    def release(self) -> None:
        """Close the descriptors of a child that was given up; init reaps it when this process ends."""
        own.discard(self.pid)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _wait(self) -> None:
        while not self.done:
            self.go_on(wait(self.fds(), self.wake_s()))

    def _outputs(self) -> list[Output]:
        return [self.stdout, self.stderr] if self.stderr else [self.stdout]

    def _reap(self) -> None:
        """The child has ended: kill the rest of its group, read its last output, collect its exit code."""
        self._kill_group()
        self._close_outputs()
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        own.discard(self.pid)
        os.close(self.pidfd)
        self.pidfd = -1
        self.gone = True

    def _kill_group(self) -> None:
        for kill in (os.killpg, os.kill):  # a child that was just forked does not lead a group yet
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)

    def _close_outputs(self) -> None:
        for output in self._outputs():
            reads = _MAX_READS
            while reads and output.read():
                reads -= 1
            output.close()


def execute(
    argv: Sequence[str],
    env: Mapping[str, str],
    timeout_s: float,
    *,
    limit: int = DEFAULT_LIMIT_BYTES,
    last: bool = False,
    dies_with_parent: bool = True,
) -> BoundedProcess:
    """Start a command with its stdout and stderr in pipes, each kept up to `limit` bytes, and /dev/null as stdin.

    `last`: the last bytes are kept, not the first. `dies_with_parent` costs an interpreter's start (about 10 ms) and is
    for the main thread only; a command that cannot be executed then ends with 126 or 127 instead of an OSError.
    Raises OSError if no process can be started.
    """
    if dies_with_parent:
        argv = through_trampoline(argv)
    outputs = list[Output]()
    its = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]  # descriptors
    try:
        for _ in range(2):
            reader, writer = os.pipe()
            outputs.append(Output(reader, limit, last))
            its.append(writer)
        spawn = os.posix_spawn if "/" in argv[0] else os.posix_spawnp
        pid = spawn(
            argv[0],
            list(argv),
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in enumerate(its)],
            setsid=True,
            setsigmask=(),
            setsigdef=_RESET,
        )
    except BaseException:
        for output in outputs:
            output.close()
        raise
    finally:
        for fd in its:
            os.close(fd)
    return BoundedProcess(pid, outputs[0], outputs[1], time.monotonic() + timeout_s)


def through_trampoline(argv: Sequence[str], ignored: int = 0, control_fd: int = -1) -> list[str]:
    """The command by way of `child.trampoline`, which tells its arguments: it dies with the calling thread."""
    return [
        sys.executable,
        "-I",
        "-S",
        *_BARE,
        str(os.getpid()),
        str(int(ignored)),
        str(control_fd),
        *argv,
    ]


def fork(
    work: Callable[[int], object], timeout_s: float = math.inf, *, limit: int = DEFAULT_LIMIT_BYTES
) -> BoundedProcess:
    """Run `work(fd)` in a forked child; the bytes it writes to `fd` are the child's stdout here.

    To be called in a process without threads. The child has default signal handlers and /dev/null as stdin, stdout and
    stderr; its exit code is 0, or 1 if `work` raised. With a finite timeout an alarm ends a child whose parent is gone.
    Raises OSError if no process can be made.
    """
    ours, theirs = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _child(work, theirs, timeout_s)
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    return BoundedProcess(pid, Output(ours, limit, last=False), None, time.monotonic() + timeout_s)


def _child(work: Callable[[int], object], pipe: int, timeout_s: float) -> NoReturn:
    """The forked process: never returns into the caller's frames."""
    code = 1
    try:
        os.setsid()
        for signum in (*JOB_SIGNALS, signal.SIGALRM):
            signal.signal(signum, signal.SIG_DFL)
        if math.isfinite(timeout_s):
            signal.setitimer(signal.ITIMER_REAL, timeout_s + _ALARM_S)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        work(pipe)
        code = 0
    finally:
        os._exit(code)  # threads of `work` may still be blocked


def run(argv: Sequence[str], env: Mapping[str, str], timeout_s: float, **options: Any) -> Ended:
    """Run a command to its end; takes the keywords of `execute` and raises as that."""
    return execute(argv, env, timeout_s, **options).finish()


def wait(fds: Iterable[int], until_s: float) -> set[int]:
    """Return those of `fds` that can be read, at the latest at `until_s` (time.monotonic(); inf: no limit)."""
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    left_s = until_s - time.monotonic()
    return {
        fd for fd, _ in poller.poll(None if math.isinf(left_s) else max(0, int(left_s * 1000) + 1))
    }
