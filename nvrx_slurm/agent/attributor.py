"""The attribution process of the job: started by the node that coordinates, told of cycles, asked for nothing.

It gets lines on its standard input and gives lines on its standard output, see `attribution.program`. The agent never
waits for it, except for a moment at the end of the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nvrx_slurm.agent.restarted import RestartedProcess
from nvrx_slurm.attribution.settings import LAST_WORDS_S, SOCKET_NAME, CycleNews, Settings, to_line
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.health.check import one_line
from nvrx_slurm.system import processes
from nvrx_slurm.types import RankFault

_RESPAWN_S, _MAX_RESPAWN_S = 1.0, 300.0
_DEATHS = 3  # in a row; then what it was told last is no longer told again
_MAX_LINE_BYTES = 1 << 16
_MOST_OPEN = 16  # cycles without an answer that a new process is told of
_TEXT_CHARS = 600
_TRACEBACK_CHARS = 8000
_INHERITED = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "LD_LIBRARY_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)  # no token, no secrets of the job


@dataclass(frozen=True)
class AttributionSpec:
    """What the agent of the coordinator's node needs to know about attribution."""

    settings: Settings
    prefix: str  # of the merged logs
    part: int  # of several merged files of a cycle, the one to show; -1 = there is one
    startup_s: float

    def at(self, private_dir: Path) -> AttributionSpec:
        """The same, with a Unix socket in the agent's private directory, where the job runs the service itself."""
        socket = str(private_dir / SOCKET_NAME) if self.settings.managed else ""
        return replace(self, settings=replace(self.settings, socket=socket))


class Attributor(RestartedProcess):
    """The process over its lives. All methods belong to the thread of the running event loop.

    It starts with the first cycle, so only where a coordinator leads. `post` gets `coordinator_events.Advised`.
    """

    def __init__(self, spec: AttributionSpec, say: Callable[[str], None], post: Callable[[Any], None]) -> None:
        super().__init__()
        self._spec, self._say, self._post = spec, say, post
        self._said = ""
        self._stdin = self._stdout = -1
        self._data = b""
        self._open: dict[int, list[bytes]] = {}  # by cycle: what the process was told, until it has answered
        self._deaths = 0
        self._up = False
        self._late: asyncio.TimerHandle | None = None

    def begun(self, command: ev.CycleBegan) -> None:
        """A cycle runs."""
        self._tell(CycleNews(command.cycle, self._log(command.cycle)))

    def over(self, command: ev.CycleOver) -> None:
        """A cycle is over."""
        cause = command.cause
        self._tell(CycleNews(command.cycle, self._log(command.cycle), True, {} if cause is None else _plain(cause)))

    def _log(self, cycle: int) -> str:
        return cycle_file(self._spec.prefix, cycle, self._spec.part)

    def _tell(self, news: CycleNews) -> None:
        if self._closed:
            return
        line = to_line(news)
        self._open.setdefault(news.cycle, []).append(line)
        while len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]
        if self._child is None:
            if self._timer is None:  # else it waits for its next start
                self.spawn()
        else:
            self._write(line)

    def spawn(self) -> None:
        """Start the process and tell it what is open."""
        self._timer = None
        if self._child is not None or self._closed:
            return
        self._data, self._up = b"", False
        try:
            child, self._stdin, self._stdout = _start()
        except OSError as error:
            return self._once(f"no process can be made for attribution: {error.strerror}")
        self._adopt(child, {self._stdout: self._on_output})
        self._late = self._loop.call_later(self._spec.startup_s, self._on_late)
        self._write(
            b"".join([to_line(self._spec.settings), *(line for lines in self._open.values() for line in lines)])
        )

    def _write(self, data: bytes) -> None:
        """What does not fit into the pipe means that the process does not read: it is replaced."""
        try:
            whole = os.write(self._stdin, data) == len(data)
        except BlockingIOError:
            whole = False
        except BrokenPipeError:  # it is about to end
            return
        if not whole:
            self._kill()

    def _on_late(self) -> None:
        if not self._up:
            self._say(f"attribution is not up after {self._spec.startup_s:g} s; the training goes on without it")

    # --- its output -----------------------------------------------------------------------------------------

    def _on_output(self) -> None:
        try:
            more = os.read(self._stdout, _MAX_LINE_BYTES)
        except BlockingIOError:
            return
        if not more:
            self._loop.remove_reader(self._stdout)
        *lines, self._data = (self._data + more).split(b"\n")
        try:
            for line in lines:
                self._take(json.loads(line))
            if len(self._data) > _MAX_LINE_BYTES:
                raise ValueError("a line without an end")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._once(f"attribution said what it should not: {one_line(error)}")
            self._kill()

    def _take(self, said: dict[str, Any]) -> None:
        self._up = True
        if "say" in said:
            self._say(one_line(str(said["say"])[:_TEXT_CHARS]))
        cycle = int(said.get("cycle", -1))
        if self._open.pop(cycle, []):
            self._deaths, self._delay_s = 0, 0.0
            if said["text"]:
                self._post(ev.Advised(cycle, said["stop"] is True, one_line(str(said["text"])[:_TEXT_CHARS])))

    def _once(self, sentence: str) -> None:
        if sentence != self._said:
            self._said = sentence
            self._say(sentence)

    # --- its end --------------------------------------------------------------------------------------------

    def _on_exit(self, pid: int, code: int) -> None:
        for fd in (self._stdin, self._stdout):
            if fd >= 0:
                os.close(fd)
        self._stdin = self._stdout = -1
        if self._late is not None:
            self._late.cancel()
        if self._closed:
            return
        self._deaths += 1
        if self._deaths % _DEATHS == 0:
            self._open.clear()
        self._once(f"the attribution process ended with {code}; it is started again, and the training goes on")
        self._delay_s = max(self._delay_s, _RESPAWN_S)
        self._spawn_later(_RESPAWN_S, _MAX_RESPAWN_S)

    def end(self) -> None:
        """This node coordinates no more, or the job has ended: the process may say its last words, then it is killed.
        Does not wait."""
        if self._closed:
            return
        self._closed = True
        for timer in (self._timer, self._late):
            if timer is not None:
                timer.cancel()
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1
            self._loop.call_later(LAST_WORDS_S, self._kill)

    async def close(self) -> None:
        """Until the process has ended; at most LAST_WORDS_S and a moment. A second call does nothing."""
        self.end()
        if self._child is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none_left.wait(), LAST_WORDS_S)
        await self._close(self._kill)


def _plain(cause: RankFault) -> dict[str, Any]:
    return asdict(cause) | {"kind": cause.kind.value, "traceback": cause.traceback[-_TRACEBACK_CHARS:]}


def _start() -> tuple[processes.Child, int, int]:
    """The process, and our ends of its pipes. Raises OSError."""
    paths = [str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if os.path.isabs(path))]
    text = (
        f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); "
        "from nvrx_slurm.attribution.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-I", "-c", text, os.pathsep.join(dict.fromkeys(paths))]
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
        their_in, stdin = os.pipe()
        on_error.callback(os.close, stdin)
        in_file = always.enter_context(open(their_in, "rb"))
        stdout, their_out = os.pipe()
        on_error.callback(os.close, stdout)
        out_file = always.enter_context(open(their_out, "wb"))
        child = processes.start(command, env, out_file, 2, stdin=in_file)
        on_error.pop_all()
    for fd in (stdin, stdout):
        os.set_blocking(fd, False)
    return child, stdin, stdout
