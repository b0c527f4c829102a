"""The job's own attribution service: analyses every failed cycle by itself, and answers by HTTP."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from nvrx_slurm.attribution.analysis import History, by_rules, evidence_of
from nvrx_slurm.attribution.llm import LanguageModel
from nvrx_slurm.attribution.records import Answer, AttributionSpec, CycleNews
from nvrx_slurm.attribution.server import Refused, Server
from nvrx_slurm.system import bounded

_READ_S = 5.0  # for the log's file system
_MOST_RESULTS = 1000
_CYCLE = re.compile(r"_cycle(\d{1,7})\.\w+$")
_INTENTS = ("track_only", "progressive", "terminal")


class Service:
    """Results by the path of the log. HTTP requests are answered in threads of their own, which may block."""

    def __init__(self, settings: AttributionSpec, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._history = History(settings.tree)
        self._llm = LanguageModel(settings, say) if settings.llm_base_url else None
        self._results: dict[str, tuple[CycleNews, Answer | None]] = {}  # None: not analysed yet
        self._lock = threading.Lock()
        self.where = " and ".join(self._listen())

    def _listen(self) -> Iterator[str]:
        port, path = self._settings.port, self._settings.socket
        for where, name in ((port, f"http://127.0.0.1:{port}"), (path, f"unix://{path}")):
            try:
                if where:
                    Server(where, self._reply)
                    yield name
            except OSError as error:
                self._say(f"the attribution service cannot listen on {name}: {error.strerror}; it goes on without")

    async def answer(self, news: CycleNews) -> Answer:
        """Rules at once; then the language model, which takes its time."""
        self._put(news, None)
        if not news.over:
            return Answer()
        try:
            answer, evidence = await self._blocking(lambda: self._history.analyse(news))
            self._put(news, answer)
            if self._llm is not None and news.fault:
                answer = await self._llm.about(news, evidence, answer)
                await self._blocking(lambda: self._history.keep(news, answer))
        except (bounded.Overrun, RuntimeError) as error:
            answer = Answer(reason=f"no analysis: {error}", source="rules")
        self._put(news, answer)
        return answer

    async def _blocking(self, work: Callable[[], Any]) -> Any:
        return await bounded.call_async(work, _READ_S, "the log file system")

    def _put(self, news: CycleNews, answer: Answer | None) -> None:
        with self._lock:
            self._results[news.log] = (news, answer)
            while len(self._results) > _MOST_RESULTS:
                del self._results[next(iter(self._results))]

    # --- HTTP, in other threads -----------------------------------------------------------------------------

    def _reply(self, request: str, query: dict[str, str], body: bytes) -> Any:
        if request == "POST /logs":
            return self._on_post(body)
        if request == "GET /logs":
            return self._on_get(query)
        with self._lock:
            jobs = [
                {"log_path": log, "cycle_id": news.cycle, "job_id": self._settings.job_id, "pending": answer is None}
                for log, (news, answer) in self._results.items()
            ]
        running = [job for job in jobs if job["pending"]]
        known = {
            "GET /healthz": {"status": "ok", "backend": "lib", "issues": []},
            "GET /stats": {"results": len(jobs), "in_flight": len(running)},
            "GET /jobs": {"jobs": jobs},
            "GET /inflight": {"jobs": running},
        }
        if request not in known:
            raise Refused(404, "not_found", "there is nothing at this path")
        return known[request]

    def _on_post(self, body: bytes) -> Any:
        try:
            asked = json.loads(body)
            intent, cycle = asked.get("analysis_intent", "track_only"), asked.get("cycle_id", -1)
        except (ValueError, AttributeError, RecursionError):
            raise Refused(422, "invalid_parameter", "the body must be a JSON object") from None
        if intent not in _INTENTS or type(cycle) is not int:
            raise Refused(422, "invalid_parameter", f"analysis_intent is one of {_INTENTS}, cycle_id a whole number")
        path = checked(asked.get("log_path"), self._settings.root, must_exist=intent != "progressive")
        named = _CYCLE.search(path)
        news, answer = self._results.get(path, (CycleNews(int(named[1]) if named and cycle < 0 else cycle, path), None))
        job_id = self._settings.job_id
        if cycle not in (-1, news.cycle) or (job_id and asked.get("job_id", job_id) != job_id):
            raise Refused(400, "invalid_parameter", "this log belongs to another cycle or job")
        if intent == "terminal" and answer is None and not news.over:
            answer = by_rules(news, evidence_of(news))
            self._put(replace(news, over=True), answer)
        elif path not in self._results:
            self._put(news, None)
        return {"submitted": True, "normalized_path": path, "mode": "single", "logs_dir": None, "sched_restarts": 0,
                "files_analyzed": int(answer is not None)}  # fmt: skip

    def _on_get(self, query: dict[str, str]) -> Any:
        if "file" in query or "wl_restart" in query:
            raise Refused(400, "invalid_parameter", "file and wl_restart are not known")
        path = checked(query.get("log_path"), self._settings.root, must_exist=False)
        if path not in self._results:
            raise Refused(404, "not_found", "this log was not submitted")
        answer = self._results[path][1]
        done = answer or Answer()
        return {
            "result": done.result,
            "status": "in_flight" if answer is None else "completed",
            "recommendation": {"action": done.action, "reason": done.reason, "source": done.source},
            "candidate_recommendation": {"action": "UNKNOWN", "reason": "", "source": ""},
            "llm_merged_summary": done.result.get("story"),
            "wl_restart": 0,
            "wl_restart_count": None,
            "fr_dump_path": None,
            "fr_analysis": None,
        }


def checked(path: object, root: str, must_exist: bool = True) -> str:
    """The real path of a log below `root`. Raises Refused."""
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path:
        raise Refused(400, "invalid_path", "log_path must be an absolute path")
    real = os.path.realpath(path)
    if os.path.commonpath([real, root]) != root:
        raise Refused(403, "outside_root", f"{path} is not below {root}")
    if os.path.exists(real) and not os.path.isfile(real):
        raise Refused(400, "not_regular", f"{path} is no regular file")
    if not os.path.exists(real if must_exist else os.path.dirname(real)):
        raise Refused(404, "not_found", f"{path} does not exist")
    return real
