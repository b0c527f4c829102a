"""Signals as data, with their sender: signalfd(2) through libc, because Python's handlers do not tell the sender."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections.abc import Iterable
from dataclasses import dataclass

_SFD_CLOEXEC = 0x80000
_SFD_NONBLOCK = 0x800
_INFO_BYTES = 128  # struct signalfd_siginfo
_INFO = struct.Struct(f"I4xiI{_INFO_BYTES - 16}x")  # ssi_signo, ssi_code and ssi_pid
_SIGSET_BYTES = 128
BY_KERNEL = 0x80  # SI_KERNEL: no process sent it, as of Ctrl-C at a terminal


@dataclass(frozen=True)
class Received:
    """One signal; `code` is si_code of sigaction(2). `pid` is the sender's, 0 = outside this PID namespace."""

    signum: int
    code: int
    pid: int


class SignalReader:
    """Blocks `signums` in this thread (and those it starts later) and makes them readable on `fd`.

    Children inherit the blocked mask; `child.trampoline` clears it. Make it before threads and children exist.
    """

    def __init__(self, signums: Iterable[int]) -> None:
        wanted = set(signums)
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        mask = sum(1 << (signum - 1) for signum in wanted).to_bytes(_SIGSET_BYTES, "little")
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = libc.signalfd(-1, mask, _SFD_CLOEXEC | _SFD_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def read(self) -> list[Received]:
        """The signals that have come; empty when there are none."""
        try:
            return [
                Received(*info) for info in _INFO.iter_unpack(os.read(self.fd, _INFO_BYTES * 16))
            ]
        except BlockingIOError:
            return []
