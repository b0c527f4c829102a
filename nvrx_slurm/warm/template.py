"""The program of a template, in a worker's interpreter; `hook.py` runs it. Standard library only.

It imports modules, then forks a standby for each socket that the agent sends. A standby waits for its release. Then it
returns from this file, and Python goes on as after any start: it runs the script. What the template has imported is
hidden from the script until the script imports it, see `journal.py`.

The environment variable NVRX_TEMPLATE is JSON:
    control      descriptor of the socket to the agent
    told         path of the agent's socket for what workers tell
    agent        process id of the agent, the parent of all workers
    modules      what to import, in this order: [MODULE or MODULE:NAME,NAME, CHANGES]; the second form is for what
                 `from MODULE import` takes; CHANGES are variables under which the script imports it, null = not set
    watched      modules of which workers tell that the script imports them
    path0        what Python will put in front of sys.path, or null
    rank_names   variables that only a worker has
    python_path  PYTHONPATH of a worker, or null
    scout        the package by which the script imports torch, or "": modules are imported under what it sets before
    hurry        workers wait for this template
Messages to the agent, one JSON object each: {"unfit": MODULE, "why": TEXT}, {"stale": FILE}, {"fresh": true},
{"ready": SECONDS_OF_IMPORTS, "changes": {...}} with what the scout has set, {"successor": PID}, {"pids": [...]} with 0
for a process that could not be made.
Messages from the agent are JSON, too:
    {"fork": N}       with one descriptor per standby: the socket on which `child.processes.Held` releases it
    {"grow": [...]}   a forked successor imports these modules, too, while this process goes on
    {"check": true}   whether a file of an imported module has changed
    {"end": PID}      the successor takes over: the socket belongs to it when this process has ended
A worker tells, each time with its process id as "pid":
    {"imported": MODULE, "changes": {...}}   the script imports it, after it has changed these variables
    {"anew": TEXT, "module": MODULE, "changes": {...}}     its import would differ from the template's: the worker
                                                           executes its command
    {"restart": TEXT, "module": MODULE, "changes": {...}}  the same, too late for that: it waits for its end
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import time

from nvrx_journal import Unfit
from nvrx_process import (
    Title,
    children,
    descriptors,
    encoded,
    end_with_parent,
    is_bad_fork,
    libraries,
    sent,
    show,
    stamp,
    state,
    threads,
)
from nvrx_rank import Rank, begin_anew
from nvrx_scout import changes_of
from nvrx_steps import PAGE

_MAX_STANDBYS = 253  # SCM_MAX_FD of the kernel
_MESSAGE_BYTES = 1 << 16
# a threshold that imports do not reach: the collector takes a fifth of their time
_NO_COLLECTION = 1 << 30
_USER_SIGNALS = {signal.SIGUSR1, signal.SIGUSR2}
# less than a collection is worth, a tenth of their time
_LITTLE_GARBAGE = {"numpy", "torch", "torch._dynamo"}


class Stale(Exception):
    """A file that the template read has changed."""


class Template:
    """The template until it is a worker. `setup`: see above."""

    def __init__(self, setup, journal, hook_dir):
        self._journal = journal
        self._setup = setup
        self._hook_dir = hook_dir
        self._control = socket.socket(fileno=setup["control"])
        self._agent = setup["agent"]
        self._modules = setup["modules"]
        self._path0 = setup["path0"]
        self._rank_names = set(setup["rank_names"])
        self._hurry = setup["hurry"]
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        for name in self._rank_names & os.environ.keys():  # the agent's environment has some
            del os.environ[name]
        self._env = dict(os.environ)
        journal.rank_names.update(map(os.fsencode, self._rank_names))
        self._title = Title()
        self._title.show(b"nvrx-template")
        self._descriptors = descriptors()
        # of files that people change while a job runs: each standby looks at them
        self._stamps = {}
        self._installed = {}  # the others are stamped by the template when it is asked

    def run(self):
        """Serve the agent. Returns in a worker, with its environment, streams and signals in place."""
        scout = self._setup["scout"]
        changes = changes_of(scout, self._journal) if scout else {}
        self._modules = [(module, {**changes, **own}) for module, own in self._modules]
        self._say(ready=self._import(self._modules, self._hurry), changes=changes)
        standby = self._serve()
        self._be_released(standby)

    def _import(self, modules, hurry):
        """Import them; returns in how many seconds. Where one is unfit, tell that and end.

        Others go first, unless workers wait. Most users may not go back from a lower priority, but from this policy.
        """
        module = ""
        began_s = time.monotonic()
        threshold = gc.get_threshold()
        low = not hurry and os.sched_getscheduler(0) == os.SCHED_OTHER
        try:
            if low:
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            if self._path0 is not None:
                sys.path.insert(0, self._path0)
            gc.set_threshold(_NO_COLLECTION)
            for module, changes in modules:
                name, _, names = module.partition(":")
                before = state()
                self._journal.record(name, names.split(",") if names else (), encoded(changes))
                self._check(name)
                self._journal.park()
                for what, now in state().items():
                    if now != before[what]:
                        raise Unfit(f"it changes {what}")
            if not _LITTLE_GARBAGE.issuperset(name for name, _ in modules):
                gc.collect()
            gc.freeze()
            gc.collect()  # frees what Python keeps for new objects, nothing else
            self._journal.settle([*sys.path], libraries())
            # the collector would write to pages that are shared; it must not run before
            gc.freeze()
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

    def _check(self, module):
        """Raises Unfit for what the import of `module` left behind."""
        if read := self._journal.rank_reads:
            raise Unfit(f"it reads {', '.join(sorted(read))}, which only a worker has")
        for fd in descriptors() - self._descriptors:
            raise Unfit(f"it keeps {os.readlink(f'/proc/self/fd/{fd}')} open")
        if children():
            raise Unfit("it started a process")
        torch = self._journal.module("torch")
        if threads() > 1 or (torch is not None and module.partition(".")[0] != "torch"):
            # A library that is safe to fork ends its threads before a fork (pthread_atfork), as OpenBLAS does.
            pid = os.fork()
            if not pid:
                os._exit(is_bad_fork(torch))
            if os.waitpid(pid, 0)[1]:
                raise Unfit("it asks for GPUs")
            if threads() > 1:
                raise Unfit("it started a thread")

    def _stamp(self):
        """The stamps of all files that were imported. Those that are named, or are not installed, change most often."""
        prefixes = tuple(os.path.join(prefix, "") for prefix in (sys.prefix, sys.base_prefix))
        named = {module.partition(":")[0] for module, _ in self._modules}
        files = {"": sys.executable}
        for name, module in (*sys.modules.items(), *self._journal.modules()):
            files[name] = str(getattr(module, "__dict__", {}).get("__file__"))
        for name, path in files.items():
            stamps = (
                self._stamps if name in named or not path.startswith(prefixes) else self._installed
            )
            if path not in stamps and os.path.isfile(path):  # the stamp of a predecessor is older
                stamps[path] = stamp(path)

    # --- standbys -------------------------------------------------------------------------------------------

    def _serve(self):
        """Do what the agent asks for. Returns in a standby: the socket of its release."""
        while True:
            data, ancillary, _, _ = self._control.recvmsg(
                _MESSAGE_BYTES, socket.CMSG_SPACE(4 * _MAX_STANDBYS)
            )
            sockets = [socket.socket(fileno=fd) for fd in sent(ancillary)]
            message = json.loads(data) if data else {"end": 0}
            if "end" in message:
                os._exit(0)
            if children():  # a successor that was unfit has ended
                os.waitpid(-1, os.WNOHANG)
            try:
                _check_stamps(self._stamps)
                if "check" in message:
                    _check_stamps(self._installed)
            except (Stale, OSError) as error:
                self._say(stale=str(error))
                os._exit(0)
            if "check" in message:
                self._say(fresh=True)
                continue
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
        end_with_parent(signal.SIGKILL)
        if os.getppid() != before:
            os._exit(1)
        self._modules = [*self._modules, *modules]
        self._import(modules, hurry=False)
        predecessor = os.pidfd_open(before)
        end_with_parent(0)
        self._say(successor=os.getpid())
        select.select([predecessor], [], [])
        os.close(predecessor)
        end_with_parent(signal.SIGKILL)
        if os.getppid() != self._agent:
            os._exit(1)

    def _fork(self, sockets):
        """Fork one standby for each socket. A process between us and them ends at once, so the agent becomes their
        parent.

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
        env_fd, *streams = sent(ancillary)
        for fd, target in zip(streams, (1, 2), strict=True):
            os.dup2(fd, target)
            os.close(fd)
        with open(env_fd, "rb") as file:
            text = file.read()
        env = dict(os.fsdecode(line).split("=", 1) for line in text.split(b"\0") if b"=" in line)
        page = env.pop(PAGE, "")
        text = b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items())
        end_with_parent(signal.SIGKILL)
        if os.getppid() != self._agent:
            os._exit(1)
        for signum in signal.sigpending() & _USER_SIGNALS:  # for the workers of an earlier moment
            signal.signal(signum, signal.signal(signum, signal.SIG_IGN))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        rank = Rank(self._setup, env, self._hook_dir, self._mask, page)
        try:
            _check_stamps(self._stamps)
            if {
                name: value for name, value in env.items() if name not in self._rank_names
            } != self._env:
                raise Stale("the environment")
            self._take(env)
            show(text)
            self._renew()
            atexit.register(self._end)  # comes last
        except Exception as error:
            if not isinstance(error, Stale):
                print(f"nvrx-run: this worker is executed, not forked: {error!r}", file=sys.stderr)
            rank.execute()
        self._journal.begin_worker(rank, self._setup["watched"], dict(os.environ._data))

    def _end(self):
        """Libraries look for leaks when Python has ended: what the journal holds, or is frozen, would be some."""
        self._journal.forget_all()
        gc.unfreeze()

    def _take(self, env):
        """Take only the variables of a rank: a module may have set others, which its other imports read."""
        os.environ.update({name: value for name, value in env.items() if name in self._rank_names})

    def _renew(self):
        """Seeds and ids that modules took in the template. `random` does it by itself."""
        if threading := self._journal.module("threading"):
            threading.main_thread()._set_native_id()  # Python before 3.13 keeps the template's
        if numpy_random := self._journal.module("numpy.random"):
            numpy_random.seed()
        if torch := self._journal.module("torch"):
            torch.default_generator.seed()
        if process := self._journal.module("multiprocessing.process"):
            process.current_process().authkey = os.urandom(32)


def _check_stamps(stamps):
    for path, before in stamps.items():
        if stamp(path) != before:
            raise Stale(path)


def main(setup, journal, hook_dir):
    """Be the template, or a worker that was executed anew. Returns in a worker."""
    setup = json.loads(setup)
    del os.environ["PYTHONPATH"]
    if setup["python_path"] is not None:
        os.environ["PYTHONPATH"] = setup["python_path"]
    if "anew" in setup:
        begin_anew(setup, journal, hook_dir)
    else:
        Template(setup, journal, hook_dir).run()
