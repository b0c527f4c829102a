"""Counts the steps of torch's optimizers in the rank's page, in a process whose script knows nothing of it.

torch calls a hook after each step. It is registered as soon as the script has imported torch's optimizers, so that
nothing is imported earlier, or in another order. Part of a worker's start-up, see `hook.py`; imports only what every
interpreter has loaded.

The same registers Python's handler that prints the stacks of all threads, for `nvrx stacks` and for a look at a hang,
and lets the rank wait for rank 0's store (`store_wait.py`).

PAGE has eight numbers, see `node.monitors.monitors.RankMonitor.page`: the process that holds the page, its descriptor
and inode, its bytes, the number of its word STEP; descriptor and inode of the file for stacks, and the signal for them.
"""

import os
import sys
from _weakref import ref
from time import monotonic_ns

from nvrx_store_wait import wait_for_store_first

PAGE = "NVRX_PAGE"
_MODULE = "torch.optim.optimizer"
_WORDS = 6
_READ_WRITE, _SHARED = 3, 1  # of mmap(2)
_nothing = type(None)  # called, it is None
_HIGH_FD, _DUPFD_CLOEXEC = 1000, 1030  # see fcntl(2)
_ENV_START = 47  # in /proc/self/stat, after the name
_STEP, _STEPS, _FIRST, _LONGEST, _SINCE = 0, 1, 2, 4, 5


class StepFinder:
    """Registers the hook when the script has imported torch's optimizers. As a finder of imports, it finds no module.

    `page`: see above; "" = there is none.
    """

    def __init__(self, page):
        self._page = page

    def find_spec(self, name, path=None, target=None):
        self.register()
        return None

    def register(self):
        """Register the hook, if the optimizers are there. Raises nothing: without it, steps are not known."""
        add_hook = getattr(sys.modules.get(_MODULE), "register_optimizer_step_post_hook", None)
        if add_hook is None or not self._page:
            return
        agent, page, inode, size, word, stacks, its_inode, signum = map(int, self._page.split())
        self._page = ""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            words = _words(_open(agent, page, inode, os.O_RDWR), size, word)
            wait_for_store_first()
            add_hook(counter(words, os.getpid()))
            words[_SINCE] = monotonic_ns()
            _print_stacks(_open(agent, stacks, its_inode, os.O_WRONLY | os.O_APPEND), signum)
        except Exception:
            return


def counter(words, pid):
    """The hook of process `pid`. Others, which it has forked, do not count.

    Steps are those of the optimizer that made the first one, until it is gone; others only show that the rank lives.
    DeepSpeed has its step once for each group of parameters: the group that was first counts.
    """
    getpid, frame_of = os.getpid, sys._getframe
    first, head, code = _nothing, _nothing, None
    steps = last_ns = longest_ns = 0

    def after_step(optimizer, args, kwargs):
        nonlocal first, head, code, steps, last_ns, longest_ns
        if getpid() != pid:
            return
        now_ns = monotonic_ns()
        words[_STEP] = now_ns
        if last_ns and now_ns - last_ns > longest_ns:
            longest_ns = words[_LONGEST] = now_ns - last_ns
        last_ns = now_ns
        try:
            if first() is not optimizer:
                if first() is not None:
                    return
                first, head, code = ref(optimizer), _nothing, None
                # torch has put its hooks around it
                code = sys.modules["inspect"].unwrap(type(optimizer).step).__code__
            # a class of the user, whose step calls that of its base: the outer one counts
            if frame_of(2).f_code is code:
                return
            params = optimizer.param_groups[0]["params"]
            if head() is not (params[0] if params else None):
                if head() is not None:
                    return
                head = ref(params[0])
        except Exception:  # a class of the user is not as those of torch: all of its steps count
            head = _nothing
        steps += 1
        words[_STEPS] = steps
        if steps < 3:
            words[_FIRST + steps - 1] = now_ns

    # as torch.compiler.disable() does: dynamo calls it and does not trace it
    after_step._torchdynamo_disable = True
    return after_step


def _open(agent, number, inode, flags):
    """What this process has open under this number."""
    fd = os.open(f"/proc/{agent}/fd/{number}", flags | os.O_CLOEXEC)
    if os.fstat(fd).st_ino != inode:
        os.close(fd)
        raise OSError("it belonged to an earlier life")
    return fd


def _words(fd, size, word):
    """The words, without an open descriptor: scripts close those that they do not know, or count them."""
    ctypes = sys.modules["ctypes"]  # torch has imported it
    mmap = ctypes.CDLL(None).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    start = mmap(None, size, _READ_WRITE, _SHARED, fd, 0)
    os.close(fd)
    if start == ctypes.c_void_p(-1).value:
        raise OSError("mmap")
    return memoryview((ctypes.c_int64 * _WORDS).from_address(start + 8 * word)).cast("B").cast("q")


def _print_stacks(fd, signum):
    """On the signal, unless the script has a handler for it. A client of ours may do the same later.

    The descriptor has a number that no other one gets: the script may close it, and what it opens then is its own.
    """
    libc = sys.modules["ctypes"].CDLL(None)
    high = libc.fcntl(fd, _DUPFD_CLOEXEC, min(_HIGH_FD, os.sysconf("SC_OPEN_MAX")) - 1)
    os.close(fd)
    faulthandler = sys.modules["faulthandler"]  # PYTHONFAULTHANDLER has imported it
    if not _is_caught(signum):
        faulthandler.register(signum, file=high, all_threads=True, chain=False)


def _is_caught(signum):
    """Or ignored (proc(5))."""
    with open("/proc/self/status") as file:
        masks = [line.split()[1] for line in file if line.startswith(("SigCgt", "SigIgn"))]
    return any(int(mask, 16) >> (signum - 1) & 1 for mask in masks)


# --- an executed worker -----------------------------------------------------------------------------------------


def begin(hook_dir, path):
    """Be as a process without the hook. `path`: PYTHONPATH without it, None = not set."""
    page = os.environ.pop(PAGE)
    before = os.environb.pop(b"PYTHONPATH")
    if path is not None:
        os.environ["PYTHONPATH"] = path
    sys.path.remove(hook_dir)
    sys.path_importer_cache.pop(hook_dir, None)
    sys.meta_path.insert(0, StepFinder(page))
    _forget(b"PYTHONPATH=" + before, b"" if path is None else b"PYTHONPATH=" + os.fsencode(path))


def _forget(first, instead):
    """In /proc/PID/environ: the variables from `first` on are the last ones, and none is in use any more."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[_ENV_START : _ENV_START + 2])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        place = memory.read(end - start).rfind(b"\0" + first + b"\0") + 1
        if place:
            memory.seek(start + place)
            memory.write(instead.ljust(end - start - place, b"\0"))
