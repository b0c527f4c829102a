"""The program of a template, as the `sitecustomize` of a worker's interpreter; see `start.py`. Standard library only.

It imports modules, then forks a standby for each socket that the agent sends. A standby waits for its release. Then it
returns from this file, and Python goes on as after any start: it runs the script.

The environment variable NVRX_TEMPLATE is JSON:
    control      descriptor of the socket to the agent
    agent        process id of the agent, the parent of all workers
    modules      what to import, in this order: MODULE, or MODULE:NAME,NAME for what `from MODULE import` takes
    path0        what Python will put in front of sys.path, or null
    rank_names   variables that only a worker has
    python_path  PYTHONPATH of a worker, or null
    hurry        workers wait for this template
Messages to the agent, one JSON object each: {"unfit": MODULE, "why": TEXT}, {"ready": SECONDS_OF_IMPORTS},
{"pids": [...]} with 0 for a process that could not be made, {"stale": FILE}, {"successor": PID}. Messages from the
agent are JSON, too:
    {"fork": N}       with one descriptor per standby: the socket on which `child.processes.Held` releases it
    {"grow": [...]}   a forked successor imports these modules, too, while this process goes on
    {"end": PID}      the successor takes over: the socket belongs to it when this process has ended
"""

import array
import ctypes
import gc
import json
import os
import select
import signal
import socket
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_MM, _PR_SET_MM_MAP = 1, 35, 14
_NO_FILE = 0xFFFFFFFF  # -1 of 32 bits
_MAX_STANDBYS = 253  # SCM_MAX_FD of the kernel
_MESSAGE_BYTES = 1 << 16
_NO_COLLECTION = 1 << 30  # a threshold that imports do not reach: the collector takes a fifth of their time
_USER_SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}
_LITTLE_GARBAGE = {"numpy", "torch", "torch._dynamo"}  # less than a collection is worth, a tenth of their time
# torch cannot use a device in a process whose parent has asked for it, even if only how many there are.
_BAD_FORKS = ("_cuda_isInBadFork", "_xpu_isInBadFork", "_mtia_isInBadFork")


class Unfit(Exception):
    """Workers must not be forked from this process."""


class Stale(Exception):
    """A file that the template read has changed."""


class Template:
    """The template until it is a worker. `setup`: see above."""

    def __init__(self, setup):
        self._control = socket.socket(fileno=setup["control"])
        self._agent = setup["agent"]
        self._modules = setup["modules"]
        self._path0 = setup["path0"]
        self._rank_names = set(setup["rank_names"])
        self._hurry = setup["hurry"]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for name in self._rank_names & os.environ.keys():  # of the agent's own environment
            del os.environ[name]
        self._env = dict(os.environ)
        self._title = _Title()
        self._title.show(b"nvrx-template")
        self._descriptors = _descriptors()
        self._stamps = {}

    def run(self):
        """Serve the agent. Returns in a worker, with its environment, streams and signals in place."""
        self._say(ready=self._import(self._modules, self._hurry))
        standby = self._serve()
        self._be_released(standby)

    def _import(self, modules, hurry):
        """Import them; returns in how many seconds. Where one is unfit, tell that and end.

        Others go first, unless workers wait. Most users may not go back from a lower priority, but from this policy.
        """
        module, began_s, threshold = "", time.monotonic(), gc.get_threshold()
        low = not hurry and os.sched_getscheduler(0) == os.SCHED_OTHER
        try:
            if low:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            if self._path0 is not None:
                sys.path.insert(0, self._path0)
            gc.set_threshold(_NO_COLLECTION)
            with _Environment() as environment:
                for module in modules:
                    name, _, names = module.partition(":")
                    __import__(name, fromlist=names.split(",") if names else ())
                    self._check(name, environment.read & self._rank_names)
            if not _LITTLE_GARBAGE.issuperset(modules):
                gc.collect()
            gc.freeze()  # the collector would write to pages that are shared; it must not run before
            if gc.get_threshold()[0] == _NO_COLLECTION:  # else a module has chosen another one
                gc.set_threshold(*threshold)
            if self._path0 in sys.path:
                sys.path.remove(self._path0)
            self._stamp()
            if low:
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        except BaseException as error:  # also what a module raises to end the process
            why = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
            self._say(unfit=module, why=why)
            os._exit(0)
        return time.monotonic() - began_s

    def _say(self, **message):
        self._control.send(json.dumps(message).encode())

    # --- what may not be forked -----------------------------------------------------------------------------

    def _check(self, module, read_names):
        """Raises Unfit for what the import of `module` left behind."""
        if read_names:
            raise Unfit(f"it reads {', '.join(sorted(read_names))}, which only a worker has")
        for fd in _descriptors() - self._descriptors:
            raise Unfit(f"it keeps {os.readlink(f'/proc/self/fd/{fd}')} open")
        if _children():
            raise Unfit("it started a process")
        if _threads() > 1 or ("torch" in sys.modules and module.partition(".")[0] != "torch"):
            # A library that is safe to fork ends its threads before a fork (pthread_atfork), as OpenBLAS does.
            pid = os.fork()
            if not pid:
                os._exit(_is_bad_fork())
            if os.waitpid(pid, 0)[1]:
                raise Unfit("it asks for GPUs")
            if _threads() > 1:
                raise Unfit("it started a thread")

    def _stamp(self):
        """Of the named modules and of all that are not installed: people change those while a job runs."""
        installed = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
        files, named = [sys.executable], {module.partition(":")[0] for module in self._modules}
        for name, module in sys.modules.items():
            path = str(getattr(module, "__dict__", {}).get("__file__"))
            if (name in named or not path.startswith(installed)) and os.path.isfile(path):
                files.append(path)
        self._stamps = {**{path: _stamp(path) for path in files}, **self._stamps}  # those of a predecessor are older

    def _check_stamps(self):
        for path, stamp in self._stamps.items():
            if _stamp(path) != stamp:
                raise Stale(path)

    # --- standbys -------------------------------------------------------------------------------------------

    def _serve(self):
        """Do what the agent asks for. Returns in a standby: the socket of its release."""
        while True:
            data, ancillary, _, _ = self._control.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4 * _MAX_STANDBYS))
            sockets = [socket.socket(fileno=fd) for fd in _sent(ancillary)]
            message = json.loads(data) if data else {"end": 0}
            if "end" in message:
                os._exit(0)
            if _children():  # a successor that was unfit has ended
                os.waitpid(-1, os.WNOHANG)
            try:
                self._check_stamps()
            except (Stale, OSError) as error:
                self._say(stale=str(error))
                os._exit(0)
            if "grow" in message:
                self._grow(message["grow"])
                continue
            standby = self._fork(sockets)
            if standby is not None:
                return standby
            for one in sockets:
                one.close()

    def _grow(self, modules):
        """Import more in a copy of this process: what is unfit there leaves no trace here. Returns in both."""
        before = os.getpid()
        if os.fork():
            return
        os.setsid()
        _end_with_parent(signal.SIGKILL)
        if os.getppid() != before:
            os._exit(1)
        self._modules = [*self._modules, *modules]
        self._import(modules, hurry=False)
        predecessor = os.pidfd_open(before)
        _end_with_parent(0)
        self._say(successor=os.getpid())
        select.select([predecessor], [], [])
        os.close(predecessor)
        _end_with_parent(signal.SIGKILL)
        if os.getppid() != self._agent:
            os._exit(1)

    def _fork(self, sockets):
        """One standby for each socket. A process between us and them ends at once, so the agent becomes their parent.

        Two such processes fork more than two standbys: a fork copies tables of some hundred MB, which takes a core.
        Returns None here and the own socket in a standby.
        """
        reading, writing = os.pipe()
        between = os.fork()
        if between:
            os.close(writing)
            with open(reading, "rb") as lines:
                pids = dict(map(int, line.split()) for line in lines)
            os.waitpid(between, 0)
            self._say(pids=[pids.get(number, 0) for number in range(len(sockets))])
            return None
        os.close(reading)
        other = os.fork() if len(sockets) > 2 else -1
        for number in range(other == 0, len(sockets), 1 if other < 0 else 2):
            pid = os.fork()
            if not pid:
                os.setsid()
                self._title.show(b"nvrx-standby")
                os.close(writing)
                self._control.close()
                mine = sockets.pop(number)
                for one in sockets:
                    one.close()
                return mine
            os.write(writing, b"%d %d\n" % (number, pid))
        if other > 0:
            os.waitpid(other, 0)
        os._exit(0)

    # --- a worker -------------------------------------------------------------------------------------------

    def _be_released(self, standby):
        """Wait for the release, then be as a process that was executed just now."""
        message, ancillary, _, _ = standby.recvmsg(1, socket.CMSG_SPACE(3 * 4))
        if not message:
            os._exit(0)
        standby.close()
        self._title.restore()
        env_fd, *streams = _sent(ancillary)
        for fd, target in zip(streams, (1, 2), strict=True):
            os.dup2(fd, target)
            os.close(fd)
        with open(env_fd, "rb") as file:
            text = file.read()
        env = dict(os.fsdecode(line).split("=", 1) for line in text.split(b"\0") if b"=" in line)
        _end_with_parent(signal.SIGKILL)
        if os.getppid() != self._agent:
            os._exit(1)
        for signum in signal.sigpending() & _USER_SIGNALS:  # for the workers of an earlier moment
            signal.signal(signum, signal.signal(signum, signal.SIG_IGN))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        try:
            self._check_stamps()
            if {name: value for name, value in env.items() if name not in self._rank_names} != self._env:
                raise Stale("the environment")
            self._take(env)
            _show(text)
            _renew()
        except Exception as error:
            if not isinstance(error, Stale):
                print(f"nvrx-run: this worker is executed, not forked: {error!r}", file=sys.stderr)
            os.execve(sys.executable, sys.orig_argv, env)

    def _take(self, env):
        """Only the variables of a rank: a module may have set others, which its other imports read."""
        for name in self._rank_names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in env.items() if name in self._rank_names})


class _Title:
    """What ps and pgrep show. The command line of a worker would make people take this process for a rank."""

    def __init__(self):
        first, last = map(int, _stat()[48:50])  # where the kernel reads /proc/PID/cmdline
        self._command, self._place = ctypes.string_at(first, last - first), first
        with open("/proc/self/comm", "rb") as comm:
            self._name = comm.read().rstrip(b"\n")

    def show(self, title):
        self._set(title[: len(self._command) - 1].ljust(len(self._command), b"\0"), title)

    def restore(self):
        self._set(self._command, self._name)

    def _set(self, command, name):
        ctypes.memmove(self._place, command, len(command))
        with open("/proc/self/comm", "wb") as comm:
            comm.write(name)


class _Environment:
    """Notes which variables are read from os.environ. Refuses to execute another program, which would be the script."""

    def __enter__(self):
        self.read = read = set()
        self._real = os._Environ.__getitem__, os.execv, os.execve
        getitem = os._Environ.__getitem__

        def note(environ, name):
            read.add(name)
            return getitem(environ, name)

        def refuse(*args):
            raise Unfit("it executes another program")

        os._Environ.__getitem__, os.execv, os.execve = note, refuse, refuse
        return self

    def __exit__(self, *exc):
        os._Environ.__getitem__, os.execv, os.execve = self._real


def _end_with_parent(signum):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def _is_bad_fork():
    """In a fork: whether torch refuses to use a device here."""
    known = getattr(sys.modules.get("torch"), "_C", None)
    return any(getattr(known, name, bool)() for name in _BAD_FORKS)


def _descriptors():
    fds = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        return {int(name) for name in os.listdir(fds)} - {fds}
    finally:
        os.close(fds)


def _children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def _threads():
    return len(os.listdir("/proc/self/task"))


def _stamp(path):
    status = os.stat(path)
    return status.st_mtime_ns, status.st_size, status.st_ino


def _sent(ancillary):
    """The descriptors in a message."""
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    return list(fds)


def _stat():
    """The fields of /proc/self/stat by their numbers in proc(5); 0 for the first ones."""
    with open("/proc/self/stat", "rb") as file:
        return [0, 0, 0, 0, *file.read().rpartition(b")")[2].split()[1:]]


def _show(text):
    """Make `text` (NAME=VALUE, separated by null bytes) what /proc/PID/environ shows: monitors find processes by it.

    See prctl(2), PR_SET_MM_MAP. It sets all places at once, so the others get what they have. A kernel may refuse it.
    """
    kept = ctypes.create_string_buffer(text)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # never freed: the kernel reads it until this process ends
    field = list(map(int, _stat()))
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    start = ctypes.addressof(kept)
    places = [*field[26:28], *field[45:48], libc.sbrk(0), field[28], *field[48:50], start, start + len(kept)]
    area = (ctypes.c_uint64 * 13)(*places, 0, _NO_FILE << 32)  # struct prctl_mm_map; no new auxv, no new executable
    libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, area, ctypes.c_ulong(ctypes.sizeof(area)), 0)


def _renew():
    """Seeds and ids that modules took in the template. `random` does it by itself."""
    if "threading" in sys.modules:
        sys.modules["threading"].main_thread()._set_native_id()  # Python before 3.13 keeps the template's
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].current_process().authkey = os.urandom(32)


def main():
    """Be the template. Returns in a worker."""
    hook_dir = os.path.dirname(__file__)
    sys.path.remove(hook_dir)
    sys.path_importer_cache.pop(hook_dir, None)
    setup = os.environ.pop("NVRX_TEMPLATE")
    if setup == "trial":  # see start.py
        sys._nvrx_before = [*sys.path], {**os.environ}
        return
    setup = json.loads(setup)
    del os.environ["PYTHONPATH"]
    if setup["python_path"] is not None:
        os.environ["PYTHONPATH"] = setup["python_path"]
    Template(setup).run()


try:
    main()
except BaseException:  # else Python would say so, go on, and run the script
    os._exit(1)
del sys.modules["sitecustomize"]
import sitecustomize  # noqa: E402, F401  the user's own; where there is none, `site` expects this ImportError
