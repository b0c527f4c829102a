"""The job's own attribution service: an answer about each of its cycles, in the log tree and by HTTP."""

from __future__ import annotations

import json
import logging
import os
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from nvrx_slurm.attribution.llm import LanguageModel
from nvrx_slurm.attribution.records import FOLDER, AttributionSpec, CycleNews, Recommendation
from nvrx_slurm.attribution.web import Trouble, json_object
from nvrx_slurm.system import bounded
from nvrx_slurm.system.files import write_atomic

_log = logging.getLogger(__name__)
_FILE_S = 5.0  # for the log tree's file system
_MOST_RESULTS = 1000
# Parts of replies that are always the same here.
_SUBMITTED = {"submitted": True, "mode": "single", "logs_dir": None, "sched_restarts": 0}
_NOTHING = {"action": "UNKNOWN", "reason": "", "source": ""}
_FOUND = {"candidate_recommendation": _NOTHING, "wl_restart": 0, "wl_restart_count": None, "fr_dump_path": None,
          "fr_analysis": None}  # fmt: skip
_MAX_BODY_BYTES = 64 << 10
_POLL_S = 1e6  # how often it looks whether it was told to end; it is not
_NO_REQUEST = (
    422,
    "invalid_parameter",
    f"a body must be a JSON object of at most {_MAX_BODY_BYTES} bytes",
)
_TCP = Path("/proc/self/net/tcp")


class AttributionService:
    """Answers by the rules that the coordinator has applied, and by a language model."""

    def __init__(self, spec: AttributionSpec, say: Callable[[str], None]) -> None:
        self._spec, self._say = spec, say
        self._llm = LanguageModel(spec, say) if spec.llm_base_url else None
        self._results: dict[str, tuple[int, Recommendation | None]] = {}  # by log: cycle, answer
        self.where = f"http://127.0.0.1:{spec.port}"  # "" = nowhere
        try:
            _Server(spec.port, self)
        except OSError as error:
            self._say(
                f"the attribution service cannot listen on {self.where}: {error.strerror}; it goes on without"
            )
            self.where = ""

    async def answer(self, news: CycleNews) -> Recommendation:
        """Rules at once; then the language model, which takes its time."""
        self._results[news.log] = news.cycle, None
        while len(self._results) > _MOST_RESULTS:
            del self._results[next(iter(self._results))]
        if not news.over:
            return Recommendation()
        answer = by_rules(news)
        await self._keep(news, answer)
        if self._llm is not None and news.fault:
            answer = await self._llm.about(news, answer)
            await self._keep(news, answer)
        return answer

    async def _keep(self, news: CycleNews, answer: Recommendation) -> None:
        self._results[news.log] = news.cycle, answer
        try:
            await bounded.call_async(
                lambda: keep(news, answer, self._spec.tree), _FILE_S, "the log tree"
            )
        except (bounded.Overrun, OSError) as error:
            _log.warning("cycle %d: the log tree cannot be used: %s", news.cycle, error)

    def reply(self, request: str, asked: dict[str, Any]) -> Any:
        """To an HTTP request, in a thread of its own. The service knows the logs of its job before any client does."""
        if request == "GET /healthz":
            return {"status": "ok", "backend": "lib", "issues": []}
        if request not in ("POST /logs", "GET /logs"):
            raise _Refused(404, "not_found", "there is nothing at this path")
        path = os.path.realpath(str(asked.get("log_path")))
        if path not in self._results:
            raise _Refused(404, "not_found", f"{path} is not the log of a cycle of this job")
        cycle, answer = self._results[path]
        theirs = asked.get("cycle_id", cycle), asked.get("job_id", self._spec.job_id)
        if theirs != (cycle, self._spec.job_id):
            raise _Refused(400, "invalid_parameter", "the log is that of another cycle or job")
        if request == "POST /logs":
            return _SUBMITTED | {"normalized_path": path, "files_analyzed": int(answer is not None)}
        done = answer or Recommendation()
        return _FOUND | {
            "result": done.result,
            "status": "in_flight" if answer is None else "completed",
            "recommendation": {"action": done.action, "reason": done.reason, "source": done.source},
            "llm_merged_summary": done.result.get("story"),
        }


def by_rules(news: CycleNews) -> Recommendation:
    """The answer of the rules, which the coordinator has applied."""
    if not news.fault:
        return Recommendation("CONTINUE", "the cycle ended without a fault", "rules")
    found = news.fault.get("finding") or {}
    name = found.get("rule") or "unknown"
    reason = f"{name}: {news.fault.get('message') or found.get('line') or name}"
    action = "STOP" if found.get("remedy") == "stop" else "RESTART"
    primary = {
        "failure_class": name,
        "root_fingerprint": found.get("fingerprint", ""),
        "line": found.get("line", ""),
        "confidence": found.get("confidence", "guess"),
        "rank": news.fault.get("rank", -1),
        "node": news.fault.get("host", ""),
    }
    result = {
        "schema_version": 1,
        "decision": action,
        "justification": reason,
        "failure_domain": found.get("blame", "unknown"),
        "primary_failure": primary,
    }
    return Recommendation(action, reason, "rules", result)


def keep(news: CycleNews, answer: Recommendation, tree: str) -> None:
    """Write the result into the log tree. Raises OSError."""
    folder = Path(tree, FOLDER)
    folder.mkdir(exist_ok=True)
    record = asdict(news) | asdict(answer)
    write_atomic(folder / f"cycle_{news.cycle}.json", json.dumps(record, indent=1).encode())


# --- over HTTP ----------------------------------------------------------------------------------


class _Refused(Exception):
    """The reply is an error: (status, error_code, message)."""


class _Server(socketserver.ThreadingTCPServer):
    """Serves JSON over HTTP at a port of 127.0.0.1 to processes of the same user, until this process ends.

    A thread for each connection; the limit of open files is their bound. Raises OSError where it cannot listen.
    """

    daemon_threads = allow_reuse_address = True

    def __init__(self, port: int, service: AttributionService) -> None:
        self.service = service
        super().__init__(("127.0.0.1", port), _Handler)
        threading.Thread(target=self.serve_forever, args=(_POLL_S,), daemon=True).start()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the other end belongs to this user."""
        ends = [_as_in_proc(client_address), _as_in_proc(request.getsockname())]
        try:
            lines = [line.split() for line in _TCP.read_text().splitlines()[1:]]
        except OSError:  # no descriptor is left
            return False
        return any(line[1:3] == ends and int(line[7]) == os.geteuid() for line in lines)


def _as_in_proc(address: tuple[str, int]) -> str:
    """127.0.0.1, 50050 -> 0100007F:C382 (proc(5), on machines of either byte order)."""
    host = struct.unpack("=I", socket.inet_aton(address[0]))[0]
    return f"{host:08X}:{address[1]:04X}"


class _Handler(BaseHTTPRequestHandler):
    timeout = 10.0  # for each part of a request
    server: _Server

    def do_GET(self) -> None:
        url, length = urlsplit(self.path), self.headers.get("Content-Length", "0")
        status, asked = 200, dict[str, Any](parse_qsl(url.query))
        try:
            if self.command == "POST":
                asked = json_object(self.rfile.read(min(abs(int(length)), _MAX_BODY_BYTES)))
            value = self.server.service.reply(f"{self.command} {url.path}", asked)
        except (_Refused, Trouble, ValueError) as error:
            status, code, message = error.args if isinstance(error, _Refused) else _NO_REQUEST
            value = {"error_code": code, "message": message, "details": {}}
        reply = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    do_POST = do_GET

    def log_message(self, form: str, *values: object) -> None:
        """Requests are not logged."""
