"""`nvrx-run` and attribution services that answer, hang, flood or die: only a STOP that the user wants ends a job."""

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from agent_harness import UP, says
from fakes import Fake, floods, hangs, reply
from waits import until

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("attribution")]  # of port 50050 there is one

KEY = "sk-of-the-job-0123456789"
SUBMITTED = reply(200, {"submitted": True})
FAILS_ONCE = UP + "if CYCLE == 0:\n    raise ValueError('bad sample')\n"


def advice(action):
    said = {"action": action, "reason": "it fails again", "source": "test"}
    return reply(200, {"status": "completed", "result": {}, "recommendation": said})


@pytest.fixture
def fake():
    with ExitStack() as stack:
        yield lambda *script: stack.enter_context(Fake(*script))


def run(rig, code, endpoint, *flags, **env):
    prefix = f"--ft-per-cycle-applog-prefix={rig.dir}/train.log"
    wanted = (prefix, f"--ft-attribution-endpoint={endpoint}", "--max-restarts=3", "--ft-crash-loop-backoff=0", *flags)
    return rig.run(rig.script(code), "--standalone", *wanted, "--ft-node-health-checks=false", **env)


def by_method(action):
    return lambda asked: SUBMITTED if asked.method == "POST" else advice(action)


def attribution_of(job):
    found = []
    for pid in job.children:
        try:
            if b"nvrx_slurm.attribution" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def test_a_stop_ends_the_job_where_the_user_wants_that(rig, fake):
    service = fake(SUBMITTED)
    service.answer = by_method("STOP")
    code = UP + "if CYCLE:\n    forever()\ntime.sleep(3)\nraise ValueError('bad sample')\n"
    job = run(rig, code, service.url, "--ft-attribution-stop-action=no-restart", SLURM_JOB_USER="u")
    assert job.wait() == 93
    assert "attribution of cycle 0: STOP: it fails again (test)" in rig.result["reason"]
    submitted = [one.json for one in service.asked if one.method == "POST"]
    assert [one["analysis_intent"] for one in submitted if one["cycle_id"] == 0] == ["progressive", "terminal"]
    assert service.asked[0].json["user"] == "u"


@pytest.mark.repeats("None")
@pytest.mark.parametrize("worst", [None, floods])
def test_a_service_that_misbehaves_costs_the_training_nothing(rig, fake, worst):
    service = fake(worst) if worst is not None else None
    endpoint = service.url if service is not None else "http://127.0.0.1:9"
    job = run(rig, FAILS_ONCE, endpoint, "--ft-attribution-stop-action=no-restart")
    assert job.wait() == 0 and job.cycles == [0, 1]
    assert rig.result["restarts"][0]["down_s"] < 5
    assert service is None or service.asked


@pytest.mark.repeats("hangs")
@pytest.mark.parametrize("worst", [hangs, reply(401, {"error": KEY})])
def test_a_language_model_that_misbehaves_costs_the_training_nothing(rig, fake, worst):
    service = fake(worst)
    key = rig.dir / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    model = (f"--ft-attribution-llm-base-url={service.url}/v1", "--ft-attribution-llm-model=m")
    job = run(rig, FAILS_ONCE + "gate('end')\n", "localhost", *model, LLM_API_KEY_FILE=str(key))
    job.line("up 1 ")
    assert service.wait_for(1)[0].headers["authorization"] == f"Bearer {KEY}"
    rig.ends_well("end", job)
    assert job.cycles == [0, 1]
    assert rig.result["restarts"][0]["down_s"] < 5
    files = [path for path in rig.dir.rglob("*") if path.is_file() and path != key]
    assert any(path.name.startswith("prompt_") for path in files) and KEY not in job.text
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_service_that_is_late_is_said(rig):
    job = run(rig, UP + "gate('end')\n", "localhost", "--ft-attribution-startup-timeout=0.001")
    job.line("attribution is not up after 0.001 s; the training goes on")
    rig.ends_well("end", job)


def test_a_process_that_dies_is_started_again_without_a_token_and_ends_with_the_job(rig, fake):
    """By default a STOP is one line. The answer about the last failure is said, too."""
    service = fake(SUBMITTED)
    service.answer = by_method("STOP")
    code = UP + "if CYCLE < 2:\n    gate(f'fail{CYCLE}')\nraise ValueError('bad sample')\n"
    job = run(rig, code, service.url, NVRX_TOKEN="5" * 64, HF_TOKEN="hf_secret", NVRX_FT_MAX_FAILED_STARTS="0")
    job.line("up 0 ")
    service.wait_for(1)
    (first,) = attribution_of(job)
    env = Path(f"/proc/{first}/environ").read_bytes()
    assert b"PATH=" in env and b"5" * 64 not in env and b"hf_secret" not in env
    os.kill(first, signal.SIGSEGV)
    job.line("attribution process ended with")
    until(lambda: attribution_of(job) not in ([], [first]), "another process")
    (second,) = attribution_of(job)
    rig.open("fail0")
    job.line("attribution of cycle 0: STOP: it fails again .test.; ")
    rig.open("fail1")
    assert job.wait() == 1 and job.cycles == [0, 1, 2, 3] and not Path(f"/proc/{second}").exists()
    assert "attribution of cycle 3: STOP: it fails again" in job.text


def test_a_process_that_is_stopped_holds_nothing(rig, fake):
    service = fake(SUBMITTED)
    job = run(rig, FAILS_ONCE.replace("raise", "gate('fail')\n    raise") + "gate('end')\n", service.url)
    job.line("up 0 ")
    service.wait_for(1)
    (pid,) = attribution_of(job)
    os.kill(pid, signal.SIGSTOP)
    rig.open("fail")
    job.line("up 1 ")
    rig.open("end")
    began_s = time.monotonic()
    assert job.wait() == 0 and not Path(f"/proc/{pid}").exists()
    assert time.monotonic() - began_s < 4.5  # its last words are 3 s long, the rest is the job's


def test_the_service_moves_with_the_coordinator(rig):
    flags = (f"--ft-per-cycle-applog-prefix={rig.dir}/train.log", "--ft-attribution-endpoint=localhost",
             "--ft-node-health-checks=false", "--max-restarts=3", "--ft-keepalive-interval=0.7",
             "--ft-keepalive-timeout=0.7")  # fmt: skip
    first, *others = nodes = [rig.node(rank, "2:3", rig.script(UP + "gate('end')\n"), *flags) for rank in range(3)]
    says("the attribution service listens on", *nodes)
    assert attribution_of(first) and not any(map(attribution_of, others))
    first.signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    says("the attribution service listens on", *others)
    assert sum(bool(attribution_of(one)) for one in others) == 1
    rig.ends_well("end", *others)
