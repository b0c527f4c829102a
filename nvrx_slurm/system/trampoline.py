"""Run by path in a bare interpreter: die with the parent, then become the real command.

    python -I -S trampoline.py PARENT_PID IGNORED_SIGNAL COMMAND [ARG ...]        (IGNORED_SIGNAL: 0 = none)

The parent-death signal has to be set between fork and exec; doing that in a program of its own keeps Python code out
of a forked copy of the agent, which has gRPC's threads. See prctl(2), PR_SET_PDEATHSIG.
"""

import _signal
import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def main() -> None:
    """Set it, make sure that the parent was not gone before, ignore and unblock, exec.

    What is ignored survives exec, until the command sets a handler of its own.

    Exit code 127: no such command, 126: no permission.
    """
    parent, ignored, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
    if ignored:  # first: one that came already is dropped, not delivered
        _signal.signal(ignored, _signal.SIG_IGN)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())  # `signal` would load `enum`, twice the start-up time
    for signum in (_signal.SIGPIPE, _signal.SIGXFSZ):  # ignored by this interpreter; exec would keep that
        _signal.signal(signum, _signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"nvrx-run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


main()
