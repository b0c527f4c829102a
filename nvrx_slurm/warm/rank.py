"""A worker, as its journal and the agent see it. Part of `template.py`; standard library only."""

import json
import os
import signal
import socket
import stat
import sys
import time
from contextlib import suppress

from nvrx_exact import Hooks
from nvrx_process import (
    c_environ,
    children,
    decoded,
    descriptors,
    directory,
    libraries,
    show,
)
from nvrx_steps import PAGE, StepFinder

_MEMORY = 1  # major number of /dev/null and its like
_END_S = 60.0  # for the agent to end a worker that asked for it
_TELL_S = 5.0  # for a message to the agent


class Rank(Hooks):
    """A worker, as its journal and the agent see it. `page`: see `steps.py`."""

    def __init__(self, setup, env, hook_dir, mask, page):
        self._setup = setup
        self._env = env
        self._hook_dir = hook_dir
        self._mask = mask
        self._page = page
        self._steps = StepFinder(page)
        self._pid = os.getpid()
        self._cwd = directory()
        self._affinity = os.sched_getaffinity(0)
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._descriptors = descriptors()

    def c_environ(self):
        return c_environ()

    def libraries(self):
        return libraries()

    def sought(self):
        self._steps.register()

    def imported(self, name, changes):
        self._tell(imported=name, changes=decoded(changes))

    def inexact(self, name, why, changes):
        """Begin again as an executed worker. What the script has done until now it does again, so only a process that
        nobody else knows may do that: others wait until the agent starts all ranks again."""
        told = {"module": name, "changes": decoded(changes)}
        why = f"{why} before it imports {name}"
        if os.getpid() == self._pid and not self._is_known():
            self._tell(anew=why, **told)
            self.execute()
        self._tell(restart=why, **told)
        time.sleep(_END_S)
        os._exit(1)

    def _is_known(self):
        """Whether it has connections, devices, children or other threads."""
        opened = map(os.fstat, descriptors() - self._descriptors)
        is_harmless = all(
            stat.S_ISREG(one.st_mode) or os.major(one.st_rdev) == _MEMORY for one in opened
        )
        return bool(children()) or len(sys._current_frames()) > 1 or not is_harmless

    def execute(self):
        """Become the command of the workers, with the hook that tells what the script imports."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.umask(self._umask)
        with suppress(OSError):  # it was removed
            os.chdir(self._cwd)
        os.sched_setaffinity(0, self._affinity)
        path = self._env.get("PYTHONPATH")
        names = ("told", "watched", "rank_names")
        setup = {"anew": True, "python_path": path, **{name: self._setup[name] for name in names}}
        path = f"{self._hook_dir}{os.pathsep}{path}" if path else self._hook_dir
        env = {
            **self._env,
            "PYTHONPATH": path,
            "NVRX_TEMPLATE": json.dumps(setup),
            PAGE: self._page,
        }
        os.execve(sys.executable, sys.orig_argv, env)

    def _tell(self, **message):
        """A socket that is closed at once: a script may close all descriptors that it does not know."""
        data = json.dumps({"pid": self._pid, **message}).encode()
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
                told.settimeout(_TELL_S)
                told.sendto(data, self._setup["told"])
        except OSError:
            return  # the agent has ended, or knows this later


def begin_anew(setup, journal, hook_dir):
    """This process was a forked worker and is an executed one now: what its script imports is told, nothing else."""
    page = os.environ.pop(PAGE)
    show(b"\0".join(name + b"=" + value for name, value in os.environb.items()))
    journal.rank_names.update(map(os.fsencode, setup["rank_names"]))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    rank = Rank(setup, dict(os.environ), hook_dir, mask, page)
    journal.begin_worker(rank, setup["watched"], dict(os.environ._data))
