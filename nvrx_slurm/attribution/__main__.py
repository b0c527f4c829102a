"""`python -m nvrx_slurm.attribution FD`: the process that the coordinator's agent starts, see `agent.attributor`.

FD is one end of a SOCK_SEQPACKET socket; each packet is a JSON object. The process gets `Settings`, then `CycleNews`,
and in the end {"finish": seconds}: it says its last words and ends. When the socket is closed it ends at once.

It says {"ready": where it listens}, {"say": sentence}, and {"cycle": number, "stop": whether another try is pointless,
"text": for people, "" = nothing}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import socket
import sys

from nvrx_slurm.attribution.answer import Answer
from nvrx_slurm.attribution.client import Client
from nvrx_slurm.attribution.llm import LanguageModel
from nvrx_slurm.attribution.service import Service
from nvrx_slurm.attribution.settings import LAST_WORDS_S, CycleNews, Settings
from nvrx_slurm.attribution.web import Web

_log = logging.getLogger(__name__)
_PACKET_BYTES = 1 << 17
_GIVEN_UP = 3  # exit code: starting it again would not help
_MARGIN_S = 0.5  # of the last words, to end
_OF_SLURM = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_LIMITS = {
    resource.RLIMIT_AS: 4 << 30,
    resource.RLIMIT_CPU: 3600,  # seconds; then it is started anew
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_FSIZE: 256 << 20,
    resource.RLIMIT_CORE: 0,  # a core dump could hold the key
}


def _limit_myself() -> None:
    """Lowest priority, little of everything."""
    os.nice(19)
    for what, most in _LIMITS.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))
    for signum in _OF_SLURM:  # they go to every process of a step; ours ends when the agent says so
        signal.signal(signum, signal.SIG_IGN)


class _Agent:
    """Our end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.settings = Settings(**json.loads(connection.recv(_PACKET_BYTES)))
        connection.setblocking(False)

    def _send(self, **packet: object) -> None:
        with contextlib.suppress(OSError):  # it does not read, or is gone
            self._socket.send(json.dumps(packet).encode())

    def say(self, sentence: str) -> None:
        """For people."""
        _log.info("%s", sentence)
        self._send(say=sentence)

    def tell(self, cycle: int, answer: Answer) -> None:
        """The answer about a cycle."""
        _log.info("cycle %d: %s", cycle, answer.text or "nothing to tell")
        self._send(cycle=cycle, stop=answer.action == "STOP", text=answer.text)

    async def serve(self, backend: Client | Service) -> None:
        """Until the job has ended. Ends this process where the agent has."""
        where = await backend.start()
        if where:
            self.say(f"the attribution service listens on {where}")
        self._send(ready=where)
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self._socket, _PACKET_BYTES):
            packet = json.loads(data)
            if "finish" in packet:
                return
            backend.hear(CycleNews(**packet))
        os._exit(0)


def _backend(agent: _Agent) -> Client | Service:
    """Who answers."""
    settings = agent.settings
    if not settings.managed:
        return Client(settings, agent.tell, agent.say, Web(settings.endpoint))
    model = LanguageModel(settings, agent.say, Web(settings.llm_base_url)) if settings.llm_base_url else None
    export = Web(settings.export_url) if settings.export_url else None
    return Service(settings, agent.tell, agent.say, model, export)


async def _run(agent: _Agent) -> None:
    backend = _backend(agent)
    work, serve = asyncio.ensure_future(backend.work()), asyncio.ensure_future(agent.serve(backend))
    await asyncio.wait({work, serve}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():  # the end of the job
        await backend.finish()
        await asyncio.wait({work}, timeout=LAST_WORDS_S - _MARGIN_S)
    for task in (work, serve):
        if task.done():
            task.result()  # a defect: end with it, the agent starts another process


def _log_to(settings: Settings) -> None:
    """Our own log, and what Python writes about a defect. Where it cannot be written, there is none."""
    logging.basicConfig(handlers=[logging.NullHandler()], level=settings.log_level)
    with contextlib.suppress(OSError):
        fd = os.open(settings.own_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        os.dup2(fd, 2)
        os.close(fd)
        form = "%(asctime)s %(levelname)s %(message)s"
        logging.basicConfig(level=settings.log_level, format=form, stream=sys.stderr, force=True)
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request
    logging.getLogger("httpcore").setLevel(logging.WARNING)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    _limit_myself()
    agent = _Agent(socket.socket(fileno=int(argv[0])))
    _log_to(agent.settings)
    try:
        asyncio.run(_run(agent))
    except ModuleNotFoundError as error:
        agent.say(f"no attribution from this node: the Python package {error.name} is missing")
        return _GIVEN_UP
    sys.stderr.flush()
    os._exit(0)  # a thread that is stuck in a file system must not keep us


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
