"""Prints what a worker can find out about itself, as JSON: one fact per key, equal for executed and forked workers."""

import sys

FORKED = "decimal" in getattr(sys.meta_path[0], "parked", ())  # the template imports it

import fcntl  # noqa: E402
import gc  # noqa: E402
import inspect  # noqa: E402
import json  # noqa: E402
import locale  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402

FACTS = {}


def fact(function):
    """The function's name and value are one fact."""
    try:
        FACTS[function.__name__] = function()
    except Exception as error:
        FACTS[function.__name__] = repr(error)


def read(path):
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def status(*names):
    lines = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    return {name: lines[name].strip() for name in names}


def stream(file):
    return [file.name, file.mode, file.encoding, file.errors, file.line_buffering, file.write_through, file.seekable()]


@fact
def command_line():
    return [sys.argv, sys.orig_argv, read("/proc/self/cmdline"), read("/proc/self/comm"), sys.executable]


@fact
def main_module():
    main = sys.modules["__main__"]
    plain = ("__name__", "__file__", "__package__", "__cached__", "__doc__")
    found = {name: repr(getattr(main, name, "none")) for name in plain}
    spec = getattr(main, "__spec__", None)
    return [found, type(main.__loader__).__name__, spec and [spec.name, spec.origin], sorted(vars(main))]


@fact
def search_path():
    finders = [type(one).__name__ + getattr(one, "__name__", "") for one in sys.meta_path]
    finders = [name for name in finders if name != "Journal"]  # the only one that a fork has more
    return [sys.path, finders, len(sys.path_hooks), any("warm" in key for key in sys.path_importer_cache)]


@fact
def interpreter():
    hooks = [sys.excepthook.__name__, sys.displayhook.__name__, sys.gettrace(), sys.getprofile()]
    return [repr(sys.flags), sys.warnoptions, repr(sys._xoptions), hooks, sys.getrecursionlimit(), gc.isenabled()]


@fact
def language():
    found = [locale.setlocale(getattr(locale, name)) for name in ("LC_CTYPE", "LC_COLLATE", "LC_NUMERIC", "LC_TIME")]
    return [found, locale.getpreferredencoding(), sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()]


@fact
def modules():
    names = {name.partition(".")[0] for name in sys.modules}
    return sorted(names & {"sitecustomize", "usercustomize", "beside", "site", "pdb", "unittest"})


@fact
def environment():
    mine = {name: value for name, value in os.environ.items() if name != "NVRX_TEST_AGENT"}
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    child = json.loads(subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, check=True).stdout)
    child.pop("NVRX_TEST_AGENT")
    shown = [entry for entry in read("/proc/self/environ").split("\0") if not entry.startswith("NVRX_TEST_AGENT")]
    return [sorted(mine.items()), sorted(child.items()), sorted(shown)]


@fact
def limits():
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    mask = os.umask(0o22)
    os.umask(mask)
    return [os.getcwd(), mask, {name: resource.getrlimit(getattr(resource, name)) for name in names}]


@fact
def scheduling():
    return [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))]


@fact
def descriptors():
    found = {
        fd: os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")
    }
    flags = [[fcntl.fcntl(fd, which) for which in (fcntl.F_GETFD, fcntl.F_GETFL)] for fd in range(3)]
    ends = {fd: os.path.basename(path).partition(".")[2] or path for fd, path in found.items() if "/proc/" not in path}
    return [ends, flags]


@fact
def streams():
    return [stream(sys.stdin), stream(sys.stdout), stream(sys.stderr), sys.stdout is sys.__stdout__]


@fact
def signals():
    handlers = {one.name: repr(signal.getsignal(one)).partition(" at 0x")[0] for one in signal.Signals}
    return [handlers, status("SigBlk", "SigIgn", "SigCgt", "SigPnd", "ShdPnd")]


@fact
def place_in_the_tree():
    import ctypes

    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
    pid, parent = os.getpid(), str(os.getppid())
    children = read(f"/proc/self/task/{pid}/children")
    return [os.getsid(0) == pid, os.getpgid(0) == pid, parent == os.environ["NVRX_TEST_AGENT"], death.value, children]


@fact
def threads():
    import threading

    main = threading.current_thread()
    threads = len(os.listdir("/proc/self/task"))
    return [threads, main is threading.main_thread(), main.name, main.native_id == os.getpid()]


@fact
def frames():
    depth = [(frame.filename, frame.function) for frame in inspect.stack()]
    return depth[depth.index((__file__, "fact")) :]


@fact
def neighbours():
    """Modules beside the script."""
    import beside

    return beside.__file__


print(json.dumps({"forked": FORKED, "facts": FACTS}))
