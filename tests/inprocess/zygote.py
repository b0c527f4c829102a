"""A process that has imported torch once and forks ranks from then on: the import costs a second, a fork milliseconds.

Run by the harness with the number of a file descriptor, a Unix socket, and modules to import. Each request is one
message: JSON, with the rank's event pipe and its stderr as file descriptors. Answers are JSON lines: {"pid"} for each
request, {"ended", "code"} for each child that has ended, the ranks' orphans too.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_MAX_REQUEST = 1 << 16
_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "NVRX_", "FT_", "SLURM_")


def _rank(request: dict[str, Any], events: int, err: int) -> None:
    """Never returns: it ends the process, or raises SystemExit to have the interpreter finalized."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no rank outlives the tests
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(err, 1)
        os.dup2(err, 2)
        for name in list(os.environ):
            if name.startswith(_OF_A_JOB):
                del os.environ[name]
        os.environ.update(request["env"])
        importlib.import_module("scenarios_calls").run(request["scenario"], events, request["arguments"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not request["arguments"].get("finalizes"):
            os._exit(code)
    sys.exit(code)  # through the interpreter's own end


def _tell(control: socket.socket, **what: Any) -> None:
    control.sendall(json.dumps(what).encode() + b"\n")


def _reap(control: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(control, ended=pid, code=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Serve until the harness closes its end."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    for name in sys.argv[2:]:
        importlib.import_module(name)

    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    _tell(control, ready=os.getpid())
    while True:
        ready = select.select([control, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(control)
        if control in ready:
            try:
                data, fds, *_ = socket.recv_fds(control, _MAX_REQUEST, 2)
            except ConnectionResetError:
                return
            if not data:
                return
            pid = os.fork()
            if pid == 0:
                control.close()
                _rank(json.loads(data), *fds)
            for fd in fds:
                os.close(fd)
            _tell(control, pid=pid)


if __name__ == "__main__":
    main()
