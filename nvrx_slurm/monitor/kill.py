"""Signals that reach exactly one worker, its process group, or all of its descendants.

`pidfd` names the process, even after its death and the reuse of its number. `pid` is its number and, since workers are
session leaders, the number of its process group.
"""

from __future__ import annotations

import os
import resource
import signal

from nvrx_slurm.child import descendants
from nvrx_slurm.child.descendants import is_dead

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

# Signals on which a rank prints its stacks (`monitor.inspected`)
# and ends. SIGSTKFLT: unused by kernel and libraries; its default action ends a process without a core
END_SIGNAL = 16
# and goes on. Real-time; 32 and 33 are glibc's, 62 is the Java virtual machine's
INSPECT_SIGNAL = 52


def send(pidfd: int, signum: int) -> None:
    """Send a signal to the process; nothing happens if it is gone or not ours to signal."""
    try:
        signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        pass


def kill_rank(pidfd: int, pid: int, mark: bytes, parents: Collection[int]) -> bool:
    """SIGKILL the worker, its group and all of its descendants, in whatever session. Does not wait.

    A descendant that lost its parent is a child of one of `parents`: the agent, or what took the children of the dead
    agent. Such a one is told by `mark`, an entry of its environment. Returns whether a process lived: it may have
    forked another one in between, so callers look again until none is left.
    """
    found = descendants.below(pid, pidfd)
    lived = bool(found) or not is_dead(pidfd)
    kill_group(pidfd, pid)
    descendants.kill_all(found)
    return descendants.kill_marked(parents, mark) or lived


def kill_group(pidfd: int, pid: int) -> None:
    """SIGKILL the process and its group, including processes that outlived it.

    The group's number is not reused while the worker is unreaped or a member lives.
    """
    # separately, so that the worker dies even if signalling the group fails
    send(pidfd, signal.SIGKILL)
    try:
        signal.pidfd_send_signal(pidfd, 0)
    except ProcessLookupError:
        if os.path.exists(f"/proc/{pid}"):
            return  # a new process has the number, so the group is gone
    except OSError:
        pass
    try:
        os.killpg(pid, signal.SIGKILL)
    except OSError:
        pass


def open_member(pid: int, session: int) -> int | None:
    """A pidfd of process `pid` if it is a member of the session and not its leader, else None. Accepts any number."""
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


def handles(pidfd: int, pid: int, signum: int) -> bool:
    """Whether the process has a handler for the signal."""
    caught = descendants.signals(pid, b"SigCgt")
    # The status of a dead process may have been that of a successor with the same number.
    return bool(caught & 1 << (signum - 1)) and not is_dead(pidfd)


def stacks_signal(pidfd: int, pid: int) -> int:
    """The signal on which the process prints its Python stacks and ends; 0: it has no handler for either.

    That is END_SIGNAL after init_workload_monitoring(), else SIGABRT (the agent sets PYTHONFAULTHANDLER).
    """
    return next(
        (signum for signum in (END_SIGNAL, signal.SIGABRT) if handles(pidfd, pid, signum)), 0
    )


def ask_for_stacks(pidfd: int, pid: int) -> None:
    """Have the process print its stacks and die of the signal, also if it is stopped.

    SIGABRT must not dump a core of tens of GB: that would delay the restart. A soft limit of 1 byte is the kernel's
    special value that also keeps a core_pattern program from running.
    """
    signum = stacks_signal(pidfd, pid)
    if signum == signal.SIGABRT:
        try:
            _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
            resource.prlimit(pid, resource.RLIMIT_CORE, (1 if hard != 0 else 0, hard))
        except (OSError, ValueError):
            pass
    send(pidfd, signum)
    send(pidfd, signal.SIGCONT)
