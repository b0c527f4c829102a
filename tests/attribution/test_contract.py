"""The attribution service and client of NVRx 0.7.0, as real peers of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nvrx_wheel
import pytest
from fakes import Fake, reply, running
from stage import free_port
from test_service import fault, job, log_of

from nvrx_slurm.attribution.records import AttributionSpec

pytestmark = [pytest.mark.xdist_group("nvrx-peer"), pytest.mark.timeout(400)]

_CLIENT = """
import json, sys
from nvidia_resiliency_ext.attribution import parse_attrsvc_response
from nvidia_resiliency_ext.services.smonsvc.attrsvc_client import AttrsvcClient
endpoint, log = sys.argv[1:]
def wrong(text):
    sys.exit("refused: " + text)
def told(reply):
    print(json.dumps(reply.json()))
def result(reply):
    found = parse_attrsvc_response(reply.json(), log_path=log)
    print(json.dumps([found.status, found.recommendation.action, found.should_stop, found.recommendation_reason]))
with AttrsvcClient(endpoint, max_attempts=1, request_throttle=0) as client:
    assert client.check_health_cached()
    client.request_with_retry("POST", "7", log, told, wrong, user="u", analysis_intent="terminal")
    client.request_with_retry("GET", "7", log, result, wrong)
"""


@pytest.fixture(scope="module")
def peer() -> str:
    """PYTHONPATH of its code and of what that needs."""
    return f"{nvrx_wheel.unpacked()}:{nvrx_wheel.services()}"


def python(peer: str, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Its Python code in an interpreter that has nothing of ours."""
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": peer, **env}
    command = [sys.executable, "-S", *arguments]
    return subprocess.Popen(command, env=kept, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_their_client_asks_our_service(tmp_path: Path, peer: str) -> None:
    settings = job(tmp_path)
    log = log_of(settings, 5)
    with running(settings) as process:
        process.line("ready")
        process.tell(5, log, fault())
        process.line("cycle")
        client = python(peer, "-c", _CLIENT, f"http://127.0.0.1:{settings.port}", log)
        said = client.communicate(timeout=60)[0]
        assert client.returncode == 0, said
        submitted, result = map(json.loads, said.splitlines()[-2:])
        assert submitted["submitted"] is True and submitted["normalized_path"] == log
        assert result[:3] == ["completed", "RESTART", False] and "ValueError" in result[3]


@pytest.fixture
def their_service(tmp_path: Path, peer: str) -> Iterator[AttributionSpec]:
    """Their service, with a language model that answers nonsense: its rules decide."""
    root, key, port = tmp_path / "merged", tmp_path / "key", free_port()
    root.mkdir()
    key.write_text("k")
    key.chmod(0o600)
    with Fake(reply(200, {"choices": []})) as model:
        env = {"NVRX_ATTRSVC_ALLOWED_ROOT": str(root), "NVRX_ATTRSVC_ENDPOINT": f"http://127.0.0.1:{port}",
               "NVRX_ATTRSVC_LLM_BASE_URL": f"{model.url}/v1", "LLM_API_KEY_FILE": str(key),
               "NVRX_ATTRSVC_RESTART_AGENT_LOG_QUIET_SECONDS": "0.2",  # they watch a log for 10 s by default
               "NVRX_ATTRSVC_RESTART_AGENT_LOG_MAX_WAIT_SECONDS": "0.5"}  # fmt: skip
        service = python(peer, "-m", "nvidia_resiliency_ext.services.attrsvc", **env)
        assert service.stdout is not None
        try:
            said = []
            for line in service.stdout:
                said.append(line)
                if "Uvicorn running" in line:
                    break
            assert service.poll() is None, "".join(said)
            yield AttributionSpec(f"http://127.0.0.1:{port}", f"{root}/x.log", user="u", job_id="7")
        finally:
            with service:
                service.kill()


def test_our_client_asks_their_service(their_service: AttributionSpec) -> None:
    log = log_of(their_service, 0)
    with running(their_service) as process:
        process.tell(0, log, over=False)
        process.tell(0, log, fault())
        told = process.line("cycle", 120.0)
        assert (told["cycle"], told["stop"]) == (0, False)
        assert told["text"].startswith("RESTART")
        outside = f"{Path(their_service.prefix).parents[1]}/x_cycle1.log"
        Path(outside).write_text("x")
        process.tell(1, outside, fault())  # they refuse it
        assert process.line("cycle") == {"cycle": 1, "stop": False, "text": ""}
        assert process.end() == 0
