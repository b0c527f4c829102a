"""Ranks of a job on this machine, and what they tell: what the tests of the wrapper share."""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stage import free_port

HERE = Path(__file__).parent
WAIT_S = 30.0  # for anything that must happen
# First lines of a child process that needs single modules of nvrx_slurm.inprocess: the package itself imports torch,
# which takes seconds, the plug-ins do not.
WITHOUT_TORCH = """
import sys, types
import nvrx_slurm
package = types.ModuleType("nvrx_slurm.inprocess")
package.__path__ = [f"{path}/inprocess" for path in nvrx_slurm.__path__]
sys.modules[package.__name__] = package
"""


def signal_all(pids: Iterable[int], signum: int) -> None:
    for pid in pids:
        os.kill(pid, signum)


class Lines:
    """JSON lines from a file descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""
        self.ended = False

    def read(self) -> list[dict[str, Any]]:
        data = os.read(self.fd, 1 << 16)
        self.ended = not data
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Zygote:
    """See zygote.py."""

    def __init__(self, *modules: str) -> None:
        """`modules` to import, beside the wrapper's."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py"), str(theirs.fileno()), "nvrx_slurm.inprocess", *modules],
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(HERE.parents[1]),
                "RES_OPTIONS": "attempts:0",
            },  # see tests/conftest.py
        )
        theirs.close()
        self._started: list[int] = []
        self.codes: dict[int, int] = {}
        self._until(lambda: bool(self._started), "the zygote has started", 120.0)
        self._started.clear()

    def _hear(self, timeout_s: float) -> None:
        if not select.select([self._socket], [], [], max(0.0, timeout_s))[0]:
            return
        data = self._socket.recv(1 << 16)
        assert data, "the zygote has ended"
        for line in data.splitlines():
            said = json.loads(line)
            if "ended" in said:
                self.codes[said["ended"]] = said["code"]
            else:
                self._started.append(said.get("pid", said.get("ready")))

    def _until(self, condition: Any, what: str, timeout_s: float = WAIT_S) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}"
            self._hear(min(1.0, deadline_s - time.monotonic()))

    def start(self, request: dict[str, Any], events: int, err: int) -> int:
        """Fork a rank; its pid."""
        self._started.clear()
        socket.send_fds(self._socket, [json.dumps(request).encode()], [events, err])
        self._until(lambda: bool(self._started), "a rank was forked")
        return self._started[0]

    def await_end(self, pid: int, timeout_s: float = WAIT_S) -> int:
        """Exit code of a rank (negative: signal)."""
        self._until(lambda: pid in self.codes, f"rank process {pid} has ended", timeout_s)
        return self.codes[pid]

    def children(self) -> list[int]:
        pids = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return [int(pid) for pid in pids.split()]

    def await_no_children(self, timeout_s: float = WAIT_S) -> None:
        self._until(lambda: not self.children(), "all monitor processes have ended", timeout_s)

    def kill_children(self) -> None:
        """And those who become children by that."""
        deadline_s = time.monotonic() + WAIT_S
        while children := self.children():
            assert time.monotonic() < deadline_s
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._hear(0.05)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(20)


class Job:
    """Ranks 0..n-1 of one job. Each event of a rank has its name in "event"."""

    def __init__(self, zygote: Zygote, tmp: Path) -> None:
        self._zygote, self._tmp = zygote, tmp
        self.pids: dict[int, int] = {}
        self._lines: dict[int, Lines] = {}
        self.events: dict[int, list[dict[str, Any]]] = {}
        self.port = free_port()

    def start(self, scenario: str, world_size: int, *, ranks: Any = None, env: Any = None, **arguments: Any) -> Job:
        for rank in range(world_size) if ranks is None else ranks:
            self.start_rank(scenario, rank, world_size, env=env, **arguments)
        return self

    def start_rank(self, scenario: str, rank: int, world_size: int, *, env: Any = None, **arguments: Any) -> None:
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_PORT": str(self.port)}
        request = {
            "scenario": scenario,
            "arguments": {**arguments, "tmp": str(self._tmp), "world_size": world_size},
            "env": {**place, "MASTER_ADDR": "127.0.0.1", **(env or {})},
        }
        read, write = os.pipe()
        with self.err(rank).open("ab") as err:
            self.pids[rank] = self._zygote.start(request, write, err.fileno())
        os.close(write)
        self._lines[rank] = Lines(read)
        self.events[rank] = []

    def err(self, rank: int) -> Path:
        return self._tmp / f"rank{rank}.err"

    def _pump(self, timeout_s: float) -> None:
        open_fds = {lines.fd: rank for rank, lines in self._lines.items() if not lines.ended}
        for fd in select.select(list(open_fds), [], [], max(0.0, timeout_s))[0]:
            self.events[open_fds[fd]] += self._lines[open_fds[fd]].read()

    def of(self, rank: int, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.events[rank] if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def await_event(self, rank: int, event: str, timeout_s: float = WAIT_S, **fields: Any) -> dict[str, Any]:
        """The first event of that name with these fields."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := self.of(rank, event, **fields)):
            if time.monotonic() > deadline_s or self._lines[rank].ended:
                said = f"it said {self.events[rank]}\n{self.err(rank).read_text()}"
                raise AssertionError(f"rank {rank} never said {event} {fields}; {said}")
            self._pump(min(1.0, deadline_s - time.monotonic()))
        return found[0]

    def await_events(self, ranks: Any, event: str, timeout_s: float = WAIT_S, **fields: Any) -> list[dict[str, Any]]:
        return [self.await_event(rank, event, timeout_s, **fields) for rank in ranks]

    def until(self, condition: Any, what: str) -> None:
        """Something that sends no event (a file)."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}"
            self._pump(0.01)

    def kill(self, rank: int, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], signum)

    def suspend(self, pids: list[int], seconds: float) -> None:
        """Stop them for at least so many seconds."""
        signal_all(pids, signal.SIGSTOP)
        until_s = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= until_s, "the time has passed")

    def await_end(self, rank: int) -> int:
        try:
            return self._zygote.await_end(self.pids[rank])
        except AssertionError as error:
            self._pump(0)
            raise AssertionError(f"{error}\n{self.events[rank]}\n{self.err(rank).read_text()}") from None

    def await_all(self) -> dict[int, int]:
        """Exit codes."""
        codes = {rank: self.await_end(rank) for rank in self.pids}
        while select.select([lines.fd for lines in self._lines.values() if not lines.ended], [], [], 0)[0]:
            self._pump(0)
        return codes

    def await_nothing_left(self) -> None:
        """Until all ranks and all that they left behind have ended."""
        self._zygote.await_no_children()

    def all_return(self, ranks: Iterable[int], **fields: Any) -> None:
        """They return, the event has these fields, and nothing is left then."""
        for rank in ranks:
            self.await_event(rank, "returned", **fields)
            assert self.await_end(rank) == 0
        self.await_nothing_left()

    def close(self) -> None:
        """Whatever a failed test left is ended."""
        self._zygote.kill_children()
        for lines in self._lines.values():
            os.close(lines.fd)


class Script:
    """A program in a process that has imported torch already; to a test it is like `subprocess.Popen`.

    Its stdout is a pipe, its stderr a file.
    """

    def __init__(self, zygote: Zygote, argv: list[str], env: dict[str, str], err: Path) -> None:
        self._zygote, self._err = zygote, err
        request = {
            "scenario": "script",
            "arguments": {"argv": argv, "cwd": str(err.parent)},
            "env": env,
        }
        read, write = os.pipe()
        self.stdout = os.fdopen(read)
        with err.open("ab") as file:
            self.pid = zygote.start(request, write, file.fileno())
        os.close(write)

    @property
    def returncode(self) -> int | None:
        return self._zygote.codes.get(self.pid)

    def send_signal(self, signum: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # its end is on its way to us
                os.kill(self.pid, signum)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What is left of stdout, and all of stderr, when it has ended. Raises AssertionError if that takes longer."""
        deadline_s = time.monotonic() + timeout
        left = io.BytesIO()
        while select.select([self.stdout], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            if not (data := os.read(self.stdout.fileno(), 1 << 16)):
                break
            left.write(data)
        self._zygote.await_end(self.pid, max(0.0, deadline_s - time.monotonic()))
        return left.getvalue().decode(), self._err.read_text()

    def close(self) -> None:
        """Nothing is left of it."""
        self.send_signal(signal.SIGKILL)
        self._zygote.await_end(self.pid, WAIT_S)
        self.stdout.close()
