"""What a process is for the kernel and for C code: title, environment, libraries, descriptors, parent.

Part of `template.py`; standard library only.
"""

import _locale
import _signal
import _socket
import array
import builtins
import ctypes
import itertools
import os
import sys
import time

# one for all: it makes a class, which writes to many pages that a worker shares
_LIBC = ctypes.CDLL(None)
_LIBC.sbrk.restype = ctypes.c_void_p
_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_NO_FILE = 0xFFFFFFFF  # -1 of 32 bits
# torch cannot use a device in a process whose parent has asked for it, even if only how many there are.
_BAD_FORKS = ("_cuda_isInBadFork", "_xpu_isInBadFork", "_mtia_isInBadFork")


class Title:
    """What ps and pgrep show. The command line of a worker would make people take this process for a rank."""

    def __init__(self):
        first, last = map(int, _stat()[48:50])  # where the kernel reads /proc/PID/cmdline
        self._command = ctypes.string_at(first, last - first)
        self._place = first
        with open("/proc/self/comm", "rb") as comm:
            self._name = comm.read().rstrip(b"\n")

    def show(self, title):
        """Show this one (bytes), cut to the length of the command line."""
        self._set(title[: len(self._command) - 1].ljust(len(self._command), b"\0"), title)

    def restore(self):
        """Show the command line again."""
        self._set(self._command, self._name)

    def _set(self, command, name):
        ctypes.memmove(self._place, command, len(command))
        with open("/proc/self/comm", "wb") as comm:
            comm.write(name)


def end_with_parent(signum):
    """Have `signum` sent when the parent of this process ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def is_bad_fork(torch):
    """Whether torch refuses to use a device here, because this is a fork."""
    known = getattr(torch, "_C", None)
    return any(getattr(known, name, bool)() for name in _BAD_FORKS)


def descriptors():
    """The numbers of all open descriptors."""
    with os.scandir("/proc/self/fd") as entries:
        numbers = [int(entry.name) for entry in entries]
    return {number for number in numbers if _is_open(number)}  # without that of the directory


def _is_open(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def children():
    """Process ids of the children."""
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def threads():
    """How many threads there are."""
    return len(os.listdir("/proc/self/task"))


def state():
    """What an import may change in the process, and a journal does not take back. By what people call it."""
    mask = os.umask(0)
    os.umask(mask)
    limits = (
        sys.getrecursionlimit(),
        sys.getswitchinterval(),
        sys.getdlopenflags(),
        sys.gettrace(),
        sys.getprofile(),
    )
    return {
        "how signals are handled": [_signal.getsignal(number) for number in range(1, _signal.NSIG)],
        "the working directory": directory(),
        "the umask": mask,
        "the locale": _locale.setlocale(_locale.LC_ALL),
        "limits of the interpreter": limits,
        "its streams": [sys.stdin, sys.stdout, sys.stderr],
        "builtins": dict(vars(builtins)),
        "the default timeout of sockets": _socket.getdefaulttimeout(),
        "the time zone": time.tzname,
        "the scheduler": [os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)],
    }


def directory():
    """The working directory; "." where it was removed, which keeps no program from running there."""
    try:
        return os.getcwd()
    except OSError:
        return "."


def stamp(path):
    """What changes when a file does."""
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def sent(ancillary):
    """The descriptors in a message."""
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    return list(fds)


def _stat():
    """The fields of /proc/self/stat by their numbers in proc(5); 0 for the first ones."""
    with open("/proc/self/stat", "rb") as file:
        return [0, 0, 0, 0, *file.read().rpartition(b")")[2].split()[1:]]


def show(text):
    """Make `text` (NAME=VALUE, separated by null bytes) what /proc/PID/environ shows: monitors find processes by it.

    See prctl(2), PR_SET_MM_MAP. It sets all places at once, so the others get what they have. A kernel may refuse it.
    """
    kept = ctypes.create_string_buffer(text)
    # never freed: the kernel reads it until this process ends
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    field = list(map(int, _stat()))
    start = ctypes.addressof(kept)
    places = [
        *field[26:28],
        *field[45:48],
        _LIBC.sbrk(0),
        field[28],
        *field[48:50],
        start,
        start + len(kept),
    ]
    # struct prctl_mm_map; no new auxv, no new executable
    area = (ctypes.c_uint64 * 13)(*places, 0, _NO_FILE << 32)
    _LIBC.prctl(_PR_SET_MM, _PR_SET_MM_MAP, area, ctypes.c_ulong(ctypes.sizeof(area)), 0)


def c_environ():
    """All variables as getenv(3) reads them."""
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(_LIBC, "environ")
    found = {}
    for number in itertools.count():
        if environ[number] is None:
            return found
        name, _, value = environ[number].partition(b"=")
        found[name] = value


def libraries():
    """The paths of all shared libraries that are loaded."""
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line}


def encoded(changes):
    """Variables as the kernel has them; None: not set."""
    return {
        os.fsencode(name): None if value is None else os.fsencode(value)
        for name, value in changes.items()
    }


def decoded(changes):
    """Variables as JSON has them."""
    return {
        os.fsdecode(name): None if value is None else os.fsdecode(value)
        for name, value in changes.items()
    }
