"""Run by path in a bare interpreter: die with the parent, then become the real command.

    python -I -S trampoline.py PARENT_PID IGNORED_SIGNAL CONTROL_FD COMMAND [ARG ...]

IGNORED_SIGNAL 0 means none. With CONTROL_FD >= 0 the process waits there for one message with three file descriptors:
the environment (NAME=VALUE, separated by null bytes), stdout and stderr. It ends if the socket is closed instead.
An empty COMMAND stands for this interpreter: it goes on with the program whose path is the first ARG.

The parent-death signal has to be set between fork and exec; doing that in a program of its own keeps Python code out
of a forked copy of the agent, which has threads. See prctl(2), PR_SET_PDEATHSIG.
"""

import _signal
import _socket
import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9
_FDS = 3
_FD_BYTES = 4


def _wait_for_release(control_fd: int) -> "dict[bytes, bytes]":
    """Returns the environment; stdout and stderr are in place then."""
    with_fds = _socket.CMSG_SPACE(_FDS * _FD_BYTES)
    control = _socket.socket(fileno=control_fd)
    data, ancillary, _, _ = control.recvmsg(1, with_fds)
    if not data or not ancillary:
        os._exit(1)
    control.close()
    sent = memoryview(ancillary[0][2]).cast("i").tolist()
    for fd, target in zip(sent[1:], (1, 2), strict=True):
        os.dup2(fd, target)
    with open(sent[0], "rb", buffering=0) as file:
        text = file.readall()
    for fd in sent[1:]:
        os.close(fd)
    return dict(line.split(b"=", 1) for line in text.split(b"\0") if b"=" in line)


def _drop_user_signals() -> None:
    """A user signal that came while the process waited was for the workers of an earlier moment."""
    for signum in _signal.sigpending() & {_signal.SIGUSR1, _signal.SIGUSR2}:
        _signal.signal(signum, _signal.SIG_IGN)
        _signal.signal(signum, _signal.SIG_DFL)


def main() -> None:
    """Set the parent-death signal, wait for the release if held, ignore and unblock signals, execute the command.

    A signal that is ignored stays ignored after exec, until the command sets a handler of its own.
    Exit code 127: no such command, 126: no permission.
    """
    parent, ignored, control_fd = map(int, sys.argv[1:4])
    command = sys.argv[4:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    env = os.environb if control_fd < 0 else _wait_for_release(control_fd)
    if control_fd >= 0:
        _drop_user_signals()
    if ignored:  # before signals are unblocked: one that is pending is dropped, not delivered
        _signal.signal(ignored, _signal.SIG_IGN)
    # the module `signal` would load `enum`: twice the start-up time
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())
    # this interpreter ignores them; exec would keep that
    for signum in (_signal.SIGPIPE, _signal.SIGXFSZ):
        _signal.signal(signum, _signal.SIG_DFL)
    if not command[0]:
        sys.argv = command[1:]
        directory, name = os.path.split(command[1])
        sys.path.append(directory)
        __import__(name.removesuffix(".py"))
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print(f"nvrx-run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


main()
