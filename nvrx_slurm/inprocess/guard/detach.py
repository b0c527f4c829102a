"""Detaches a forked process from its parent: they share only memory that neither writes to."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import resource
import signal
from collections.abc import Collection

from nvrx_slurm.inprocess.log import LOGGER_NAME

_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)
_PR_SET_NAME = 15
_EVENTS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]")
_FORMAT = "%(asctime)s [%(levelname)s] %(filename)s:%(lineno)d %(message)s"


def detach(kept: Collection[int]) -> None:
    """Own session, signals, standard streams and limits; all file descriptors but `kept` are disconnected."""
    with contextlib.suppress(OSError):
        os.setsid()
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for signum in signal.valid_signals():
        with contextlib.suppress(OSError, ValueError):
            signal.signal(signum, signal.SIG_IGN if signum in _IGNORED else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _disconnect_all_but(kept)
    _unmap_devices()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"nvrx-monitor", 0, 0, 0)
    with contextlib.suppress(OSError, ValueError):  # on rank 0 it holds the connections of all ranks
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.freeze()


def _disconnect_all_but(kept: Collection[int]) -> None:
    """The other numbers refer to /dev/null.

    Numbers that were free could be used for a connection to the store, and a log handler of the user would write to it.
    Event loops stay: gRPC starts its threads anew in a forked child, and they abort the process without their eventfd.
    """
    names = os.listdir("/proc/self/fd")
    with open(os.devnull, "r+b", buffering=0) as null:
        for fd in {0, 1, 2, *map(int, names)} - {*kept, null.fileno()}:
            with contextlib.suppress(FileNotFoundError):  # a standard stream that is closed, or the list's own number
                if os.readlink(f"/proc/self/fd/{fd}") in _EVENTS:
                    continue
            os.dup2(null.fileno(), fd)


def _unmap_devices() -> None:
    """A mapping of a GPU's device file keeps the GPU busy after its process is gone."""
    with open("/proc/self/maps", "rb") as maps:
        devices = [line.split()[0] for line in maps if b" /dev/nvidia" in line]  # read in one go
    libc = ctypes.CDLL(None)
    for span in devices:
        start, end = (int(part, 16) for part in span.split(b"-"))
        libc.munmap(ctypes.c_void_p(start), ctypes.c_size_t(end - start))


def log_to(path: str | None) -> None:
    """The wrapper's logger appends to this file and writes to no other; None: to none."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers = [logging.FileHandler(path) if path else logging.NullHandler()]
    logger.handlers[0].setFormatter(logging.Formatter(_FORMAT))
    logger.propagate = False
    if path and logger.getEffectiveLevel() > logging.INFO:  # setLevel goes through all loggers, too
        logger.setLevel(logging.INFO)
