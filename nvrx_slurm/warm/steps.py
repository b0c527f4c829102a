"""Counts the steps of torch's optimizers in the rank's page, in a process whose script knows nothing of it.

torch calls a hook after each step. It is registered as soon as the script has imported torch's optimizers, so that
nothing is imported earlier, or in another order. Part of a worker's start-up, see `hook.py`; imports only what every
interpreter has loaded.

The same registers Python's handler that prints the stacks of all threads, for `nvrx stacks` and for a look at a hang.

PAGE has eight numbers, see `node.monitors.monitors.RankMonitor.page`: the process that holds the page, its descriptor
and inode, its bytes, the number of its word STEP; descriptor and inode of the file for stacks, and the signal for them.
"""

import os
import sys
from _weakref import ref
from time import monotonic_ns

PAGE = "NVRX_PAGE"
_MODULE = "torch.optim.optimizer"
_WORDS = 6
_READ_WRITE, _SHARED = 3, 1  # of mmap(2)
_HIGHEST_FD = 1000
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
            add_hook(counter(words, os.getpid()))
            words[_SINCE] = monotonic_ns()
            _print_stacks(_open(agent, stacks, its_inode, os.O_WRONLY | os.O_APPEND), signum)
        except Exception:
            return


def counter(words, pid):
    """The hook of process `pid`. Others, which it has forked, do not count.

    Steps are those of the optimizer that made the first one, until it is gone; others only show that the rank lives.
    """
    getpid = os.getpid
    frame_of = sys._getframe
    first = _nothing
    code = None
    steps = last_ns = longest_ns = 0

    def after_step(optimizer, args, kwargs):
        nonlocal first, code, steps, last_ns, longest_ns
        if getpid() != pid:
            return
        now_ns = monotonic_ns()
        words[_STEP] = now_ns
        if last_ns and now_ns - last_ns > longest_ns:
            longest_ns = words[_LONGEST] = now_ns - last_ns
        last_ns = now_ns
        if first() is not optimizer:
            if first() is not None:
                return
            first, code = ref(optimizer), _code_of(type(optimizer).step)
        if (
            frame_of(2).f_code is code
        ):  # a class of the user, whose step calls that of its base: the outer one counts
            return
        steps += 1
        words[_STEPS] = steps
        if steps < 3:
            words[_FIRST + steps - 1] = now_ns

    after_step._torchdynamo_disable = (
        True  # as torch.compiler.disable() does: dynamo calls it and does not trace it
    )
    return after_step


def _code_of(step):
    """The code of the function that the class has defined, without what torch has wrapped around it."""
    while hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return getattr(step, "__code__", None)


def _nothing():
    return None


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
    mmap = ctypes.CDLL(None, use_errno=True).mmap
    mmap.restype = ctypes.c_void_p
    mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    start = mmap(None, size, _READ_WRITE, _SHARED, fd, 0)
    os.close(fd)
    if start == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap")
    return (
        memoryview((ctypes.c_char * size).from_address(start))
        .cast("B")
        .cast("q")[word : word + _WORDS]
    )


def _print_stacks(fd, signum):
    """Print stacks on the signal, unless the script has a handler for it. A client of ours may do the same later.

    The descriptor has a number that no other one gets: the script may close it, and what it opens then is its own.
    """
    high = next(
        number
        for number in range(min(_HIGHEST_FD, os.sysconf("SC_OPEN_MAX") - 1), fd, -1)
        if _is_free(number)
    )
    os.dup2(fd, high, inheritable=False)
    os.close(fd)
    faulthandler = sys.modules["faulthandler"]  # PYTHONFAULTHANDLER has imported it
    if not _is_caught(signum):
        faulthandler.register(signum, file=high, all_threads=True, chain=False)


def _is_free(number):
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _is_caught(signum):
    """Or ignored (proc(5), SigCgt and SigIgn)."""
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
    """Blank variables in /proc/PID/environ: those from `first` on are the last ones, and none is in use any more."""
    with open("/proc/self/stat", "rb") as file:
        start, end = map(int, file.read().rpartition(b")")[2].split()[_ENV_START : _ENV_START + 2])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        place = memory.read(end - start).rfind(b"\0" + first + b"\0") + 1
        if place:
            memory.seek(start + place)
            memory.write(instead.ljust(end - start - place, b"\0"))
