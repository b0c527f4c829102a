"""Ranks of a job on this machine, and what they tell: what the tests of the wrapper share.

Run as a program, this is the zygote: it has imported torch once and forks ranks from then on, since the import costs a
second and a fork milliseconds.
"""

import contextlib
import ctypes
import importlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from waits import WAIT_S

from nvrx_slurm.child import descendants

HERE = Path(__file__).parent
# First lines of a child process that needs single modules of nvrx_slurm.inprocess: the package itself imports torch,
# which takes seconds, the plug-ins do not.
WITHOUT_TORCH = """
import sys, types
import nvrx_slurm
package = types.ModuleType("nvrx_slurm.inprocess")
package.__path__ = [f"{path}/inprocess" for path in nvrx_slurm.__path__]
sys.modules[package.__name__] = package
"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "TORCHELASTIC_", "NVRX_", "FT_", "SLURM_")


def signal_all(pids, signum):
    for pid in pids:
        os.kill(pid, signum)


class Zygote:
    """The zygote, seen from the tests.

    Each request is one message: JSON, with the rank's event pipe and its stderr as file descriptors. Answers are JSON:
    {"pid"} for each request, {"ended", "code"} for each child that has ended, the ranks' orphans too.
    """

    def __init__(self, *modules):
        """`modules` to import, beside the wrapper's."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "RES_OPTIONS": "attempts:0"}  # see tests/conftest.py
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), "nvrx_slurm.inprocess", *modules],
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env=env,
            )
        self._started = []
        self.codes = {}
        self._until(lambda: bool(self._started), "the zygote has started", 120.0)

    def _hear(self, timeout_s):
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return
        said = json.loads(self._socket.recv(1 << 16) or _fail("the zygote has ended"))
        if "ended" in said:
            self.codes[said["ended"]] = said["code"]
        else:
            self._started.append(said["pid"])

    def _until(self, condition, what, timeout_s=WAIT_S):
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}"
            self._hear(min(1.0, deadline_s - time.monotonic()))

    def start(self, request, err):
        """Fork a rank; its pid, and the end of the pipe from which its events come."""
        self._started.clear()
        read, write = os.pipe()
        with err.open("ab") as file:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [write, file.fileno()])
        os.close(write)
        self._until(lambda: bool(self._started), "a rank was forked")
        return self._started[0], read

    def await_end(self, pid, timeout_s=WAIT_S):
        """Exit code of a rank (negative: signal)."""
        self._until(lambda: pid in self.codes, f"rank process {pid} has ended", timeout_s)
        return self.codes[pid]

    def children(self):
        return descendants.children(self._process.pid)

    def await_no_children(self, timeout_s=WAIT_S):
        self._until(lambda: not self.children(), "all monitor processes have ended", timeout_s)

    def kill_children(self):
        """And those who become children by that."""
        deadline_s = time.monotonic() + WAIT_S
        while children := self.children():
            assert time.monotonic() < deadline_s
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._hear(0.05)

    def close(self):
        self._socket.close()
        self._process.wait(20)


def _fail(why):
    raise AssertionError(why)


class Job:
    """Ranks 0..n-1 of one job. Each event of a rank is a JSON line with its name in "event"."""

    def __init__(self, zygote, tmp):
        from stage import free_port  # not in the zygote

        self._zygote, self._tmp = zygote, tmp
        self.pids = {}
        self._pipes = {}  # of the ranks that have not closed theirs
        self._rest = {}
        self.events = {}
        self.port = free_port()

    def start(self, scenario, world_size, *, ranks=None, env=None, **arguments):
        for rank in range(world_size) if ranks is None else ranks:
            self.start_rank(scenario, rank, world_size, env=env, **arguments)
        return self

    def start_rank(self, scenario, rank, world_size, *, env=None, **arguments):
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(self.port)}
        request = {
            "scenario": scenario,
            "arguments": {**arguments, "tmp": str(self._tmp), "world_size": world_size},
            "env": {**place, "MASTER_ADDR": "127.0.0.1", **(env or {})},
        }
        self.pids[rank], self._pipes[rank] = self._zygote.start(request, self.err(rank))
        self._rest[rank], self.events[rank] = b"", []

    def err(self, rank):
        return self._tmp / f"rank{rank}.err"

    def _pump(self, timeout_s):
        """Read the events that came; whether there was something to read."""
        ready = select.select(list(self._pipes.values()), [], [], max(0.0, timeout_s))[0]
        for rank in [rank for rank, pipe in self._pipes.items() if pipe in ready]:
            data = os.read(self._pipes[rank], 1 << 16)
            *lines, self._rest[rank] = (self._rest[rank] + data).split(b"\n")
            self.events[rank] += map(json.loads, lines)
            if not data:
                os.close(self._pipes.pop(rank))
        return bool(ready)

    def of(self, rank, event, **fields):
        return [e for e in self.events[rank] if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def await_event(self, rank, event, timeout_s=WAIT_S, **fields):
        """The first event of that name with these fields."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := self.of(rank, event, **fields)):
            if time.monotonic() > deadline_s or rank not in self._pipes:
                said = f"it said {self.events[rank]}\n{self.err(rank).read_text()}"
                raise AssertionError(f"rank {rank} never said {event} {fields}; {said}")
            self._pump(min(1.0, deadline_s - time.monotonic()))
        return found[0]

    def await_events(self, ranks, event, timeout_s=WAIT_S, **fields):
        return [self.await_event(rank, event, timeout_s, **fields) for rank in ranks]

    def kill(self, rank, signum=signal.SIGKILL):
        os.kill(self.pids[rank], signum)

    def await_end(self, rank):
        try:
            return self._zygote.await_end(self.pids[rank])
        except AssertionError as error:
            self._pump(0)
            raise AssertionError(f"{error}\n{self.events[rank]}\n{self.err(rank).read_text()}") from None

    def await_all(self):
        codes = {rank: self.await_end(rank) for rank in self.pids}
        while self._pump(0):
            pass
        return codes

    def await_nothing_left(self):
        """Until all ranks and all that they left behind have ended."""
        self._zygote.await_no_children()

    def all_return(self, ranks, **fields):
        """They return, the event has these fields, and nothing is left then."""
        for rank in ranks:
            self.await_event(rank, "returned", **fields)
            assert self.await_end(rank) == 0
        self.await_nothing_left()

    def close(self):
        """Whatever a failed test left is ended."""
        self._zygote.kill_children()
        for pipe in self._pipes.values():
            os.close(pipe)


class Script:
    """A program in a process that has imported torch already; to a test it is like `subprocess.Popen`.

    Its stdout is a pipe, its stderr a file.
    """

    def __init__(self, zygote, argv, env, err):
        self._zygote, self._err = zygote, err
        arguments = {"argv": argv, "cwd": str(err.parent)}
        self.pid, pipe = zygote.start({"scenario": "script", "arguments": arguments, "env": env}, err)
        self.stdout = os.fdopen(pipe)

    @property
    def returncode(self):
        return self._zygote.codes.get(self.pid)

    def send_signal(self, signum):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # its end is on its way to us
                os.kill(self.pid, signum)

    def communicate(self, timeout):
        """What is left of stdout, and all of stderr, when it has ended. Raises AssertionError if that takes longer."""
        deadline_s = time.monotonic() + timeout
        left = io.BytesIO()
        while select.select([self.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            if not (data := os.read(self.stdout.fileno(), 1 << 16)):
                break
            left.write(data)
        self._zygote.await_end(self.pid, max(0.0, deadline_s - time.monotonic()))
        return left.getvalue().decode(), self._err.read_text()

    def close(self):
        """Nothing is left of it."""
        self.send_signal(signal.SIGKILL)
        self._zygote.await_end(self.pid, WAIT_S)
        self.stdout.close()


# --- in the zygote ----------------------------------------------------------------------------------------------------


def _rank(request, events, err):
    """Never returns: it ends the process, or raises SystemExit to have the interpreter finalized."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # no rank outlives the tests
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(err, 1)
        os.dup2(err, 2)
        for name in [name for name in os.environ if name.startswith(_OF_A_JOB)]:
            del os.environ[name]
        os.environ.update(request["env"])
        importlib.import_module("scenarios_calls").run(request["scenario"], events, request["arguments"])
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        if not request["arguments"].get("finalizes"):
            os._exit(code)
    sys.exit(code)  # through the interpreter's own end


def _reap(control):
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _tell(control, ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _tell(control, **what):
    control.sendall(json.dumps(what).encode())


def _serve():
    """Until the tests close their end."""
    for name in sys.argv[2:]:
        importlib.import_module(name)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    _tell(control, pid=os.getpid())
    with contextlib.suppress(ConnectionResetError):
        while True:
            ready = select.select([control, woken], [], [])[0]
            if woken in ready:
                os.read(woken, 4096)
                _reap(control)
            if control in ready:
                data, fds, *_ = socket.recv_fds(control, 1 << 16, 2)
                if not data:
                    return
                if (pid := os.fork()) == 0:
                    control.close()
                    _rank(json.loads(data), *fds)
                for fd in fds:
                    os.close(fd)
                _tell(control, pid=pid)


if __name__ == "__main__":
    _serve()
    os._exit(0)  # the end of torch takes a second
