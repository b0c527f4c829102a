"""Stack dumps of a rank by Python's faulthandler, also while its main thread holds the interpreter's lock."""

from __future__ import annotations

END_SIGNAL = 16  # SIGSTKFLT: unused by kernel and libraries; its default action ends a process without a core dump
LOOK_SIGNAL = 52  # real-time; 32 and 33 are glibc's, 62 is the Java virtual machine's

_installed = False  # the handler of LOOK_SIGNAL is ours


def install(look_fd: int) -> None:
    """Print the stacks of all threads to stderr and end, on END_SIGNAL; or to `look_fd` and go on, on LOOK_SIGNAL.

    Unless the script has handlers for them. Belongs to the main thread. `look_fd` should not block: it may be full.
    """
    import faulthandler  # not at the top: rank monitors import this module, too
    import signal

    if signal.getsignal(END_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(END_SIGNAL, file=2, all_threads=True, chain=True)
    global _installed
    if signal.getsignal(LOOK_SIGNAL) is signal.SIG_DFL and (_installed or not _is_caught(LOOK_SIGNAL)):
        _installed = True
        faulthandler.register(LOOK_SIGNAL, file=look_fd, all_threads=True, chain=False)


def _is_caught(signum: int) -> bool:
    """Whether this process has a handler, also one of a C library, of which Python does not know (proc(5), SigCgt)."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith(("SigCgt", "SigIgn")))
    except OSError:
        return False
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks.values())
