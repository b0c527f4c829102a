"""The attribution process of the job: started by the node that coordinates, told of cycles, asked for nothing.

The agent never waits for it, except for a moment at the end of the job. See `attribution.__main__` for its packets.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nvrx_slurm.agent.log_programs import LogProgram
from nvrx_slurm.attribution.settings import LAST_WORDS_S, SOCKET_NAME, CycleNews, Settings
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.logs.names import cycle_file
from nvrx_slurm.health.check import one_line
from nvrx_slurm.system import processes

_MOST_OPEN = 16  # cycles without an answer that a new process is told of
_TEXT_CHARS, _TRACEBACK_CHARS = 600, 8000
# No token, and no secrets of the job.
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PROGRAM = (
    f"import sys; sys.path[:] = sys.argv.pop(1).split({os.pathsep!r}); "
    "from nvrx_slurm.attribution.__main__ import main; sys.exit(main(sys.argv[1:]))"
)


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


class _Process(LogProgram):
    """It has our import paths, since packages may come by PYTHONPATH, and nothing else of our environment."""

    on_packet: Callable[[dict[str, Any]], None]

    def _on_packet(self, packet: dict[str, Any]) -> None:
        self.on_packet(packet)

    def _start(self, fd: int) -> processes.Child:
        paths = [str(Path(__file__).resolve().parents[2]), *(path for path in sys.path if os.path.isabs(path))]
        command = [sys.executable, "-I", "-c", _PROGRAM, os.pathsep.join(dict.fromkeys(paths)), str(fd)]
        env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        return processes.start_directly(command, [fd], env)


class Attributor:
    """The process over its lives. All methods belong to the thread of the running event loop.

    It starts with the first cycle, so only where a coordinator leads. `post` gets `coordinator_events.Advised`.
    """

    def __init__(self, spec: AttributionSpec, say: Callable[[str], None], post: Callable[[Any], None]) -> None:
        self._spec, self._say, self._post = spec, say, post
        self._open: dict[int, dict[str, Any]] = {}  # by cycle: what is not answered yet
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.TimerHandle | None = None
        self._ends: asyncio.Task[None] | None = None
        settings = asdict(spec.settings)
        self._process = _Process("attribution", lambda: settings, self._open.values, self._hear)
        self._process.on_packet = self._on_packet

    def begun(self, command: ev.CycleBegan) -> None:
        """A cycle runs."""
        self._tell(CycleNews(command.cycle, self._log(command.cycle)))

    def over(self, command: ev.CycleOver) -> None:
        """A cycle is over."""
        fault, cause = dict[str, Any](), command.cause
        if cause is not None:
            fault = asdict(cause) | {"kind": cause.kind.value, "traceback": cause.traceback[-_TRACEBACK_CHARS:]}
        self._tell(CycleNews(command.cycle, self._log(command.cycle), True, command.lasted_s, fault))

    def _log(self, cycle: int) -> str:
        return cycle_file(self._spec.prefix, cycle, self._spec.part)

    def _tell(self, news: CycleNews) -> None:
        if self._ends is not None:
            return
        self._open[news.cycle] = packet = asdict(news)
        while len(self._open) > _MOST_OPEN:
            del self._open[min(self._open)]
        if self._late is None:
            self._late = self._loop.call_later(self._spec.startup_s, self._say_late)
            self._process.spawn()
        else:
            self._process.tell(packet)

    def _say_late(self) -> None:
        self._say(f"attribution is not up after {self._spec.startup_s:g} s; the training goes on without it")

    def _hear(self, sentence: str) -> None:
        self._say(one_line(sentence[:_TEXT_CHARS]))

    def _on_packet(self, packet: dict[str, Any]) -> None:
        if "ready" in packet and self._late is not None:
            self._late.cancel()
        cycle, text = packet.get("cycle"), one_line(str(packet.get("text", ""))[:_TEXT_CHARS])
        if isinstance(cycle, int) and self._open.pop(cycle, {}) and text:
            self._post(ev.Advised(cycle, packet.get("stop") is True, text))

    def end(self) -> None:
        """This node coordinates no more, or the job has ended: the process may say its last words, then it is killed.
        Does not wait; a second call does nothing."""
        if self._late is not None and self._ends is None:
            self._late.cancel()
            self._ends = asyncio.ensure_future(self._process.finish(LAST_WORDS_S))

    async def close(self) -> None:
        """Until the process has ended: LAST_WORDS_S and a moment."""
        self.end()
        if self._ends is not None:
            await asyncio.wait({self._ends})
