"""`python -m nvrx_slurm.attribution FD`: the process that the coordinator's agent starts, see `node.output.attributor`.

FD is one end of a socket to the agent, see `child.program`. It gets `AttributionSpec`, then `CycleNews`. It says
{"ready": where it listens} and {"cycle": number, "stop": whether another try is pointless, "text": for people, or ""}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

from nvrx_slurm.attribution.client import Client
from nvrx_slurm.attribution.records import AttributionSpec, CycleNews, Recommendation
from nvrx_slurm.attribution.web import Trouble, Web
from nvrx_slurm.child.program import Program, run
from nvrx_slurm.system.owned import append_to

_log = logging.getLogger(__name__)
_MARGIN_S = 0.5  # of the time that is left at the end, for the end itself
_NICE = 9  # more than other programs
_EXPORT_S, _EXPORT_TRIES = 10.0, 3
_MAX_RESULT_CHARS = 64 << 10
_LIMITS = {
    resource.RLIMIT_AS: 4 << 30,
    resource.RLIMIT_CPU: 3600,  # seconds; then it is started anew
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_FSIZE: 256 << 20,
    resource.RLIMIT_CORE: 0,  # a core dump could hold the key
}


class Attribution(Program):
    """Has a service answer for each cycle, tells the agent, and exports the result."""

    def __init__(self, spec: AttributionSpec, connection: socket.socket) -> None:
        super().__init__(connection)
        self._spec = spec
        self._client: Client | None = None
        self._tasks = set[asyncio.Task[None]]()
        self._export = Web(spec.export_url) if spec.export_url else None
        if not spec.endpoint:
            from nvrx_slurm.attribution.service import (
                AttributionService,
            )  # its server is not for clients

            service = AttributionService(spec, self.say)
            self._answer, where = service.answer, service.where
            self.say(f"the attribution service listens on {where or 'no port'}")
        else:
            self._client = Client(spec, self.say)
            self._answer, where = self._client.answer, ""
        self.tell(ready=where)

    def on_packet(self, packet: dict[str, Any]) -> None:
        """News of a cycle, or the end of the job."""
        if "finish" in packet:
            work = self._finish({*self._tasks}, packet["finish"] - _MARGIN_S)
        else:
            work = self._attend(CycleNews(**packet))
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, tasks: set[asyncio.Task[None]], within_s: float) -> None:
        """Tell what is still found in the time that is left."""
        if tasks and not (self._client and self._client.is_down):
            await asyncio.wait(tasks, timeout=within_s)
        self.end()

    async def _attend(self, news: CycleNews) -> None:
        began_s, answer = time.monotonic(), Recommendation()
        try:
            answer = await self._answer(news)
        except Trouble as trouble:
            _log.warning("cycle %d gets no answer: %s", news.cycle, trouble)
        if not news.over:
            return
        _log.info("cycle %d: %s", news.cycle, answer.text or "nothing to tell")
        # The console has what the coordinator's rules say: only more than that is news.
        is_known = not self._spec.endpoint and answer.source == "rules" and answer.action != "STOP"
        self.tell(
            cycle=news.cycle, stop=answer.action == "STOP", text="" if is_known else answer.text
        )
        if self._export is not None and news.fault:
            content = record(self._spec, news, answer, time.monotonic() - began_s)
            try:
                await self._export.ask("POST", "", _EXPORT_S, tries=_EXPORT_TRIES, json=content)
            except Trouble as trouble:
                _log.warning("the result of cycle %d was not exported: %s", news.cycle, trouble)


def record(
    spec: AttributionSpec, news: CycleNews, answer: Recommendation, took_s: float
) -> dict[str, Any]:
    """One result, with the names that dashboards of NVRx know: s text, l whole number, d number, ts time."""
    primary = answer.result.get("primary_failure", {})
    hung = [news.fault["rank"]] if news.fault.get("kind") == "hang" else []
    return {
        "s_cluster": spec.cluster,
        "s_user": spec.user or "unknown",
        "s_job_id": spec.job_id,
        "l_cycle_id": news.cycle,
        "s_log_path": news.log,
        "s_recommendation_action": answer.action,
        "s_recommendation_source": answer.source,
        "s_auto_resume": "STOP" if answer.action == "STOP" else "RESTART",
        "s_auto_resume_explanation": answer.reason,
        "s_primary_issues": json.dumps(
            [primary.get("line") or primary.get("failure_class", "unknown")]
        ),
        "s_attribution_result_json": json.dumps(answer.result)[:_MAX_RESULT_CHARS],
        "s_fr_dump_path": "",
        "s_fr_analysis": "",
        "s_hanging_ranks": ",".join(map(str, hung)),
        "l_hanging_ranks": hung,
        "d_attribution_analysis_duration_seconds": round(took_s, 3),
        "ts_attribution_analysis_completed_ms": int(time.time() * 1000),
    }


def _limit_myself() -> None:
    """Lowest priority, little of everything."""
    os.nice(_NICE)
    for what, most in _LIMITS.items():
        with contextlib.suppress(ValueError):  # it may use less already
            resource.setrlimit(what, (most, most))


def _log_to(spec: AttributionSpec) -> None:
    """Our own log, and what Python writes about a defect. Where it cannot be written, there is none."""
    path = f"{os.path.splitext(spec.prefix)[0]}_attribution.log"
    with contextlib.suppress(OSError), open(append_to(Path(path), 1), "a") as file:
        os.dup2(file.fileno(), 2)
    logging.basicConfig(level=spec.log_level, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


def _begin(told: dict[str, Any], connection: socket.socket) -> Program:
    spec = AttributionSpec(**told)
    _limit_myself()
    _log_to(spec)
    return Attribution(spec, connection)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    return run(int(argv[0]), _begin)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
