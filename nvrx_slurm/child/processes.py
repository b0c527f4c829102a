"""Child processes that cannot be mixed up, outlive us, or be missed: sessions, parent-death signals, pidfds, and a
subreaper for their orphans."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, NamedTuple

from nvrx_slurm.child.bounded_process import own, through_trampoline
from nvrx_slurm.child.descendants import (
    children,
    cleans,
    group,
    is_dead,
    kill_tree,
    name,
    nobody,
)
from nvrx_slurm.system.files import write_all

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# rounds of SIGKILL: who loses its parent becomes our child, and is killed in the next round
_MAX_ROUNDS = 16


def own_pids() -> frozenset[int]:
    """Process ids of the children that this process started, here or as bounded work, and has not reaped."""
    return frozenset(own)


class _Adopted(NamedTuple):
    """A child that this process did not start."""

    pid: int

    def wait(self) -> int:
        """Reap it; returns its exit code (negative = signal)."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Child:
    """A started process: leader of its own session and process group, killed by the kernel when we die. Raises OSError
    where there is no descriptor for it; then it is gone.

    `pidfd` is readable once the process has ended. The process is reaped by `reap()` only, so until then its pid and
    process group id belong to it and cannot be recycled.
    """

    def __init__(self, popen: subprocess.Popen[bytes] | _Adopted) -> None:
        self._popen = popen
        self.pid = popen.pid
        try:
            self.pidfd = os.pidfd_open(popen.pid)
        except OSError:  # no descriptor is left
            os.kill(popen.pid, signal.SIGKILL)
            popen.wait()
            raise
        own.add(self.pid)

    def signal_group(self, signum: int) -> None:
        """Send `signum` to the whole process group; harmless when it is gone already."""
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):
            # gone, or only a zombie of another user (setuid) is left
            return

    def kill(self) -> None:
        """SIGKILL to the process alone; `reap` kills the others of its group."""
        with contextlib.suppress(OSError):  # gone, or another user's (setuid)
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int:
        """After `pidfd` became readable: kill what is left of the group, collect the exit code (negative = signal).

        Helpers that clean up are spared: they see by themselves that the process is gone.
        """
        if any(map(cleans, self._members())):
            _kill_children(lambda pid: cleans(pid) or not self._is_member(pid))
        else:
            self.signal_group(signal.SIGKILL)
        code = self._popen.wait()
        os.close(self.pidfd)
        own.discard(self.pid)
        return code

    def _is_member(self, pid: int) -> bool:
        return pid != self.pid and group(pid) == self.pid

    def _members(self) -> Iterator[int]:
        """The other processes of the group, once this one has ended: then its children are ours."""
        todo = children(os.getpid())
        while todo:
            pid = todo.pop()
            if self._is_member(pid):
                yield pid
                todo += children(pid)


class Held:
    """A process that waits to become a command: its interpreter is up, nothing of the command has run.

    After `release` or `kill` the caller reaps `child`.
    """

    def __init__(self, child: Child, control: socket.socket) -> None:
        self.child = child
        self.control = control

    @property
    def waits(self) -> bool:
        """Whether the process is still alive."""
        return not is_dead(self.child.pidfd)

    def release(self, env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]) -> Child:
        """Execute the command with this environment and these streams. Raises OSError if the process is gone."""
        text = "\0".join(f"{name}={value}" for name, value in env.items())
        with (
            self.control,
            open(os.memfd_create("nvrx-env", os.MFD_CLOEXEC), "r+b", buffering=0) as file,
        ):
            write_all(file.fileno(), os.fsencode(text))
            file.seek(0)
            fds = [one.fileno() for one in (file, stdout, stderr)]
            socket.send_fds(self.control, [b"x"], fds, socket.MSG_NOSIGNAL)
        # a process that was stopped while it waited would never begin
        self.child.signal_group(signal.SIGCONT)
        return self.child

    def kill(self) -> None:
        """End the process; it is not waited for."""
        self.control.close()
        self.child.signal_group(signal.SIGKILL)


def hold(
    argv: Sequence[str],
    env: Mapping[str, str],
    ignored: int = 0,
    stdin: int = subprocess.DEVNULL,
) -> Held:
    """Start the interpreter that will become `argv`, see `start`; it waits for `Held.release`.

    It ends by itself when this process ends or closes its end of the control socket. Raises OSError as `start` does.
    """
    null = subprocess.DEVNULL
    return Held(*with_channel(lambda fd: start(argv, env, null, null, ignored, stdin, fd)))


def with_channel(
    start: Callable[[int], Child], kind: int = socket.SOCK_SEQPACKET
) -> tuple[Child, socket.socket]:
    """The process that `start(fd)` makes with one end of a pair of sockets, and the other end. Raises as `start`."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    try:
        with theirs:
            child = start(theirs.fileno())
    except BaseException:
        ours.close()
        raise
    ours.setblocking(False)
    return child, ours


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdout: IO[bytes] | int,
    stderr: IO[bytes] | int,
    ignored: int = 0,
    stdin: IO[bytes] | int = subprocess.DEVNULL,
    control_fd: int = -1,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `argv` (from the main thread: the parent-death signal follows the thread that forked).

    `ignored`: a signal that it shall not die of, unless it sets a handler (0 = none); its own children inherit that.
    `control_fd`: a socket for `child.trampoline`, which waits there for its release (-1 = none). `pass_fds`: further
    descriptors that the command inherits.
    A command that cannot be executed ends with 126 or 127 and a sentence on its stderr. Raises OSError when no
    process can be made at all (limits, memory).
    """
    popen = subprocess.Popen(
        through_trampoline(argv, ignored, control_fd),
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        close_fds=True,
        pass_fds=pass_fds if control_fd < 0 else (*pass_fds, control_fd),
    )
    return Child(popen)


def start_directly(
    argv: Sequence[str], pass_fds: Sequence[int], env: Mapping[str, str] | None = None
) -> Child:
    """Start a program of ours, which ends by itself when this process does. `env`: None = ours. Raises OSError."""
    null = subprocess.DEVNULL
    popen = subprocess.Popen(
        argv, stdin=null, stdout=null, pass_fds=pass_fds, env=env, start_new_session=True
    )
    return Child(popen)


def adopt(pid: int) -> Child:
    """A program of ours that came to this process because its parent, which started it, has ended.

    Raises OSError; ChildProcessError if `pid` is no child of this process.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return Child(_Adopted(pid))


def end_with_parent(signum: int) -> None:
    """Have `signum` sent to this process when the thread that forked it ends; nothing comes if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


class Orphans:
    """Descendants that lost their parent become children of this process and are found, whatever their session.

    All methods belong to the thread that reaps our other children (see `own_pids`). Children that were here before us
    (of a shell that became this program by exec) are left alone. On a kernel without /proc/PID/task/TID/children
    nothing is killed.
    """

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = frozenset(children(os.getpid()))

    def reap(self) -> None:
        """Collect those that have ended, as init did before they came to us; call it on SIGCHLD."""
        kept = own_pids()
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            # a known one is reaped in a moment, and then this is called
            if ended is None or ended.si_pid in kept:
                return
            _collect(ended.si_pid)

    def kill(
        self,
        known: Collection[int] = (),
        but: Collection[bytes] = (),
        spare: Callable[[int], bool] = nobody,
    ) -> int:
        """SIGKILL all orphans and all below them without waiting; returns how many have not ended yet.

        Those in `known`, those with a name of `but` (as ps shows it) and those to `spare` are left alone.
        """

        def is_spared(pid: int) -> bool:
            return pid in self._before or pid in known or name(pid) in but or spare(pid)

        _kill_children(is_spared)
        return sum(not _collect(pid) for pid in children(os.getpid()) if not is_spared(pid))

    def living(self, known: Collection[int], select: Callable[[int], bool]) -> list[int]:
        """The orphans that have not ended, are not in `known`, and are to `select`."""
        found = (
            pid for pid in children(os.getpid()) if pid not in self._before and pid not in known
        )
        return [pid for pid in found if select(pid) and not _collect(pid)]


def _kill_children(is_spared: Callable[[int], bool]) -> None:
    """SIGKILL to our children and all below them but those that are spared, without waiting."""
    seen, me = set[int](), os.getpid()
    for _ in range(_MAX_ROUNDS):
        new = [pid for pid in children(me) if pid not in seen and not is_spared(pid)]
        if not new:
            break
        seen.update(new)
        for pid in new:
            kill_tree(pid, (me,), spare=is_spared)


def _collect(pid: int) -> bool:
    """Reap our child `pid` if it has ended; whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True
