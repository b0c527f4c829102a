"""How the keeper begins: it listens under its name, and becomes an orphan."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from contextlib import suppress

from nvrx_slurm.checkpoint.link import THREAD_NAME

_BACKLOG = 128
_NICE = 10
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # set_mempolicy(2), which libc does not have
_MPOL_DEFAULT = 0


def listen(name: str) -> socket.socket | None:
    """None: another keeper has the name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind("\0" + name)
    except OSError:
        listener.close()
        return None
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def become_its_own(listener: socket.socket) -> None:
    """Nothing of the rank that was first, nor of its launcher, has to do with this process any more."""
    with suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(THREAD_NAME)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # Slurm sends them to each process of a step. A process that ignores them counts as a helper that cleans up.
        signal.signal(signum, lambda *_: None)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        os.nice(_NICE)
    if os.uname().machine in _SET_MEMPOLICY:
        ctypes.CDLL(None).syscall(_SET_MEMPOLICY[os.uname().machine], _MPOL_DEFAULT, None, 0)
    os.chdir("/")
    _leave(listener)


def _leave(listener: socket.socket) -> None:
    """Become an orphan. Init reaps it, or the launcher where that is a subreaper."""
    ready, told = os.pipe()
    if os.fork():
        os.close(told)
        os._exit(0 if os.read(ready, 1) else 1)
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    listener.listen(_BACKLOG)  # for who connects, the process that listened last is the peer
    os.write(told, b"x")
    for fd in (ready, told, null):
        os.close(fd)
