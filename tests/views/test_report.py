"""`nvrx report` on log trees: of any size, from event logs alone, with anything in the logs."""

import base64
import json
import math
import os
import random
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest
from toolbox import nvrx, nvrx_json

from nvrx_slurm import codec
from nvrx_slurm import types as t
from nvrx_slurm.core.account.account import BUCKETS
from nvrx_slurm.core.account.figures import so_far, to_json
from nvrx_slurm.declared import plain
from nvrx_slurm.records import Counted, CycleCost
from nvrx_slurm.views import svg
from nvrx_slurm.views.coordinator_logs import cycles_in, logs_of
from nvrx_slurm.views.report import facts_of, lost_apart
from nvrx_slurm.views.timeline import StepTime, Stretch, paces

pytestmark = pytest.mark.fast


REPO = Path(__file__).resolve().parents[2]
WALL, CYCLE_S = 1_795_000_000.0, 1000.0  # each cycle: what follows, and 800 s of training
PHASES = {"start": 5.0, "import": 20.0, "init": 10.0, "recomputed": 100.0, "detect": 60.0, "stop": 3.0, "plan": 2.0}
TRAINED = CYCLE_S - sum(PHASES.values())
EVIL = (
    "<script>alert(1)</script>", "</pre></div><img src=http://a/x onerror=1>", "\x1b[2J\x1b]0;x\x07", "\u202eevil",
    "\x00\x9b31m", "\ud800", "x" * 1_000_000, "]]><!--", '" onload="x', "https://evil.example",
    "api_key=sk-12345678abcdef",
)  # fmt: skip


def restart(cycle, nodes, cause="boom"):
    at_s, host = cycle * CYCLE_S + 995.0, cycle % (nodes - 1)
    return t.RestartRecord(
        cycle, at_s, 5.0, cause, 8 * host, "", f"n{host}", host, 1, 100 * cycle + 90, 100 * cycle,
        detect_s=60.0,
    )  # fmt: skip


def history(cycle, nodes, causes):
    """At the plan of a cycle."""
    restarts = tuple(restart(c, nodes, causes[c % len(causes)]) for c in range(max(0, cycle - 8), cycle))
    return t.History(cycle, began_s=WALL, restarts=restarts, promoted=("n7", "n6"))


def counted(cycle, nodes):
    """After the plan of a cycle; the last node is a spare."""
    times = {bucket: cycle * took_s for bucket, took_s in ({"productive": TRAINED} | PHASES).items()}
    seconds = tuple(times.get(bucket, 0.0) for bucket in BUCKETS)
    idle = tuple(cycle * CYCLE_S * (bucket == "spare_idle") for bucket in BUCKETS)
    told = [t.NodeTime(str(n), f"n{n}", "active", seconds) for n in range(min(nodes - 1, 31))]
    if nodes > 32:
        sums = tuple((nodes - 32) * s + idle_s for s, idle_s in zip(seconds, idle, strict=True))
        told.append(t.NodeTime("", f"{nodes - 31} nodes", "out", sums))
    else:
        told.append(t.NodeTime(str(nodes - 1), f"n{nodes - 1}", "here", idle))
    account = t.Account(cycle * CYCLE_S, cycle * TRAINED, tuple(told), (), t.SectionTime("", 0.0))
    costs = [CycleCost(c, 35.0 * (c > 0), 100.0) for c in range(max(0, cycle - 8), cycle + 1)]
    return Counted(cycle, account, tuple(costs))


def builtins_of(record):
    return json.loads(codec.to_json(codec.fitted(record)))


def fault(cycle, nodes, text):
    host = cycle % (nodes - 1)
    found = t.Finding("gpu-ecc", t.LineRole.CAUSE, t.Blame.NODE, t.Confidence.LIKELY, t.Remedy.NONE, "", text[:300])
    tail = f"{text}\nlast line"
    coded = builtins_of(t.RankFault(t.FaultKind.EXIT, f"n{host}", host, 8 * host, 0, 1, 1, text, tail, "/l", found))
    return dict(coded)


def step(at_s, event, said=(), **more):
    commands = [{"type": "Say", "text": text} for text in said]
    line = {"now": at_s, "wall": WALL + at_s, "event": event, "state": "RUNNING", "commands": commands, **more}
    return json.dumps(line, separators=(",", ":"))


def write(run, nodes, cycles, causes=("boom",), filler=0):
    """The event log of a job with `cycles` restarts, one coordinator, and a torn last line."""
    (run / "events").mkdir(parents=True)
    (run / "cycle_0").mkdir()
    ids = [f"n{n}-{n}-0123abcd" for n in range(nodes)]
    to = [f"{name} {n} {8 * n}" for n, name in enumerate(ids[:-1])] + [f"{ids[-1]} -1 -1"]
    lines = ['{"nvrx":"0.1.0","core":"coordinator","now":0.0}']
    for n, name in enumerate(ids):
        joined = {"type": "Register", "node": builtins_of(t.Node(name, n, f"n{n}", "10.0.0.1", 8)), "port": 1}
        lines.append(step(0.0, {"type": "Joined", "message": joined}))
    ready = {"type": "FromAgent", "node_id": ids[0], "message": {"type": "Ready", "term": 1, "cycle": 0, "port": 1}}
    for cycle in range(cycles + 1):
        at_s = cycle * CYCLE_S
        plan = t.Plan(1, cycle, history(cycle, nodes, causes), 10, nodes - 1, 8 * (nodes - 1), "h", 1)
        lines.append(step(at_s, ready, (f"cycle {cycle} begins",), plans=[{"plan": builtins_of(plan), "to": to}]))
        lines.append(step(at_s, builtins_of(counted(cycle, nodes))))
        if cycle < cycles:
            text = causes[cycle % len(causes)]
            failed = {"type": "RanksFailed", "term": 1, "cycle": cycle, "faults": [fault(cycle, nodes, text)]}
            event = {"type": "FromAgent", "node_id": ids[0], "message": failed}
            lines.append(step(at_s + 995.0, event, (text, "restart of all")))
            lines += [step(at_s + 996.0, ready)] * filler
    text = "\n".join([*lines, step(cycles * CYCLE_S + 300.0, ready), '{"now":9,"wal'])
    (run / "events/coordinator.jsonl").write_bytes(text.encode() + b"\xff\xfe")
    return run


class Page(HTMLParser):
    """What a page is made of. It refuses tags that are not closed in their order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.open, self.shown = (
            Counter[str](),
            list[tuple[str, str, str]](),
            list[str](),
            "",
        )
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.shown += data * (self.open[-1:] != ["style"])


ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "main", "p", "h1", "h2", "dl", "dt", "dd", "div", "ul", "li", "i",
    "svg", "text", "rect", "path", "circle", "image", "a", "details", "summary", "table", "thead", "tbody", "tr", "th",
    "td", "b", "span", "pre", "footer",
}  # fmt: skip


def looked_at(path):
    """A page that needs nothing from outside, and has a table for each picture."""
    text = path.read_text("utf-8")
    page = Page(text)
    assert {*page.tags} <= ALLOWED
    for tag, name, value in page.attributes:
        assert name not in ("src", "style", "srcset") and not name.startswith("on"), (tag, name)
        assert name != "href" or value.startswith("#i" if tag == "a" else "data:image/png;base64,")
    ids = {f"#{value}" for _, name, value in page.attributes if name == "id"}
    assert {value for tag, name, value in page.attributes if (tag, name) == ("a", "href")} <= ids
    assert "url(" not in text and "@import" not in text and "default-src &#x27;none" not in text
    assert page.tags["table"] >= page.tags["svg"] > 1
    assert all(ord(char) >= 32 or char in "\n\t" for char in text) and "\u202e" not in text
    return page


def page_of(run, most_bytes=2_000_000):
    path = run.parent / "a.html"
    done = nvrx("report", run, "-o", path)
    assert (done.exit_code, done.output.strip()) == (0, str(path))
    assert path.stat().st_size < most_bytes
    return looked_at(path)


def test_event_logs_alone_tell_it_all(tmp_path):
    run = write(tmp_path / "7/r0", 8, 5)
    page = page_of(run, 150_000)
    for part in (
        "no result",
        "job 7",
        "gpu-ecc",
        "restart of all",
        "last line",
        "n4",
        "work lost",
        "spare",
        "Table of the steps",
    ):
        assert part in page.shown, part
    facts = facts_of(run)
    assert [(one.bucket, one.took_s) for one in facts.incidents[1].phases] == [
        (bucket, pytest.approx(PHASES[bucket]))
        for bucket in ("recomputed", "detect", "stop", "plan", "start", "import", "init")
    ]
    assert sum(one.took_s for one in facts.stretches) == pytest.approx(facts.wall_s) == 5300.0
    assert (
        facts.incidents[1].lost_s == 200.0 and facts.summary["lost_s"] == 1000.0 and facts.summary["lost_steps"] == 450
    )
    assert facts.paces[1].step_s == pytest.approx((TRAINED + 100.0) / 190)
    by_cause = facts.summary["by_cause"]
    assert [(one["kind"], one["restarts"]) for one in by_cause] == [("exit gpu-ecc", 5)]
    found = nvrx_json("goodput", run, "--json")
    assert found["by_cause"] == by_cause and "took over 1 time;" not in " ".join(found["advice"])
    assert "took over 2 times" in " ".join(found["advice"])
    assert facts.incidents[1].again == "forked" and "ranks of the next cycle" in page.shown


@pytest.mark.parametrize("nodes", [8, 100])
def test_the_time_since_the_last_plan_is_what_a_status_estimates(tmp_path, nodes):
    """Of more than 32 nodes the events hold a sum. A spare that made its stream anew got the plan twice."""
    run = write(tmp_path / "7/r0", nodes, 5)
    assert nvrx_json("goodput", run, "--json")["productive_share"] is None
    log = run / "events/coordinator.jsonl"
    plan = log.read_bytes().rpartition(b'"plans":[')[2].partition(b',"to":')[0]
    again = b'{"now":1,"wall":%d,"plans":[%s,"to":["n%d-%d-0123abcd -1 -1"]}]}' % (
        WALL + 5 * CYCLE_S + 9, plan, nodes - 1, nodes - 1,
    )  # fmt: skip
    torn = b'\n{"now":9,"wal'
    log.write_bytes(log.read_bytes().replace(torn, b"\n" + again + torn))
    wall_s = 5 * CYCLE_S + 405.0
    active = nodes - 1
    account = so_far(counted(5, nodes).account, wall_s, nodes, active, wall_s)
    told = {"began": WALL, "written": WALL + wall_s, "account": account}
    (run / "status.json").write_text(json.dumps(told))
    found = nvrx_json("goodput", run, "--json")
    took = {"productive": active * (5 * TRAINED + 400.0), "spare_idle": wall_s, "other": active * 5.0}
    assert {bucket: found["node_seconds"][bucket] for bucket in took} == pytest.approx(took)
    assert sum(found["node_seconds"].values()) == pytest.approx(nodes * wall_s)
    assert found["productive_share"] == pytest.approx(account["productive_s"] / account["allocated_s"])
    assert found["job_ettr"] == pytest.approx((5 * TRAINED + 400.0) / wall_s)
    assert (found["wall_s"], found["grades"]["productive"]) == (wall_s, "estimated")
    facts = facts_of(run)
    assert facts.summary["productive_share"] == found["productive_share"]
    last = [one for one in facts.stretches if one.begin_s >= 5 * CYCLE_S]
    assert [(one.bucket, one.took_s) for one in last] == [("productive", 400.0), ("other", 5.0)]


@pytest.mark.parametrize("change", [{"counted_s": 4000.0}, {"progress": {"ranks": 2, "stepped": 0}}])
def test_a_ratio_is_not_told_where_the_time_since_the_last_plan_is_not_known(tmp_path, change):
    """The status is of the plan before, or ranks have made no step yet."""
    run = write(tmp_path / "7/r0", 8, 5)
    account = so_far(counted(5, 8).account, 5400.0, 8, 7, 5400.0)
    told = {"began": WALL, "written": WALL + 5400.0, **change, "account": {**account, **change}}
    (run / "status.json").write_text(json.dumps(told))
    assert "\n        -  job ettr" in nvrx("goodput", run).output
    assert "not known" in page_of(run).shown
    row = nvrx("goodput", "--since", "9999w", PET_LOG_DIR=str(tmp_path)).output.splitlines()[1]
    assert row.split()[0] == "7" and row.split().count("-") == 2


def test_only_what_is_new_in_a_plan_changes_a_node(tmp_path):
    run = write(tmp_path / "r0", 8, 4)
    log = run / "events/coordinator.jsonl"
    *head, plan, tail = re.split(r'(?="plans":)', log.read_text(errors="replace"))
    third = head[3].replace('"n1-1-0123abcd 1 8",', "").replace('"n7-7-0123abcd -1 -1"', '"n7-7-0123abcd 1 8"')
    torn = plan[: plan.index('"n6-6')] + "\n" + plan.rpartition("\n")[2]  # of cycle 3: its end was never written
    log.write_text("".join([*head[:3], third, torn, tail]))
    facts = facts_of(run)
    roles = {row.nodes[0][0]: [role for _, role in row.roles] for row in facts.rows}
    assert roles["n0"] == ["wait_nodes", "active"]
    assert roles["n1"] == ["wait_nodes", "active", "excluded", "active"]  # it was back in cycle 4
    assert roles["n7"] == ["wait_nodes", "spare_idle", "active", "spare_idle"]
    assert len(cycles_in(logs_of(run))) == 1 + 4


def test_a_result_comes_before_the_logs_and_is_enough(tmp_path):
    run, evidence = write(tmp_path / "r0", 8, 5), [{"rank": r, "frames": ["a.py:1 in f"], "state": "S"} for r in (0, 2)]
    (run / "cycle_0/hang.json").write_text(json.dumps({"ranks": [*evidence, {"rank": 1, "frames": [], "state": "T"}]}))
    log = run / "events/coordinator.jsonl"
    hang = {"type": "HangFound", "cycle": 0, "why": "it is stopped", "culprits": [], "ranks": []}
    log.write_text(
        log.read_text(errors="replace").replace(
            '[{"type":"Say","text":"boom"}', f"[{json.dumps(hang, separators=(',', ':'))}", 1
        )
    )
    past = history(6, 8, ("boom",))
    cause = {
        "kind": "exit",
        "host": "n5",
        "infra_rank": 5,
        "rank": 40,
        "exit_code": 7,
        "message": "the end",
        "finding": {
            "rule": "out-of-memory", "role": "cause", "blame": "user", "confidence": "likely", "remedy": "restart",
            "fingerprint": "", "line": "", "peers": [],  # peers: as older versions wrote
        },
    }  # fmt: skip
    last = {"cycle": 5, "at_s": 5900.0, "rank": 40, "kind": "exit", "host": "n5", "rule": ""}
    result = {
        "code": 7, "first_cause": cause, "last_faults": [last], "faults": [last], "duration_s": 6000.0,
        "summary": "5 restarts, 84.1 % productive", "ended": "2026-11-25T14:18:58+00:00",
        "restarts": [plain(one) for one in past.restarts[:-1]],
        "account": to_json(counted(6, 8).account),
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))
    both = facts_of(run)
    assert "code 7" in both.sentence and "the end" in both.sentence and "productive" not in both.sentence
    assert [(one.ends, one.host) for one in both.incidents][-2:] == [(False, "n4"), (True, "n5")]
    assert both.incidents[0].waits == (("0, 2", "a.py:1 in f"), ("1", "no stack, process state T"))
    log.unlink()
    alone = facts_of(run)
    assert [one.lost_s for one in alone.incidents] == [one.lost_s for one in both.incidents]
    assert sum(one.took_s for one in alone.stretches) == pytest.approx(6000.0)
    page_of(run)


def test_what_ranks_print_is_text(tmp_path):
    letters, random_ = "<>&\"'=/!-[](){};:%\\ abc\n\r\t\x00\x1b\x7f\x9b\u202e\ud800é", random.Random(0)
    fuzz = tuple("".join(random_.choices(letters, k=60)) for _ in range(150))
    run = write(tmp_path / "r0", 8, len(EVIL) + len(fuzz), (*EVIL, *fuzz))
    page = page_of(run)
    assert "<script>alert(1)" in page.shown and "\\u202eevil" in page.shown and "12345678abcdef" not in page.shown


def test_the_largest_job_takes_a_second_and_two_megabytes(tmp_path):
    run = write(tmp_path / "r0", 2048, 466, ("rank 3 hung: it waits in all_reduce " * 4,), 20)
    words = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "report", str(run), "-o", str(tmp_path / "a.html")]
    before = os.times()
    subprocess.run(words, env={**os.environ, "PYTHONPATH": str(REPO)}, check=True, capture_output=True)
    after = os.times()
    took_s = after.children_user + after.children_system - before.children_user - before.children_system
    assert took_s < 2.0  # 0.3 s where nothing else runs
    assert (tmp_path / "a.html").stat().st_size < 2_000_000
    assert looked_at(tmp_path / "a.html").tags["image"] == 0  # rows of equal nodes are one


def test_many_cells_are_one_image(tmp_path, monkeypatch):
    monkeypatch.setattr(svg, "_MOST_RECTANGLES", 100)
    page = page_of(write(tmp_path / "r0", 60, 100))
    light, dark = (value for tag, _, value in page.attributes if tag == "image" and value.startswith("data:"))
    assert page.tags["image"] == 2 and base64.b64decode(light.partition(",")[2]).startswith(b"\x89PNG\r\n")
    css = Path(svg.__file__).with_name("report.css").read_text()
    assert light != dark and all(f"--{name}:#{value}" in css for name, value in svg._DARK.items())


# What is seen of linear red, green and blue without one of three kinds of cones (Machado and others, 2009).
SIGHT = {
    "all": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "no green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
    "no blue": ((1.256, -0.077, -0.179), (-0.078, 0.931, 0.148), (0.005, 0.691, 0.304)),
}


def lab(colour, sight):
    linear = [(int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (0, 2, 4)]
    r, g, b = (min(1.0, max(0.0, sum(map(float.__mul__, row, linear)))) for row in SIGHT[sight])
    x, y, z = ((0.43 * r + 0.38 * g + 0.19 * b) ** (1 / 3), (0.21 * r + 0.72 * g + 0.07 * b) ** (1 / 3),
               (0.02 * r + 0.11 * g + 0.87 * b) ** (1 / 3))  # fmt: skip
    return 116 * y, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize("theme", [{}, svg._DARK], ids=["light", "dark"])
def test_each_two_colours_differ_for_everybody(sight, theme):
    values = {name: value for name, (value, _, _) in svg.COLOURS.items() if value} | theme
    for one, other in combinations(values, 2):
        assert math.dist(lab(values[one], sight), lab(values[other], sight)) > 14.0, (one, other)


TOLD = {"ranks": 16, "stepped": 16, "steps": 41, "step_s": 0.5, "still_s": 4800.0, "open": []}


def test_lost_and_excluded_nodes_are_apart_and_the_line_of_steps_ends_at_the_last_checkpoint(tmp_path: Path) -> None:
    run = write(tmp_path / "r0", 8, 5)
    log = run / "events/coordinator.jsonl"
    *head, plan, tail = re.split(r'(?="plans":)', log.read_text(errors="replace"))
    gone = [part.replace('"n1-1-0123abcd 1 8",', "").replace('"n2-2-0123abcd 2 16",', "") for part in (plan, tail)]
    log.write_text("".join([*head, *gone]).replace('"promoted"', '"lost":["n1"],"promoted"'))
    job = {"command": "train.py --api-key abcdef12"}
    (run / "status.json").write_text(json.dumps({"job": job, "checkpoint": {"iteration": 700}, "progress": TOLD}))
    facts = facts_of(run)
    assert facts.sentence.endswith(" Steps: step 41 of this cycle, no step for 1 h 20 min, 0.5 s for each.")
    roles = {row.nodes[0][0]: row.roles[-1][1] for row in facts.rows}
    assert (roles["n1"], roles["n2"], roles["n3"]) == ("lost", "excluded", "active")
    assert (facts.paces[-1].first, facts.paces[-1].steps, facts.paces[-1].end_s) == (400, 300, facts.wall_s)
    assert facts.command == "train.py --api-key [secret]"
    assert lost_apart({"excluded": 9.0}, 2.0) == {"excluded": 7.0, "lost": 2.0}
    assert lost_apart({"excluded": 9.0}, 8.999) == {"lost": 8.999}


def test_a_spare_that_was_lost_is_drawn_as_lost_and_an_ended_job_tells_no_step_of_a_cycle(tmp_path):
    run = write(tmp_path / "r0", 8, 5)
    account = to_json(counted(6, 8).account)
    account["nodes"][-1]["seconds"]["excluded"] = account["node_seconds"]["excluded"] = 500.0
    result = {
        "code": 0, "duration_s": 6000.0, "summary": "1 lost node", "ended": "2026-11-25T14:18:58+00:00",
        "restarts": [], "account": account, "lost_nodes": ["n7"],
    }  # fmt: skip
    (run / "result.json").write_text(json.dumps(result))
    (run / "status.json").write_text(json.dumps({"job": {}, "progress": TOLD}))
    facts = facts_of(run)
    roles = {row.nodes[0][0]: row.roles for row in facts.rows}
    assert roles["n7"][-2:] == ((0.0, "spare_idle"), (5500.0, "lost")) and facts.nodes[-1]["seconds"]["lost"] == 500.0
    assert facts.sentence.endswith("1 lost node.")


def test_a_cycle_that_tells_no_iteration_is_drawn_up_to_its_checkpoint() -> None:
    found = {0: (Stretch(2.0, 10.0, "productive"), Stretch(12.0, 3.0, "recomputed"))}
    one = {"cycle": 0, "at_s": 15.0, "iteration": -1, "checkpoint": 20}
    assert [*paces(found, [one])] == [StepTime(2.0, 12.0, 0, 20, 0.5)]
    assert [*paces(found, [{**one, "iteration": 26}])] == [StepTime(2.0, 15.0, 0, 26, 0.5)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "nothing is known"),
        ({"result.json": '{"account": {"node_seconds": []}}'}, "has not written"),
        ({"events/coordinator.jsonl": '{"wall":1.0,"plans":[{"plan":{"cycle":"x"},"to":[]}]}\n'}, "has not written"),
    ],
)
def test_bad_input_gets_one_sentence(tmp_path, content, said):
    for name, text in {"r0/x": "", **{f"r0/{name}": text for name, text in content.items()}}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = nvrx("report", tmp_path / "r0")
    assert done.exit_code == 2 and said in done.output
    assert nvrx("report", tmp_path / "r0/x").exit_code == nvrx("report", tmp_path / "nowhere").exit_code == 2
