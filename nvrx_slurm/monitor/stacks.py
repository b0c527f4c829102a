"""Stack dumps of a rank by Python's faulthandler, also while its main thread holds the interpreter's lock."""

from __future__ import annotations

END_SIGNAL = 16  # SIGSTKFLT: unused by kernel and libraries; its default action ends a process without a core dump
LOOK_SIGNAL = 62  # SIGRTMAX - 2


def install(look_fd: int) -> None:
    """Print the stacks of all threads to stderr and end, on END_SIGNAL; or to `look_fd` and go on, on LOOK_SIGNAL.

    Unless the script has handlers for them. Belongs to the main thread.
    """
    import faulthandler  # not at the top: rank monitors import this module, too
    import signal

    if signal.getsignal(END_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(END_SIGNAL, file=2, all_threads=True, chain=True)
    if signal.getsignal(LOOK_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(LOOK_SIGNAL, file=look_fd, all_threads=True, chain=False)
