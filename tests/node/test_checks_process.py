"""The preflight and its process, which stops, babbles, ends or never begins: bounded, said once, nothing left."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from agent_harness import stat
from waits import WAIT_S, until

from nvrx_slurm.config.layers import Config
from nvrx_slurm.core.agent import events as ag
from nvrx_slurm.declared import replace
from nvrx_slurm.errors import UsageError
from nvrx_slurm.health import outcome
from nvrx_slurm.node.preflight import checks_process as module
from nvrx_slurm.node.preflight.head_start import PreflightSpec, Reclaim, preflight_spec
from nvrx_slurm.node.preflight.preflight import Preflight

pytestmark = pytest.mark.process


SPEC = PreflightSpec(("--when=preflight", "--only=lustre"), Reclaim(0.0, 512.0, 2.0))
WAITS = Reclaim(1000.0, 512.0, 0.01)
GOOD = outcome.ANSWER + '{"node": "n", "when": "preflight", "findings": [], "notes": [], "seconds": 0, "asked": true}'
FINDING = '"findings": [{"check": "lustre", "verdict": "%s", "text": "%s", "seconds": 0, "action": "%s"}]'
BAD = GOOD.replace('"findings": []', FINDING % ("fail", "gone", "drain"))
SAYS = f"import sys\nfor line in sys.stdin: print({GOOD!r}, flush=True)\n"


class Bench:
    """A preflight that runs `program` for its checks, what it posted and what it said."""

    def __init__(self, directory, spec):
        self.said = []
        self.posted = []
        self.refused = []
        self.pids = []
        self.preflight = Preflight(spec, 0, directory, self.said.append, self.posted.append, self.refused.append)
        self.checks = self.preflight.checks

    def handle(self, command):
        self.preflight.handlers()[type(command)](command)

    async def prepare(self, cycle=0, used=False):
        return await asyncio.wait_for(self.preflight.prepare(cycle, used), WAIT_S)

    def start(self):
        self.checks.spawn()
        assert self.checks.pid is not None
        self.pids.append(self.checks.pid)
        return self.checks.pid

    async def until(self, condition):
        while not condition():
            await asyncio.sleep(0.005)


def run(directory, story, spec=SPEC):
    """Play a story; afterwards no process and no descriptor may be left."""
    before = set(os.listdir("/proc/self/fd"))

    async def play():
        bench = Bench(directory, spec)
        try:
            await asyncio.wait_for(story(bench), 2 * WAIT_S)
        finally:
            await bench.preflight.close()
        assert bench.checks.pid is None
        return bench

    bench = asyncio.run(play())
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [pid for pid in bench.pids if Path(f"/proc/{pid}").exists()]
    return bench


def told(program):
    """Instead of the checks, this program."""
    return replace(SPEC, program=(sys.executable, "-c", program))


def test_one_process_is_asked_until_it_stops_and_then_another_one(tmp_path):
    """It is waited for no longer than its answer may take, and costs the cycle nothing."""

    async def story(bench):
        for used in (False, True):
            pid = bench.start()
            assert [await bench.prepare(cycle) for cycle in (0, 1)] == ["", ""] and bench.checks.pid == pid
            os.kill(pid, signal.SIGSTOP)
            until(lambda pid=pid: stat(pid)[1] == "T", "that it is stopped")
            assert [await bench.prepare(2, used), await bench.prepare(3)] == ["", ""]
            assert bench.checks.pid not in (pid, None)

    said = "\n".join(run(tmp_path, story, replace(SPEC, answer_s=1.0, reclaim=Reclaim(0.1, 512.0, 2.0))).said)
    assert said.count("did not answer within 1 s") == said.count("did not answer within 2.1 s") == 1, said


@pytest.mark.parametrize(
    "program, said",
    [
        ("while True: print('\\x1e{}', flush=True)", "not a health report: 'findings'"),
        ("while True: sys.stdout.write('x' * 65536)", "a line without an end"),
        # The site file is broken in the middle of the job.
        (f"if os.path.exists('once'): sys.exit(2)\nopen('once', 'w'), input(), print({GOOD!r})", "ended with 2"),
        (f"for line in sys.stdin: print('careful', file=sys.stderr), print({GOOD!r}, flush=True)", "careful"),
        (f"for line in sys.stdin: os.write(2, b'no end'), print({GOOD!r}, flush=True)", "no end"),
        (f"for line in sys.stdin: os.write(2, b'{{a C library}}\\n'), print({GOOD!r}, flush=True)", "{a C library}"),
    ],
)
def test_a_process_that_misbehaves_is_said_once_and_the_node_goes_on(tmp_path, program, said, monkeypatch):
    async def three_cycles(bench):
        bench.start()
        assert [await bench.prepare(cycle) for cycle in range(3)] == ["", "", ""]

    monkeypatch.chdir(tmp_path)
    bench = run(tmp_path, three_cycles, told(f"import os, sys\n{program}"))
    lines = bench.said
    assert sum(said in line for line in lines) == 1, lines
    assert not any("did not answer" in line for line in lines), lines
    assert len(lines) <= 3 and len("".join(lines)) < 1000 and bench.refused == [], lines


def test_one_that_dies_is_started_again_and_ever_more_slowly(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_RESPAWN_S", 0.01)
    ran = tmp_path / "ran"
    program = f"import time\nopen({str(ran)!r}, 'a').write(f'{{time.monotonic()}}\\n')\nraise SystemExit(5)"

    async def story(bench):
        bench.start()
        await bench.until(lambda: ran.exists() and len(ran.read_text().splitlines()) >= 7)

    run(tmp_path, story, told(program))
    times = [float(line) for line in ran.read_text().splitlines()]
    assert times[-1] - times[-2] >= 0.2  # 0.01 s, doubled five times


def test_an_idle_node_is_checked_now_and_then(tmp_path):
    """A spare that has passed and breaks later is given up before it is needed."""
    program = f"for answer in ({GOOD!r}, {GOOD!r}, {BAD!r}): input(), print(answer, flush=True)\nopen(0).read()"

    async def story(bench):
        await bench.preflight.start()
        await bench.until(lambda: len(bench.posted) == 2)

    bench = run(tmp_path, story, replace(told(program), idle_s=0.01))
    assert bench.posted == [ag.Prepared(""), ag.Sick("lustre: gone")] and bench.said == []


def test_a_working_node_is_left_alone_and_a_late_answer_is_not_the_next_one(tmp_path):
    """The check of the idle node is under way when the cycle starts, and would have failed."""
    asked = tmp_path / "asked"
    program = (
        f"input(), print({GOOD!r}, flush=True)\ninput(), open({str(asked)!r}, 'w')\n"
        f"input(), print({BAD!r}), print({GOOD!r}, flush=True)\n"
        f"import sys\nfor line in sys.stdin: open({str(asked)!r}, 'a').write(line)"
    )

    async def story(bench):
        await bench.preflight.start()
        await bench.until(asked.exists)
        bench.handle(ag.StartWorkers(None))
        bench.handle(ag.Prepare(False, 1))
        await bench.until(lambda: len(bench.posted) == 2)
        bench.handle(ag.StartWorkers(None))
        await asyncio.sleep(0.1)

    bench = run(tmp_path, story, replace(told(program), idle_s=0.01))
    assert bench.posted == [ag.Prepared(""), ag.Prepared("")] and bench.said == []
    assert asked.read_text() == ""


def test_settings_that_it_refuses_at_first_are_an_error(tmp_path):
    async def at_first(bench):
        await bench.preflight.start()
        await bench.until(lambda: bench.refused)

    bench = run(tmp_path, at_first, replace(SPEC, arguments=("--when=preflight", "--only=lustr")))
    assert isinstance(bench.refused[0], UsageError) and "did you mean lustre?" in str(bench.refused[0])
    assert (bench.said, bench.posted) == ([], [])


def test_no_process_at_all_is_said_and_the_node_goes_on(tmp_path, monkeypatch):
    async def story(bench):
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        bench.checks.spawn()
        assert bench.checks.pid is None
        assert [await bench.prepare(cycle) for cycle in range(2)] == ["", ""]
        monkeypatch.undo()
        assert await bench.prepare(2) == "" and bench.checks.pid is not None

    (said,) = run(tmp_path, story).said
    assert "goes unchecked" in said and "No such file" in said


@pytest.mark.parametrize(
    "verdict, action, why, said",
    [
        ("unknown", "drain", "", "cannot tell: "),
        ("fail", "warn", "", "warns: "),
        ("fail", "drain", "lustre: x", None),
    ],
)
def test_only_a_check_that_fails_outright_makes_a_node_unfit(tmp_path, verdict, action, why, said):
    report = GOOD.replace('"findings": []', FINDING % (verdict, "x", action))

    async def story(bench):
        assert [await bench.prepare(), await bench.prepare(1)] == [why, why]

    lines = run(tmp_path, story, told(SAYS.replace(repr(GOOD), repr(report)))).said
    assert [said in line for line in lines] == ([True] if said else [])


def test_a_node_service_is_asked_and_has_its_own_deadline():
    spec = preflight_spec(replace(Config(), ft=replace(Config().ft, node_health_check_endpoint="/service")))
    assert {"--deadline=65", "--expect=node_service=/service"} <= set(spec.arguments) and spec.answer_s == 67.0


def memory(*used_mb):
    """A program that answers questions of GPU memory with these, and those of checks with GOOD."""
    line = GOOD.replace('"asked"', '"used_mb": {"GPU 0": %d}, "asked"')
    return f"""import sys
left = {list(used_mb)!r}
for question in sys.stdin:
    print({line!r} % left.pop(0) if question.startswith('memory') else {GOOD!r}, flush=True)"""


FULL, BUSY, FREE = 70000, 513, 512


@pytest.mark.parametrize(
    "used_mb, wanted, sentence",
    [
        ((FULL, BUSY, FREE), WAITS, r"GPU memory was free after [\d.]+ s: GPU 0 70000 -> 512 MiB"),
        ((600,), replace(WAITS, tolerance_mb=600.0), "GPU memory was free"),
        ((BUSY,) * 99, Reclaim(0.1, 512.0, 0.01), "1 of 1 GPUs hold more than 512 MiB after .*513 -> 513 MiB"),
        ((FULL, FULL), Reclaim(0.1, 512.0, 1000.0), "1 of 1 GPUs hold more than"),
    ],
    ids=["free at last", "another tolerance", "never", "a long poll"],
)
def test_memory_is_asked_until_it_is_free_and_then_the_checks(tmp_path, used_mb, wanted, sentence):
    async def story(bench):
        assert [await bench.prepare(1, used=True), await bench.prepare(2)] == ["", ""]

    (said,) = run(tmp_path, story, replace(told(memory(*used_mb)), reclaim=wanted)).said
    assert re.match(sentence, said), said


@pytest.mark.parametrize(
    "verdict, said",
    [("unknown", ["GPU memory cannot be read: x; going on all the same"] * 2), ("not applicable", [])],
)
def test_memory_that_cannot_be_read(tmp_path, verdict, said):
    line = GOOD.replace('"findings": []', FINDING % (verdict, "x", "")).replace('"asked"', '"used_mb": {}, "asked"')

    async def story(bench):
        assert [await bench.preflight._reclaim() for _ in range(2)] == [None, None]

    assert run(tmp_path, story, replace(told(SAYS.replace(repr(GOOD), repr(line))), reclaim=WAITS)).said == said


def test_a_preflight_that_is_closed_in_the_middle_starts_nothing_any_more(tmp_path):
    """It waits for GPU memory, or for an answer, when the job ends."""
    seen = tmp_path / "seen"
    program = memory(70000).replace("stdin:", f"stdin:\n    open({str(seen)!r}, 'w')")

    async def story(bench):
        waiting = asyncio.ensure_future(bench.prepare(1, used=True))
        await bench.until(seen.exists)
        await bench.preflight.close()
        assert await waiting == "" and bench.checks.pid is None

    for wanted in (Reclaim(1000.0, 512.0, 1000.0), Reclaim(1000.0, 1e9, 0.0)):
        run(tmp_path, story, replace(told(program), reclaim=wanted))
        seen.unlink()
