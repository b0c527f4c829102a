"""The job's own service as a real process: over HTTP, for its own cycles, with the export, and with bad requests."""

from __future__ import annotations

import http.client
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import WAIT_S, Fake, hangs, reply, running
from stage import free_port

from nvrx_slurm.attribution.records import AttributionSpec
from nvrx_slurm.core.attribution.evidence import examine
from nvrx_slurm.declared import plain
from nvrx_slurm.types import FaultKind, RankFault

pytestmark = pytest.mark.process


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: bad sample 17\n'


def job(tmp_path: Path, **more: Any) -> AttributionSpec:
    """A log tree and a folder of merged logs."""
    tree, root = tmp_path / "logs" / "7" / "r0", tmp_path / "merged"
    tree.mkdir(parents=True, exist_ok=True)
    root.mkdir(exist_ok=True)
    told = {"user": "u", "job_id": "7", "tree": str(tree)}
    return AttributionSpec("", f"{root}/x.log", port=free_port(), **(told | more))


def ask(settings: AttributionSpec, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", settings.port, timeout=WAIT_S)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def fault(message: str = "ValueError: bad sample 17", **more: Any) -> dict[str, Any]:
    """A first cause with what the coordinator's rules found, as it comes from the agent."""
    finding = plain(examine(RankFault(FaultKind.EXIT, "n1", 0, message=message, traceback=TRACE), b""))
    told = {"kind": "exit", "host": "n1", "rank": 3, "message": message, "traceback": TRACE, "log": ""}
    return told | {"finding": finding, **more}


def log_of(settings: AttributionSpec, cycle: int) -> str:
    path = Path(os.path.dirname(settings.prefix)) / f"x_cycle{cycle}.log"
    path.write_text(" 3: " + TRACE.replace("\n", "\n 3: "))
    return str(path)


def results(settings: AttributionSpec) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(Path(settings.tree).glob("attribution/cycle_*.json"))]


def test_a_cycle_from_its_start_to_its_answer(tmp_path: Path) -> None:
    settings = job(tmp_path)
    log = log_of(settings, 0)
    with running(settings) as process:
        assert f"http://127.0.0.1:{settings.port}" == process.line("ready")["ready"]
        process.news(0, log, over=False)
        process.news(0, log, fault())
        assert process.line("cycle") == {"cycle": 0, "stop": False, "text": ""}  # the console has the rules already
        status, found = ask(settings, "GET", f"/logs?log_path={log}&wait=false")
        assert (status, found["status"], found["recommendation"]["source"]) == (200, "completed", "rules")
        assert found["result"]["primary_failure"]["rank"] == 3 and found["wl_restart"] == 0
        assert ask(settings, "GET", "/healthz")[1]["status"] == "ok"
        assert process.end() == 0
    assert [one["cycle"] for one in results(settings)] == [0]
    assert "cycle 0" in Path(f"{os.path.splitext(settings.prefix)[0]}_attribution.log").read_text()


WRONG: list[tuple[str, str, Any, int, str]] = [
    ("POST", "/logs", {"log_path": "/etc/passwd"}, 404, "not_found"),
    ("POST", "/logs", {"log_path": "{root}/../../x"}, 404, "not_found"),
    ("POST", "/logs", {"log_path": "/x\0"}, 422, "invalid_parameter"),
    ("POST", "/logs", {"log_path": 7}, 404, "not_found"),
    ("POST", "/logs", {"log_path": "{log}", "cycle_id": 5}, 400, "invalid_parameter"),
    ("POST", "/logs", {"log_path": "{log}", "job_id": "8"}, 400, "invalid_parameter"),
    ("POST", "/logs", [1], 422, "invalid_parameter"),
    ("GET", "/logs?log_path={root}/none.log", None, 404, "not_found"),
    ("GET", "/print?log_path={log}", None, 404, "not_found"),
]


def test_foreign_clients(tmp_path: Path) -> None:
    """Right requests, and wrong ones, which get the errors that clients know."""
    settings = job(tmp_path)
    root, log = os.path.dirname(settings.prefix), log_of(settings, 4)
    body = {"log_path": log, "user": "u", "job_id": "7", "cycle_id": 4, "analysis_intent": "terminal"}

    def filled(text: str) -> str:
        return text.replace("{root}", root).replace("{log}", log)

    with running(settings) as process:
        process.line("ready")
        process.news(4, log, over=False)
        while ask(settings, "GET", f"/logs?log_path={log}")[0] != 200:
            assert process.process.poll() is None
        status, told = ask(settings, "POST", "/logs", body)
        assert (status, told["submitted"], told["normalized_path"], told["mode"]) == (200, True, log, "single")
        assert ask(settings, "GET", f"/logs?log_path={log}")[1]["status"] == "in_flight"
        for method, path, asked, status, code in WRONG:
            given = json.loads(filled(json.dumps(asked))) if asked is not None else None
            got, told = ask(settings, method, filled(path), given)
            assert (got, told["error_code"]) == (status, code), (method, path, asked, told)


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01" * 100, b"GET //[ HTTP/1.1\r\n\r\n",
     b"POST /logs HTTP/1.1\r\nContent-Length: 50\r\n\r\n{", b"GET /logs?log_path=/%ED%A0%80 HTTP/1.1\r\n\r\n"],
)  # fmt: skip
def test_what_is_no_request_harms_nothing(tmp_path: Path, data: bytes) -> None:
    settings = job(tmp_path)
    with running(settings) as process:
        process.line("ready")
        with socket.create_connection(("127.0.0.1", settings.port), WAIT_S) as one:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            one.settimeout(WAIT_S)
            assert b" 200 " not in one.recv(100)
        assert ask(settings, "GET", "/healthz")[0] == 200 and process.process.poll() is None


def test_only_the_same_user_is_served(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to be another user")
    settings = job(tmp_path)
    with running(settings) as process:
        process.line("ready")
        code = (
            "import os, socket, sys; os.setuid(65534); c = socket.socket(); "
            "c.connect(('127.0.0.1', int(sys.argv[1]))); "
            "c.sendall(b'GET /healthz HTTP/1.1\\r\\n\\r\\n'); sys.exit(3 if not c.recv(99) else 0)"
        )
        assert subprocess.run([sys.executable, "-I", "-c", code, str(settings.port)], timeout=WAIT_S).returncode == 3


def test_a_port_that_is_taken_costs_only_the_port(tmp_path: Path) -> None:
    settings = job(tmp_path)
    with socket.create_server(("127.0.0.1", settings.port)), running(settings) as process:
        assert process.line("ready")["ready"] == ""
        assert any("cannot listen" in line.get("say", "") for line in process.lines)
        process.news(0, log_of(settings, 0), fault())
        assert process.line("cycle")["cycle"] == 0


def test_the_process_is_poor(tmp_path: Path) -> None:
    """Lowest priority, limits, no secrets, deaf to the signals of a step."""
    settings = job(tmp_path)
    with running(settings) as process:
        process.line("ready")
        pid = process.process.pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
        assert resource.prlimit(pid, resource.RLIMIT_AS)[0] <= 4 << 30
        for signum in (15, 2, 1, 10, 12):
            os.kill(pid, signum)
        assert ask(settings, "GET", "/healthz")[0] == 200
        rss_kib = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0])
        assert rss_kib < 60_000
        assert process.end() == 0


def test_results_are_exported_with_the_names_that_dashboards_know(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    service = fake(reply(500, {}), reply(202, b"", "text/plain"))
    settings = job(tmp_path, export_url=f"{service.url}/dataflow/posting", cluster="c")
    with running(settings) as process:
        process.news(2, log_of(settings, 2), fault())
        process.line("cycle")
        sent = [one.json for one in service.wait_for(2)]
        assert process.end() == 0
    assert [one.target for one in service.asked] == ["/dataflow/posting"] * 2 and sent[0] == sent[1]
    found = sent[1]
    assert {name.split("_")[0] for name in found} == {"s", "l", "d", "ts"} and len(found) == 17
    assert (found["s_cluster"], found["s_user"], found["s_job_id"], found["l_cycle_id"]) == ("c", "u", "7", 2)
    assert found["s_recommendation_action"] == "RESTART" and found["l_hanging_ranks"] == []
    assert json.loads(found["s_attribution_result_json"])["primary_failure"]["rank"] == 3


@pytest.mark.parametrize(("answer", "tries"), [(reply(400, {}), 1), (reply(307, b"", Location="/elsewhere"), 3)])
def test_an_export_that_fails_is_given_up(tmp_path: Path, fake: Callable[..., Fake], answer: bytes, tries: int) -> None:
    service = fake(answer)
    settings = job(tmp_path, export_url=service.url)
    with running(settings) as process:
        process.news(0, log_of(settings, 0), fault())
        process.line("cycle")
        service.wait_for(tries)
        assert process.end() == 0
    assert len(service.asked) == tries and "/elsewhere" not in {one.target for one in service.asked}
    assert "not exported" in Path(f"{os.path.splitext(settings.prefix)[0]}_attribution.log").read_text()


def test_an_export_that_hangs_does_not_hold_the_end(tmp_path: Path, fake: Callable[..., Fake]) -> None:
    service = fake(hangs)
    with running(job(tmp_path, export_url=service.url)) as process:
        process.news(0, "/none", fault())
        process.line("cycle")
        service.wait_for(1)
        assert process.end() == 0
