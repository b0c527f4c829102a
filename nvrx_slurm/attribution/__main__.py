"""`python -m nvrx_slurm.attribution`: the process that the coordinator's agent starts, see `agent.attributor`.

Standard input: the settings, then news of cycles, one JSON line each; at its end the process says its last words and
ends. Standard output, one JSON line each: {"ready": where it listens}, {"say": sentence}, and
{"cycle": number, "stop": whether another try is pointless, "text": for people, "" = nothing}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import signal
import sys
from typing import Any

from nvrx_slurm.attribution.answer import Answer
from nvrx_slurm.attribution.settings import LAST_WORDS_S, CycleNews, Settings, from_line
from nvrx_slurm.system.files import write_all

_MAX_LINE_BYTES = 1 << 20
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
    for signum in _OF_SLURM:  # they go to every process of a step; ours ends with its standard input
        signal.signal(signum, signal.SIG_IGN)


def _put(line: dict[str, Any]) -> None:
    write_all(1, json.dumps(line).encode() + b"\n")


def _say(sentence: str) -> None:
    logging.getLogger(__name__).info("%s", sentence)
    _put({"say": sentence})


def _tell(cycle: int, answer: Answer) -> None:
    logging.getLogger(__name__).info("cycle %d: %s", cycle, answer.text or "nothing to tell")
    _put({"cycle": cycle, "stop": answer.action == "STOP", "text": answer.text})


def _backend(settings: Settings) -> Any:
    """Who answers. httpx is imported only where something is asked."""
    if not settings.managed:
        from nvrx_slurm.attribution.client import Client
        from nvrx_slurm.attribution.web import Web

        return Client(settings, _tell, _say, Web(settings.endpoint))
    from nvrx_slurm.attribution.service import Service

    llm = web = None
    if settings.llm_base_url:
        from nvrx_slurm.attribution.llm import LanguageModel
        from nvrx_slurm.attribution.web import Web

        llm = LanguageModel(settings, _say, Web(settings.llm_base_url))
    if settings.export_url:
        from nvrx_slurm.attribution.web import Web

        web = Web(settings.export_url)
    return Service(settings, _tell, _say, llm, web)


async def _run() -> None:
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    settings = from_line(await reader.readline())
    assert isinstance(settings, Settings)
    _log_to(settings)
    backend = _backend(settings)
    where = await backend.start()
    if where:
        _say(f"the attribution service listens on {where}")
    _put({"ready": where})
    work = asyncio.ensure_future(backend.work())
    hear = asyncio.ensure_future(_hear(reader, backend))
    await asyncio.wait({work, hear}, return_when=asyncio.FIRST_COMPLETED)
    if not work.done():  # the end of the job
        await backend.finish()
        await asyncio.wait({work}, timeout=LAST_WORDS_S - _MARGIN_S)
    for task in (work, hear):
        if task.done():
            task.result()  # a defect: end with it, the agent starts another process


async def _hear(reader: asyncio.StreamReader, backend: Any) -> None:
    while line := await reader.readline():
        news = from_line(line)
        if isinstance(news, CycleNews):
            backend.hear(news)


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


def main() -> int:
    """Returns the exit code."""
    _limit_myself()
    try:
        asyncio.run(_run())
    except BrokenPipeError:  # the agent is gone
        return 0
    sys.stderr.flush()
    os._exit(0)  # a thread that is stuck in a file system must not keep us


if __name__ == "__main__":
    sys.exit(main())
