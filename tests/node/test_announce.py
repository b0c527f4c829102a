"""--ft-notify, --ft-slurm-comment and metrics: what a receiver gets, and what a receiver that hangs costs."""

import asyncio
import json
import os
import signal
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from agent_harness import QUICK, UNTIL_TOLD, kill, says, up
from waits import until

from nvrx_slurm.config.layers import resolve
from nvrx_slurm.errors import UsageError
from nvrx_slurm.node.publish import announce

pytestmark = pytest.mark.process


@pytest.fixture
def posted():
    """A receiver's URL, and what it has got."""
    got = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/hook", got
        server.shutdown()
        thread.join()


def test_a_lost_node_and_the_end(rig, posted):
    """The next coordinator tells of it, and each thing is told once."""
    url, got = posted
    script = rig.script(UNTIL_TOLD + "sys.exit(3)")
    first, second, third = rig.nodes(3, "2:3", script, "--max-restarts=1", f"--ft-notify={url}", *QUICK)
    kill(first, up(first, 0)[1])
    says("cycle 1: ", second, third)
    until(lambda: {"restart", "no-spare", "few-restarts"} <= {one["event"] for one in got}, "the loss is told")
    rig.open("end1")
    assert [second.wait(), third.wait()] == [1, 1]
    assert sorted(one["event"] for one in got) == ["few-restarts", "give-up", "no-spare", "restart"]
    last = next(one for one in got if one["event"] == "give-up")
    assert (
        last["end"]["code"] == 1
        and "code 1" in last["text"]
        and (last["restarts"]["used"], last["restarts"]["by_kind"]) == (1, {"node-lost": 1})
    )


def test_a_receiver_that_hangs_or_is_gone_costs_the_job_little(rig):
    script = rig.script("say('fails now')\nsys.exit(3)\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port in (silent.getsockname()[1], 1):
            one = rig.run(script, f"--ft-notify=http://127.0.0.1:{port}/x")
            one.line("fails now")
            began = time.monotonic()
            assert one.wait() == 1 and time.monotonic() - began < 12  # 4 s of it for the receiver
    assert "cannot reach 127.0.0.1:1" in one.text


def test_news_of_one_kind_come_once_a_minute_and_not_twice_in_a_row(monkeypatch):
    monkeypatch.setattr(announce, "_news", lambda view, began: [("restart", view["text"])])
    view = {"job": {"job": "7", "name": "x"}, **dict.fromkeys(("state", "cycle", "restarts", "end"))}
    posted = []

    async def run():
        one = announce.Announcer("http://here/x", 0.0, posted.append)
        one._posts.put = lambda what, work: posted.append(json.loads(work.args[1])["written"])
        for written, text in ((0, "a"), (59, "b"), (60, "b"), (200, "b"), (260, "a")):
            one.tell({**view, "term": 1, "written": written, "text": text})

    asyncio.run(run())
    assert posted == [0, 60, 260]


def test_the_comment_of_the_job(rig):
    nodes = rig.step((0, 1), 2, "2", rig.script(UNTIL_TOLD), "--ft-slurm-comment=true")
    for one in nodes:
        up(one, 0)
    asked = rig.dir / "asked"
    until(lambda: asked.exists() and "Comment=nvrx cycle 0, 0 restarts" in asked.read_text(), "the comment is set")
    rig.ends_well("end0", *nodes)
    assert "Comment=nvrx ended with code 0, 0 restarts" in asked.read_text()


def counters(body):
    """Of what was pushed."""
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    points = [(one["name"], point) for one in metrics if "sum" in one for point in one["sum"]["dataPoints"]]
    labels = [tuple(label["value"]["stringValue"] for label in point["attributes"]) for _, point in points]
    return {(name, *label): point["asDouble"] for (name, point), label in zip(points, labels, strict=True)}


def test_metrics_of_a_job_that_loses_its_coordinator(rig, posted):
    """No counter goes back, and the file is gone in the end."""
    url, got = posted
    otel = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_METRIC_EXPORT_INTERVAL": "1"}
    rig.before = "from nvrx_slurm.node.publish import publisher\npublisher.INTERVAL_S, publisher._SOON_S = 0.2, 0.05"
    flags = ("--max-restarts=3", f"--ft-metrics-file={rig.dir}/{{job}}.prom", *QUICK)
    first, second, third = rig.nodes(3, "2:3", rig.script(UNTIL_TOLD), *flags, **otel)
    os.kill(up(second, 0)[1], signal.SIGKILL)
    pid = up(first, 1)[1]
    file = rig.dir / f"{rig.run_dir.parent.name}.prom"
    until(lambda: file.exists() and 'state="running"} 1.0' in file.read_text(), "the file tells that the job runs")
    assert "nvrx_restarts_total" in file.read_text()
    until(lambda: any("nvrx_restarts_total" in key for one in got[-1:] for key, *_ in counters(one)), "it is pushed")
    kill(first, pid)
    says("cycle 2: ", second, third)
    before = len(got)
    until(lambda: len(got) > before + 5, "the next coordinator pushes")
    rig.ends_well("end2", second, third)
    assert not file.exists()
    last = {}
    for key, value in (item for body in got for item in counters(body).items()):
        assert value >= last.get(key, 0.0), key
        last[key] = value
    assert {value for key, value in last.items() if key[0] == "nvrx_restarts_total"} == {2}
    spent = sum(value for key, value in last.items() if key[0] == "nvrx_node_seconds_total")
    assert spent == pytest.approx(3 * rig.result["account"]["wall_s"], abs=0.1)  # the last push is of the end


@pytest.mark.parametrize(
    "url", ["hooks.example", "ftp://a/b", "https://user:word@a/b", "https://a/b?token=1", "http://"]
)
def test_a_bad_url_is_one_sentence(url):
    with pytest.raises(UsageError, match="notify"):
        resolve({"ft_notify": url}, {})
