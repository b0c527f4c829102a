"""The job's own attribution service: analyses every failed cycle by itself, and answers by HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from nvrx_slurm.attribution.analysis import Analyst, NotAllowed, checked
from nvrx_slurm.attribution.answer import Answer, Tell
from nvrx_slurm.attribution.export import export, record
from nvrx_slurm.attribution.http import Refused, Request, Server
from nvrx_slurm.attribution.llm import LanguageModel
from nvrx_slurm.attribution.settings import CycleNews, Settings
from nvrx_slurm.attribution.web import Web
from nvrx_slurm.system import bounded

_log = logging.getLogger(__name__)
_READ_S = 5.0  # for the log's file system
_MOST_RESULTS = 1000
_CYCLE = re.compile(r"_cycle(\d{1,7})\.\w+$")
_INTENTS = ("track_only", "progressive", "terminal")
T = TypeVar("T")


class Service:
    """Results by the path of the log. `llm` and `web` (for the export) are None where they are not asked for."""

    def __init__(
        self, settings: Settings, tell: Tell, say: Callable[[str], None], llm: LanguageModel | None, web: Web | None
    ) -> None:
        self._settings, self._tell, self._say, self._llm, self._web = settings, tell, say, llm, web
        self._analyst = Analyst(settings)
        self._server = Server(self._handle)
        self._answers: dict[str, tuple[CycleNews, Answer | None]] = {}  # None: not analysed yet
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()

    async def start(self) -> str:
        """Listen; returns where."""
        where = []
        try:
            await self._server.listen_on_loopback(self._settings.port)
            where.append(f"http://127.0.0.1:{self._settings.port}")
        except OSError as error:
            self._say(f"the attribution service cannot listen on 127.0.0.1:{self._settings.port}: {error.strerror};"
                      " it goes on without")  # fmt: skip
        try:
            if self._settings.socket:
                await self._server.listen_on_socket(self._settings.socket)
                where.append(f"unix://{self._settings.socket}")
        except OSError as error:
            _log.warning("no Unix socket: %s", error)
        try:
            await self._blocking(self._analyst.load)
        except Refused as refused:
            _log.warning("no history: %s", refused.args[2])
        return " and ".join(where)

    async def work(self) -> None:
        """Until `finish`, and until all cycles are analysed."""
        await self._over.wait()
        self._server.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def finish(self) -> None:
        """The job has ended."""
        self._over.set()

    def hear(self, news: CycleNews) -> None:
        """A cycle runs, or is over."""
        self._put(news, None)
        if news.over:
            task = asyncio.ensure_future(self._attribute(news))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _put(self, news: CycleNews, answer: Answer | None) -> None:
        self._answers[news.log] = (news, answer)
        while len(self._answers) > _MOST_RESULTS:
            del self._answers[next(iter(self._answers))]

    async def _attribute(self, news: CycleNews) -> None:
        """Rules at once; then the language model, which takes its time; then the export."""
        began_s = time.monotonic()
        try:
            evidence = await self._blocking(partial(self._analyst.evidence, news))
            answer = self._analyst.analyse(news, evidence)
            self._put(news, answer)
            await self._blocking(partial(self._analyst.keep, news, answer))
            story = await self._llm.about(news, evidence, answer) if self._llm is not None and news.fault else None
            if story is not None:
                answer = story
                self._put(news, answer)
                await self._blocking(partial(self._analyst.keep, news, answer))
        except Refused as refused:
            answer = Answer(reason=f"no analysis: {refused.args[2]}", source="rules")
            self._put(news, answer)
        # The console has what the coordinator's rules say: only more than that is news.
        is_news = answer.action == "STOP" or answer.source != "rules"
        self._tell(news.cycle, answer if is_news else Answer())
        if self._web is not None and news.fault:
            took_s = time.monotonic() - began_s
            await export(self._web, record(self._settings, news, answer, took_s, int(time.time() * 1000)))

    async def _blocking(self, work: Callable[[], T]) -> T:
        """Raises Refused where the file system hangs."""
        try:
            return await bounded.call_async(work, _READ_S, "the log file system")
        except (bounded.Overrun, RuntimeError, OSError) as error:
            raise Refused(503, "internal_error", str(error)) from None
        except NotAllowed as wrong:
            raise Refused(*wrong.args) from None

    # --- HTTP -----------------------------------------------------------------------------------------------

    async def _handle(self, request: Request) -> Any:
        asked = (request.method, request.path)
        if asked == ("POST", "/logs"):
            return await self._on_post(request)
        if asked == ("GET", "/logs"):
            return await self._on_get(request)
        jobs = [
            {"log_path": log, "cycle_id": news.cycle, "job_id": self._settings.job_id, "pending": answer is None}
            for log, (news, answer) in self._answers.items()
        ]
        known = {
            ("GET", "/healthz"): {"status": "ok", "backend": "lib", "issues": []},
            ("GET", "/stats"): {"results": len(jobs), "in_flight": len(self._tasks)},
            ("GET", "/jobs"): {"jobs": jobs},
            ("GET", "/inflight"): {"jobs": [job for job in jobs if job["pending"]]},
        }
        if asked not in known:
            raise Refused(404, "not_found", "there is nothing at this path")
        return known[asked]

    async def _on_post(self, request: Request) -> Any:
        try:
            asked = json.loads(request.body)
            intent, cycle = asked.get("analysis_intent", "track_only"), asked.get("cycle_id", -1)
        except (ValueError, AttributeError, RecursionError):
            raise Refused(422, "invalid_parameter", "the body must be a JSON object") from None
        if intent not in _INTENTS or not isinstance(cycle, int) or isinstance(cycle, bool):
            raise Refused(422, "invalid_parameter", f"analysis_intent is one of {_INTENTS}, cycle_id a whole number")
        must_exist = intent != "progressive"
        path = await self._blocking(partial(checked, asked.get("log_path"), self._settings.root, must_exist))
        named = _CYCLE.search(path)
        news = CycleNews(int(named[1]) if named and cycle < 0 else cycle, path)
        if path in self._answers:
            news = self._answers[path][0]
        job_id = self._settings.job_id
        if cycle not in (-1, news.cycle) or (job_id and asked.get("job_id", job_id) != job_id):
            raise Refused(400, "invalid_parameter", "this log belongs to another cycle or job")
        if path not in self._answers:
            self._put(news, None)
        if intent == "terminal" and self._answers[path][1] is None and not news.over:
            evidence = await self._blocking(partial(self._analyst.evidence, news))
            self._put(replace(news, over=True), self._analyst.analyse(news, evidence, of_job=False))
        return {"submitted": True, "normalized_path": path, "mode": "single", "logs_dir": None, "sched_restarts": 0,
                "files_analyzed": int(self._answers[path][1] is not None)}  # fmt: skip

    async def _on_get(self, request: Request) -> Any:
        if "file" in request.query or "wl_restart" in request.query:
            raise Refused(400, "invalid_parameter", "file and wl_restart are not known")
        path = await self._blocking(partial(checked, request.query.get("log_path"), self._settings.root, False))
        if path not in self._answers:
            raise Refused(404, "not_found", "this log was not submitted")
        _, answer = self._answers[path]
        done = answer or Answer()
        return {
            "result": done.result,
            "status": "in_flight" if answer is None else "completed",
            "recommendation": {"action": done.action, "reason": done.reason, "source": done.source},
            "candidate_recommendation": {"action": "UNKNOWN", "reason": "", "source": ""},
            "llm_merged_summary": done.result.get("story"),
            "wl_restart": 0,
        } | dict.fromkeys(("wl_restart_count", "fr_dump_path", "fr_analysis"))
