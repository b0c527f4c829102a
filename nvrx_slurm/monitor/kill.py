"""The monitor's hands: signals that hit exactly the worker it was given, or that worker's process group.

`pidfd` names the process, also after its death and after its number was given away; `pid` is its number, and, the
worker being a session leader, the number of its process group.
"""

from __future__ import annotations

import os
import resource
import select
import signal

_PIDFD_SIGNAL_PROCESS_GROUP = 4  # Linux 6.9


def is_dead(pidfd: int) -> bool:
    """Whether the process has ended (reaped or not)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def send(pidfd: int, signum: int) -> None:
    """Send a signal to the process; nothing happens if it is gone or not ours to signal."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        pass


def kill_group(pidfd: int, pid: int) -> None:
    """SIGKILL the process and its whole group, the ones that outlived it included."""
    send(pidfd, signal.SIGKILL)  # first and separately: whatever happens to the group, the worker dies
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL, None, _PIDFD_SIGNAL_PROCESS_GROUP)
    except ProcessLookupError:
        pass  # the group is empty
    except OSError:
        _kill_group_by_number(pidfd, pid)


def _kill_group_by_number(pidfd: int, pid: int) -> None:
    """For Linux before 6.9. The group's number is not given away while the worker is unreaped or a member lives."""
    if not _is_reaped(pidfd) or not _exists(pid):
        try:
            os.killpg(pid, signal.SIGKILL)
        except OSError:
            pass


def _is_reaped(pidfd: int) -> bool:
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def open_member(pid: int, session: int) -> int | None:
    """A pidfd of process `pid` if it is a member of the session and not its leader; `pid` may be any number at all."""
    if not 0 < pid < 2**31 or pid == session:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        if os.getsid(pid) == session:
            return pidfd
    except OSError:
        pass
    os.close(pidfd)
    return None


def prints_stacks(pidfd: int, pid: int) -> bool:
    """Whether the process has a handler for SIGABRT (the agent has Python's faulthandler installed in workers)."""
    try:
        with open(f"/proc/{pid}/status", "rb") as status:
            text = status.read()
        caught = int(text.split(b"SigCgt:")[1].split(None, 1)[0], 16)
    except (OSError, IndexError, ValueError):
        return False
    # Alive after the reading: what was read was its status and not that of a successor with the same number.
    return bool(caught & 1 << (signal.SIGABRT - 1)) and not is_dead(pidfd)


def ask_for_stacks(pidfd: int, pid: int) -> None:
    """SIGABRT, also to a stopped process; faulthandler prints all threads to stderr and the process dies of it.

    No core is dumped on the way: dumping tens of GB would hold up the restart. A soft limit of 1 byte is the kernel's
    special value that also keeps a core_pattern program from being run.
    """
    try:
        _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
        resource.prlimit(pid, resource.RLIMIT_CORE, (1 if hard != 0 else 0, hard))
    except (OSError, ValueError):
        pass
    send(pidfd, signal.SIGABRT)
    send(pidfd, signal.SIGCONT)
