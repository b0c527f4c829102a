"""The two programs of `benchmarks.join`: a coordinator, and one process with many agents; run as modules.

server AGENTS                 prints its port
clients PORT FIRST COUNT      prints "ready", waits for a line, prints when its last agent had its plan
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from nvrx_slurm.agent.coordinator import Members
from nvrx_slurm.agent.event_log import EventLog
from nvrx_slurm.agent.shell import Shell
from nvrx_slurm.control.client import ControlClient
from nvrx_slurm.control.server import ControlServer
from nvrx_slurm.core.job import agent_events as ag
from nvrx_slurm.core.job import coordinator_events as ev
from nvrx_slurm.core.job.agent import Agent
from nvrx_slurm.core.job.coordinator import Coordinator, CoordinatorSettings
from nvrx_slurm.types import Node, Plan, Register, Stopped

_KEY, _TOKEN = "bench", "0" * 64
_KEEPALIVE = (5.0, 5.0)
_LONGEST_LIFE_S = 60.0


def _say(text: str) -> None:
    """Show only what went wrong."""
    if text.startswith("refused"):
        print(text, file=sys.stderr)


async def serve(agents: int) -> None:
    """The real core, shell, event log and control server of a coordinator."""
    loop = asyncio.get_running_loop()
    core = Coordinator(CoordinatorSettings(min_nodes=agents, max_nodes=agents), loop.time())
    with tempfile.TemporaryDirectory(prefix="nb-") as directory:
        log = EventLog(Path(directory) / "events.jsonl", core, _say)
        shell, members = Shell(core, log, ev.Done, _say), Members()
        members.server = server = ControlServer(_KEY, _TOKEN, shell.post, _say, _KEEPALIVE)
        shell.add(members)
        shell.begin()
        where = await server.start("127.0.0.1", [0])
        print(where.rpartition(":")[2], flush=True)
        await asyncio.wait({shell.result}, timeout=_LONGEST_LIFE_S)


class _Agent:
    """The real core and client of one agent; its workers are left out."""

    def __init__(self, port: int, number: int, all_planned: Any) -> None:
        node = Node(f"{number}", number, f"host{number}", "127.0.0.1", 8)
        self._core = Agent(node, ag.AgentSettings(), 0.0)
        self._planned = all_planned
        self.client = ControlClient([("127.0.0.1", port)], _KEY, _TOKEN, self._post, _KEEPALIVE)

    def _post(self, event: Any) -> None:
        events = [event, ag.Prepared()] if isinstance(event, ag.Connected) else [event]
        for command in [command for one in events for command in self._core.step(one, time.monotonic())]:
            if isinstance(command, ag.Send):
                message = command.message
                self.client.send(replace(message, port=1234) if isinstance(message, (Register, Stopped)) else message)
        if isinstance(event, Plan):
            self._planned()


async def join(port: int, first: int, count: int) -> None:
    """`count` agents at once."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[float] = loop.create_future()
    missing = count

    def planned() -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            done.set_result(time.monotonic())

    agents = [_Agent(port, first + i, planned) for i in range(count)]
    print("ready", flush=True)
    await loop.run_in_executor(None, sys.stdin.readline)
    for agent in agents:
        agent.client.start()
    print(await asyncio.wait_for(done, _LONGEST_LIFE_S), flush=True)
    await asyncio.sleep(5)  # the harness ends us


def main(words: list[str]) -> None:
    """See above."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if words[0] == "server":
        asyncio.run(serve(int(words[1])))
    else:
        asyncio.run(join(*map(int, words[1:])))
    os._exit(0)


main(sys.argv[1:])
