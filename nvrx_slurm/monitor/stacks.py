"""Stack dumps of a hung rank: Python's faulthandler prints all threads to stderr, then the rank dies of the signal."""

from __future__ import annotations

SIGNAL = 16  # SIGSTKFLT: unused by kernel and libraries; its default action ends a process without a core dump


def install() -> None:
    """Print the stacks on SIGNAL, and end by it, unless the script has a handler for it. Belongs to the main thread."""
    import faulthandler  # not at the top: rank monitors import this module, too
    import signal

    if signal.getsignal(SIGNAL) is signal.SIG_DFL:
        faulthandler.register(SIGNAL, file=2, all_threads=True, chain=True)
