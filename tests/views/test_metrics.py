"""`nvrx metrics` on files and over HTTP, the rules and the dashboard of share/, and the variables of OpenTelemetry."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import parser
from test_status import GOOD, INCIDENT
from toolbox import nvrx

from nvrx_slurm.config.otel import OtlpTarget, otlp_target
from nvrx_slurm.core.account.account import BUCKETS
from nvrx_slurm.core.account.figures import so_far
from nvrx_slurm.core.samples import METRICS, exposition, kind_of, line, otlp, samples
from nvrx_slurm.declared import replace
from nvrx_slurm.types import Account, FaultKind, NodeTime, SectionTime
from nvrx_slurm.views import metrics
from nvrx_slurm.views.metrics import Trees

pytestmark = pytest.mark.fast


REPO = Path(__file__).resolve().parents[2]
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is missing")
NODES = tuple(
    NodeTime(f"{i}", f"n{i}", "active", (1.0,) * len(BUCKETS), tuple(SectionTime(f"s{j}", 1.0) for j in range(16)))
    for i in range(32)
)
# 2,048 nodes, 466 incidents, of which status.json tells 16.
LARGE = {
    **GOOD,
    "job": {**GOOD["job"], "name": 'a "b" \\ \n\u202e\ud800'},
    "end": {"code": 1, "reason": "x"},
    "restarts": {"used": 466, "allowed": 500, "by_kind": {kind.value: 50 for kind in FaultKind}},
    "incidents": [INCIDENT] * 16,
    "cycle": 466,
    "checkpoint": {"iteration": 18300, "time": 1.0, "every_s": 300.0, "iteration_s": 3.0, "torn": {"a": "x"}},
    "progress": {"ranks": 16376, "stepped": 16376, "steps": 41, "step_s": 0.5, "still_s": 1.5, "open": []},
    "slow": {"what": "rank 3", "ranks": [3], "lost_s": 2.0, "signs": ""},
    "account": so_far(Account(100.0, 50.0, NODES), 200.0, 2048, 2000, 200.0),
}


def promtool(*words, text=None):
    done = subprocess.run([PROMTOOL or "", *words], input=text, capture_output=True, timeout=60)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()


def test_a_large_job_has_few_series_and_each_parser_takes_them():
    found = samples(LARGE)
    series = {(one.name, *one.labels.items()) for one in found}
    assert len(series) == len(found) <= 120
    assert {one.name for one in found} == {name for name in METRICS if "exporter" not in name}
    lines = [(one.name, line(one)) for one in found]
    text = exposition(lines)
    parsed = parser.text_string_to_metric_families(text.decode())
    assert Counter(one.name for family in parsed for one in family.samples) == Counter(name for name, _ in lines)
    body = json.loads(json.dumps(otlp(LARGE, {"service.name": "x"}, "1")))
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    assert {one["name"] for one in metrics if one.get("sum", {}).get("isMonotonic")} == {
        name for name in METRICS if kind_of(name) == "counter"
    }
    told = {str(point["asDouble"]) for one in metrics for point in one.get("sum", one.get("gauge"))["dataPoints"]}
    assert told == {str(one.value) for one in found}
    if PROMTOOL is not None:
        promtool("check", "metrics", text=text)


def test_counters_are_not_told_before_a_coordinator_knows_them():
    names = {one.name for one in samples({**LARGE, "account": None})}
    assert not names & {name for name in METRICS if kind_of(name) == "counter"}


def test_a_step_takes_what_checkpoints_tell_where_no_rank_does():
    found = {one.name: one.value for one in samples({**LARGE, "progress": None, "slow": None})}
    assert found["nvrx_step_seconds"] == 3.0 and found["nvrx_slow_ranks"] == 0.0
    assert not {"nvrx_cycle_steps", "nvrx_slow_lost_seconds"} & {*found}


@needs_promtool
def test_the_rules_are_right():
    promtool("check", "rules", str(REPO / "share/prometheus/nvrx_slurm.rules.yml"))
    promtool("test", "rules", str(REPO / "share/prometheus/nvrx_slurm.test.yml"))


@needs_promtool
def test_the_dashboard_asks_what_prometheus_understands(tmp_path):
    panels = json.loads((REPO / "share/grafana/nvrx_slurm.json").read_text())["panels"]
    asked = [target["expr"].replace("$job_id", ".*") for panel in panels for target in panel["targets"]]
    rules = [{"record": f"panel_{number}", "expr": expr} for number, expr in enumerate(asked)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # YAML, too
    promtool("check", "rules", str(tmp_path / "rules.yml"))


@pytest.mark.parametrize("path", ["share/grafana/nvrx_slurm.json", "share/prometheus/nvrx_slurm.rules.yml"])
def test_dashboard_and_rules_name_what_there_is(path):
    text = (REPO / path).read_text()
    named = set(re.findall(r"\bnvrx_(?!slurm)\w+", text))
    assert len(named) > 8 and named <= set(METRICS)
    if path.endswith(".json"):
        panels = json.loads(text)["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
    labels = {label for one in samples(LARGE) for label in one.labels}
    selectors = re.findall(r"(\w+)=~?\\?\"", " ".join(re.findall(r"nvrx_\w+\{([^}]*)\}", text)))
    assert set(selectors) <= labels


def test_the_page_lists_the_metrics():
    rows = re.findall(r"^\| `(nvrx_\w+)` \| (\w+) \| (.*) \|$", (REPO / "docs/reference/metrics.md").read_text(), re.M)
    assert rows == [(name, kind_of(name), text) for name, (text, _) in METRICS.items()]


# --- files ------------------------------------------------------------------------------------------------------------


def put(run, **change):
    run.mkdir(parents=True, exist_ok=True)
    job = {**GOOD["job"], "job": run.parent.name, "run": run.name}
    (run / "status.json").write_text(json.dumps({**LARGE, "end": None, "written": time.time(), "job": job, **change}))


def test_what_is_shown(tmp_path):
    """Runs that live, have just ended or fell silent; not what is old, and no two series alike."""
    now = time.time()
    put(tmp_path / "a/1/r0", written=now - 500)  # silent, and requeued
    put(tmp_path / "a/1/r1")
    put(tmp_path / "a/2/r0", written=now - 500)
    put(tmp_path / "a/3/r0", state="ended", end={"code": 0}, written=now - 500)
    put(tmp_path / "a/4/r0", state="ended", end={"code": 0}, written=now - 700)
    put(tmp_path / "a/5/r0", written=now - 90000)
    put(tmp_path / "a/6/r0", written=now - 500)  # ended by Slurm
    (tmp_path / "a/6/r0/result.json").write_text('{"code": 137}')
    put(tmp_path / "a/7/r0", version=2)
    put(tmp_path / "b/1/r1", written=now - 5, cycle=3)  # of another user, by the same name, and older
    (tmp_path / "a/8/r0").mkdir(parents=True)
    (tmp_path / "a/latest").symlink_to("1/r1")
    trees = Trees(f"{tmp_path}/*")
    for _ in range(2):
        trees.scan()
        shown = {(job, run) for job, run in trees.runs}
        assert shown == {("1", "r1"), ("2", "r0"), ("3", "r0"), ("6", "r0")}
    assert 'unreadable_runs{log_dir="' + f'{tmp_path}/*"}} 1.0' in "".join(text for _, text in trees.own)
    put(tmp_path / "a/5/r1")
    trees.scan()
    assert ("5", "r1") in trees.runs
    text = nvrx("metrics", "--log-dir", tmp_path / "b", "--log-dir", tmp_path / "a")
    told = text.stdout.splitlines()
    assert len({one.rpartition(" ")[0] for one in told}) == len(told)
    assert 'nvrx_cycle{job_id="1",run="r1"} 466.0' in told
    assert {'nvrx_job_end_code{job_id="6",run="r0"} 137.0', 'nvrx_job_end_code{job_id="3",run="r0"} 0.0'} <= {*told}


def test_one_user_neither_fills_the_memory_nor_takes_all_the_time(tmp_path, monkeypatch):
    """Who writes a log tree may make as many jobs, and runs of a job, as there is room for."""
    for job in range(5):
        put(tmp_path / f"a/{job}/r0")
    for run in range(5):
        put(tmp_path / f"b/9/r{run}")
    text = sum(len(line(one)) for one in samples({**LARGE, "job": {**LARGE["job"], "job": "1", "run": "r0"}}))
    monkeypatch.setattr(metrics, "_MOST_BYTES", 3 * text + 999)
    trees = Trees(str(tmp_path / "a"))
    trees.scan()
    assert len(trees.runs) == 3 and "unreadable_runs" in trees.own[-1][0] and trees.own[-1][1].endswith(" 2.0\n")
    now = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(time=time.time, monotonic=lambda: now[0]))
    read = metrics.content
    monkeypatch.setattr(metrics, "content", lambda run: now.__setitem__(0, now[0] + 20.0) or read(run))
    trees = Trees(str(tmp_path / "b"))
    for _ in range(2):
        trees.scan()
        assert {run for _, run in trees.runs} == {"r4", "r3"}


def test_of_two_runs_by_one_name_in_a_tree_the_later_is_shown(tmp_path):
    for place, cycle, ago_s in (("1", 5, 0.0), ("copy_of_1", 4, 9.0), ("another", 3, 12.0)):
        put(tmp_path / place / "r0", cycle=cycle, written=time.time() - ago_s)
        found = json.loads((tmp_path / place / "r0/status.json").read_text())
        found["job"]["job"] = "1"
        (tmp_path / place / "r0/status.json").write_text(json.dumps(found))
    for order in (sorted, lambda names: sorted(names, reverse=True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(metrics, "names_in", lambda tree, order=order: order(os.listdir(tree)))
            trees = Trees(str(tmp_path))
            trees.scan()
        assert 'nvrx_cycle{job_id="1",run="r0"} 5.0\n' in [text for _, text in trees.runs["1", "r0"].lines]


# --- HTTP -------------------------------------------------------------------------------------------------------------


@contextmanager
def served(*words):
    """A URL, and the port."""
    command = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "metrics", "serve", "--port=0", "--every=0.1", *words]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            yield url, int(url.split(":")[2].split("/")[0])
        finally:
            server.terminate()
            assert server.wait(30) == 0


def get(url):
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_it_is_served_whatever_clients_and_file_systems_do(tmp_path):
    put(tmp_path / "7/r0")
    (tmp_path / "8/r0").mkdir(parents=True)
    os.mkfifo(tmp_path / "8/r0/status.json")  # no regular file: it is not waited for
    with served("--log-dir", str(tmp_path)) as (url, port), socket.create_connection(("127.0.0.1", port)) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")  # and no more
        deadline_s = time.monotonic() + 30
        while 'nvrx_cycle{job_id="7"' not in (told := get(url))[1]:
            assert time.monotonic() < deadline_s
        assert "version=0.0.4" in told[0]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(url.replace("/metrics", "/etc"))
        more = [socket.create_connection(("127.0.0.1", port)) for _ in range(12)]  # they say nothing
        assert 'nvrx_cycle{job_id="7"' in get(url)[1]
        more[0].settimeout(30)
        with suppress(ConnectionResetError):
            assert more[0].recv(1) == b""
        for one in more:
            one.close()


@pytest.mark.parametrize("words", [["--port=70000"], ["--port=x"], ["--address=256.0.0.1"], ["--every=0"], ["taken"]])
def test_a_bad_place_to_listen_is_one_sentence(words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [f"--port={taken.getsockname()[1]}"] if words == ["taken"] else words
        done = nvrx("metrics", "serve", *words)
    assert done.exit_code == 2 and "Traceback" not in done.output, done.output


# --- OpenTelemetry ----------------------------------------------------------------------------------------------------

E, M = "OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_METRICS_"
PLAIN = OtlpTarget("http://c:4318/v1/metrics", resource=(("service.name", "nvrx_slurm"),))
TARGETS = {
    "none": ({M + "HEADERS": "a=b"}, None),
    "base": ({E + "ENDPOINT": "http://c:4318/"}, PLAIN),
    "as it is": (
        {M + "ENDPOINT": "http://c:4318/x", E + "ENDPOINT": "http://d"},
        replace(PLAIN, url="http://c:4318/x"),
    ),
    "headers": (
        {E + "ENDPOINT": "http://c:4318", E + "HEADERS": "a=b", M + "HEADERS": "k=v%20w, api-key=s"},
        replace(PLAIN, headers=(("k", "v w"), ("api-key", "s"))),
    ),
    "times": (
        {E + "ENDPOINT": "http://c:4318", M + "TIMEOUT": "250", "OTEL_METRIC_EXPORT_INTERVAL": "1000"},
        replace(PLAIN, timeout_s=0.25, every_s=1.0),
    ),
    "resource": (
        {E + "ENDPOINT": "http://c:4318", "OTEL_SERVICE_NAME": "s", "OTEL_RESOURCE_ATTRIBUTES": "a.b=c"},
        replace(PLAIN, resource=(("service.name", "s"), ("a.b", "c"))),
    ),
    "disabled": ({E + "ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}, None),
    "another exporter": ({E + "ENDPOINT": "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, None),
    "grpc": ({E + "ENDPOINT": "http://c:4317", E + "PROTOCOL": "grpc"}, "http/json"),
    "no url": ({E + "ENDPOINT": "c:4318"}, "http://HOST"),
    "a secret in the wrong form": ({E + "ENDPOINT": "http://c:4318", E + "HEADERS": "secret"}, "key=value"),
    "a line in a value": ({E + "ENDPOINT": "http://c:4318", E + "HEADERS": "a=b%0d%0ac: d"}, "key=value"),
    "no number": ({E + "ENDPOINT": "http://c:4318", E + "TIMEOUT": "-1"}, "milliseconds"),
}


@pytest.mark.parametrize(("env", "wanted"), TARGETS.values(), ids=TARGETS)
def test_the_variables_of_opentelemetry(env, wanted):
    target = otlp_target(env)
    if isinstance(wanted, str):
        assert target is not None and wanted in target.problem and "secret" not in target.problem and not target.url
    else:
        assert target == wanted
