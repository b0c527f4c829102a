"""The attribution service of NVRx 0.7.0, as a real peer of our client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nvrx_wheel
import pytest
from fakes import Fake, reply, running
from stage import free_port
from test_service import fault, log_of

from nvrx_slurm.attribution.records import AttributionSpec

pytestmark = pytest.mark.process


@pytest.mark.xdist_group("nvrx-peer")
@pytest.mark.timeout(400)
def test_our_client_asks_their_service(tmp_path: Path) -> None:
    """Their language model answers nonsense, so their rules decide."""
    root, key, port = tmp_path / "merged", tmp_path / "key", free_port()
    root.mkdir()
    key.write_text("k")
    key.chmod(0o600)
    settings = AttributionSpec(f"http://127.0.0.1:{port}", f"{root}/x.log", user="u", job_id="7")
    command = [sys.executable, "-S", "-m", "nvidia_resiliency_ext.services.attrsvc"]  # it has nothing of ours
    with Fake(reply(200, {"choices": []})) as model:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{nvrx_wheel.unpacked()}:{nvrx_wheel.services()}",
               "NVRX_ATTRSVC_ALLOWED_ROOT": str(root), "NVRX_ATTRSVC_ENDPOINT": settings.endpoint,
               "NVRX_ATTRSVC_LLM_BASE_URL": f"{model.url}/v1", "LLM_API_KEY_FILE": str(key),
               "NVRX_ATTRSVC_RESTART_AGENT_LOG_QUIET_SECONDS": "0.2",  # they watch a log for 10 s by default
               "NVRX_ATTRSVC_RESTART_AGENT_LOG_MAX_WAIT_SECONDS": "0.5"}  # fmt: skip
        with subprocess.Popen(command, env=env, cwd="/", stdout=subprocess.PIPE, stderr=-2, text=True) as service:
            try:
                assert service.stdout is not None and any("Uvicorn running" in line for line in service.stdout)
                with running(settings) as process:
                    log = log_of(settings, 0)
                    process.news(0, log, over=False)
                    process.news(0, log, fault())
                    told = process.line("cycle", 120.0)
                    assert (told["cycle"], told["stop"]) == (0, False) and told["text"].startswith("RESTART")
                    outside = tmp_path / "x_cycle1.log"
                    outside.write_text("x")
                    process.news(1, str(outside), fault())  # they refuse it
                    assert process.line("cycle") == {"cycle": 1, "stop": False, "text": ""}
                    assert process.end() == 0
            finally:
                service.kill()
