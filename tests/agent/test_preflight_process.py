"""`Preflight` and a process that stops, babbles, ends or never begins: bounded, said once, nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from agent_harness import WAIT_S, ended, status, until

from nvrx_slurm.agent import preflight as module
from nvrx_slurm.agent.preflight import Preflight, PreflightSpec, Reclaim
from nvrx_slurm.errors import UsageError

SPEC = PreflightSpec(("--when=preflight", "--only=lustre"), Reclaim(0.0, 512.0, 2.0))
GOOD = '{"node": "n", "when": "preflight", "findings": [], "notes": [], "seconds": 0, "asked": true}'
BABBLES = "import sys\nwhile True: print({!r}, file=sys.{}, flush=True)"
ENDLESS = "import sys\nwhile True: sys.std{}.write('x' * 65536)"


class Bench:
    """A preflight that runs `program` for its checks, and what was said."""

    def __init__(self, directory: Path, spec: PreflightSpec) -> None:
        self.said: list[str] = []
        self.sick: list[str] = []
        self.pids: list[int] = []
        self.preflight = Preflight(spec, 0, directory, self.said.append, self.sick.append)

    async def prepare(self, cycle: int = 0) -> str:
        return await asyncio.wait_for(self.preflight.prepare(cycle, used=False), WAIT_S)

    def start(self) -> int:
        self.preflight.start()
        assert self.preflight.pid is not None
        self.pids.append(self.preflight.pid)
        return self.preflight.pid


def run(directory: Path, story: Callable[[Bench], Awaitable[None]], spec: PreflightSpec = SPEC) -> Bench:
    """Play a story; afterwards no process and no descriptor may be left."""
    before = set(os.listdir("/proc/self/fd"))
    benches = []

    async def play() -> None:
        bench = Bench(directory, spec)
        benches.append(bench)
        try:
            await asyncio.wait_for(story(bench), 2 * WAIT_S)
        finally:
            await bench.preflight.close()
        assert bench.preflight.pid is None

    asyncio.run(play())
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [pid for pid in benches[0].pids if Path(f"/proc/{pid}").exists()]
    return benches[0]


def told(*python: str) -> PreflightSpec:
    """Instead of the checks, this program."""
    return replace(SPEC, program=("-c", "\n".join(python)))


def test_it_is_asked_before_each_cycle_and_ends_with_its_questions(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        pid = bench.start()
        assert [await bench.prepare(cycle) for cycle in range(3)] == ["", "", ""]
        assert bench.preflight.pid == pid

    assert run(tmp_path, story).said == []


def test_a_stopped_one_is_waited_for_no_longer_than_the_answer_may_take(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        pid = bench.start()
        assert await bench.prepare() == ""
        os.kill(pid, signal.SIGSTOP)
        until(lambda: status(pid, "State").startswith("T"), "that it is stopped")
        fd = os.pidfd_open(pid)
        assert await bench.prepare(1) == ""
        assert ended(fd)
        os.close(fd)
        while bench.preflight.pid == pid:  # its end is an event of the loop
            await asyncio.sleep(0)
        assert await bench.prepare(2) == ""  # by another one
        assert bench.preflight.pid not in (pid, None)

    said = run(tmp_path, story, replace(SPEC, answer_s=1.0)).said
    assert said[0] == "health checks did not answer within 1 s; going on without"
    assert [line for line in said[1:] if "ended with -9; it is started again" not in line] == []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (BABBLES.format("hello", "stdout"), "health checks said what they should not: not a health report"),
        (BABBLES.format("{}", "stdout"), "health checks said what they should not: not a health report: 'findings'"),
        (BABBLES.format("[]", "stdout"), "health checks said what they should not: not a health report"),
        ("import os\nwhile True: os.write(1, bytes(range(256)))", "health checks said what they should not"),
        (ENDLESS.format("out"), "health checks said what they should not: a line without an end"),
        (ENDLESS.format("err"), "health checks write too much to stderr"),
        (BABBLES.format("why", "stderr"), "health checks write too much to stderr"),
    ],
)
def test_one_that_babbles_is_ended_and_the_node_goes_on(tmp_path: Path, program: str, said: str) -> None:
    async def story(bench: Bench) -> None:
        bench.start()
        assert [await bench.prepare(cycle) for cycle in range(3)] == ["", "", ""]

    lines = run(tmp_path, story, told(program)).said
    assert sum(line.startswith(said) for line in lines) == 1, lines
    assert len(lines) <= 3 and len("".join(lines)) < 1000, lines


BAD = GOOD.replace(
    '"findings": []',
    '"findings": [{"check": "lustre", "verdict": "fail", "text": "gone", "seconds": 0, "age_s": 0, "action": "drain"}]',
)


def test_an_idle_node_is_looked_at_now_and_then(tmp_path: Path) -> None:
    """A spare that has passed and breaks later is given up before anybody needs it."""
    program = f"for answer in ({GOOD!r}, {GOOD!r}, {BAD!r}): input(), print(answer, flush=True)\nopen(0).read()"

    async def story(bench: Bench) -> None:
        bench.start()
        assert await bench.prepare() == ""
        while not bench.sick:
            await asyncio.sleep(0.01)

    bench = run(tmp_path, story, replace(told(program), idle_s=0.01))
    assert bench.sick == ["lustre: gone"] and bench.said == []


def test_a_working_node_is_left_alone(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = f"import sys\nfor line in sys.stdin: open({str(asked)!r}, 'a').write('.'), print({GOOD!r}, flush=True)\n"

    async def story(bench: Bench) -> None:
        bench.start()
        for cycle in range(3):
            assert await bench.preflight.prepare(cycle, used=False) == ""
            bench.preflight.working()  # before anything else gets on
            await asyncio.sleep(0.1)

    run(tmp_path, story, replace(told(program), idle_s=0.0))
    assert asked.read_text() == "..."


def test_the_answer_for_a_cycle_is_not_that_of_the_idle_node(tmp_path: Path) -> None:
    """The look at the idle node is under way as the cycle asks, and would have failed."""
    asked = tmp_path / "asked"
    program = (
        f"input(), print({GOOD!r}, flush=True)\ninput(), open({str(asked)!r}, 'w')\n"
        f"input(), print({BAD!r}), print({GOOD!r}, flush=True)\nopen(0).read()"
    )

    async def story(bench: Bench) -> None:
        bench.start()
        assert await bench.prepare() == ""
        while not asked.exists():
            await asyncio.sleep(0.01)
        assert await bench.prepare(1) == ""
        bench.preflight.working()

    bench = run(tmp_path, story, replace(told(program), idle_s=0.01))
    assert bench.sick == [] and bench.said == []


def test_what_it_says_on_stderr_is_passed_on_once(tmp_path: Path) -> None:
    program = (
        f"import sys\nfor line in sys.stdin: print('careful', file=sys.stderr, flush=True), print({GOOD!r}, flush=True)"
    )

    async def story(bench: Bench) -> None:
        bench.start()
        assert [await bench.prepare(cycle) for cycle in range(3)] == ["", "", ""]

    assert run(tmp_path, story, told(program)).said == ["careful"]


def test_one_that_ends_at_once_is_tried_again_for_each_cycle(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        bench.start()
        assert [await bench.prepare(cycle) for cycle in range(3)] == ["", "", ""]

    said = run(tmp_path, story, told(f"open({str(tmp_path / 'ran')!r}, 'a').write('.')", "raise SystemExit(5)")).said
    assert said == ["the process of the health checks ended with 5; it is started again"]
    assert len((tmp_path / "ran").read_text()) >= 3


def test_one_that_dies_is_started_again_and_ever_more_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESPAWN_S", 0.01)
    ran = tmp_path / "ran"
    program = f"import time\nopen({str(ran)!r}, 'a').write(f'{{time.monotonic()}}\\n')\nraise SystemExit(5)"

    async def story(bench: Bench) -> None:
        bench.start()
        while not ran.exists() or len(ran.read_text().splitlines()) < 7:
            await asyncio.sleep(0.01)

    run(tmp_path, story, told(program))
    times = [float(line) for line in ran.read_text().splitlines()]
    assert times[-1] - times[-2] >= 0.2  # 0.01 s, doubled five times


def test_settings_that_it_refuses_are_an_error_at_first_only(tmp_path: Path) -> None:
    async def at_first(bench: Bench) -> None:
        bench.start()
        with pytest.raises(UsageError, match="cannot be run: --only: there is no check 'lustr'; did you mean lustre?"):
            await bench.prepare()

    wrong = replace(SPEC, arguments=("--when=preflight", "--only=lustr"))
    assert run(tmp_path, at_first, wrong).said == []

    once = tmp_path / "once"
    program = (
        f"import os, sys\nif os.path.exists({str(once)!r}): sys.exit(2)\n"
        f"open({str(once)!r}, 'w')\ninput()\nprint({GOOD!r})"
    )

    async def later(bench: Bench) -> None:
        """The site file is broken by somebody in the middle of the job."""
        bench.start()
        assert [await bench.prepare(cycle) for cycle in range(3)] == ["", "", ""]

    assert (
        "the process of the health checks ended with 2; it is started again" in run(tmp_path, later, told(program)).said
    )


def test_no_process_at_all_is_said_and_the_node_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(bench: Bench) -> None:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        bench.preflight.start()
        assert bench.preflight.pid is None
        assert [await bench.prepare(cycle) for cycle in range(2)] == ["", ""]
        monkeypatch.undo()
        assert await bench.prepare(2) == ""
        assert bench.preflight.pid is not None

    why = "this node goes unchecked: no process can be made for its health checks: No such file or directory"
    assert run(tmp_path, story).said == [why]


def test_what_cannot_be_told_excludes_nobody_even_if_the_site_says_drain(tmp_path: Path) -> None:
    finding = '{"check": "mounts", "verdict": "%s", "text": "%s", "seconds": 0, "age_s": 0, "action": "%s"}'
    report = GOOD.replace('"findings": []', '"findings": [%s]')

    def asked(*findings: str) -> PreflightSpec:
        return told(f"import sys\nfor line in sys.stdin: print({report % ', '.join(findings)!r}, flush=True)")

    async def fit(bench: Bench) -> None:
        bench.start()
        assert [await bench.prepare(), await bench.prepare(1)] == ["", ""]

    said = run(
        tmp_path, fit, asked(finding % ("unknown", "timed out", "drain"), finding % ("fail", "old", "warn"))
    ).said
    assert said == ["health check mounts cannot tell: timed out", "health check mounts warns: old"]

    async def unfit(bench: Bench) -> None:
        bench.start()
        assert await bench.prepare() == "mounts: /home is gone"

    for action in ("drain", "fail"):
        assert run(tmp_path, unfit, asked(finding % ("fail", "/home is gone", action))).said == []


def memory(*used_mb: int) -> str:
    """A program that answers questions of GPU memory with these, and those of checks with GOOD."""
    line = GOOD.replace('"asked"', '"used_mb": {"GPU 0": %d}, "asked"')
    return "\n".join(
        (
            "import sys",
            f"left = {list(used_mb)!r}",
            "for question in sys.stdin:",
            f"    print({line!r} % left.pop(0) if question.startswith('memory') else {GOOD!r}, flush=True)",
        )
    )


def test_memory_is_asked_until_it_is_free_and_then_the_checks(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        bench.start()
        assert await asyncio.wait_for(bench.preflight.prepare(1, used=True), WAIT_S) == ""
        assert await bench.prepare(2) == ""

    (said,) = run(tmp_path, story, replace(told(memory(70000, 600, 5)), reclaim=Reclaim(1000.0, 512.0, 0.01))).said
    assert said.startswith("GPU memory was free after ") and said.endswith(": GPU 0 70000 -> 5 MiB")


def test_one_that_is_stopped_costs_the_wait_for_memory_its_bound_and_the_cycle_nothing(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        pid = bench.start()
        os.kill(pid, signal.SIGSTOP)
        until(lambda: status(pid, "State").startswith("T"), "that it is stopped")
        assert await asyncio.wait_for(bench.preflight.prepare(1, used=True), WAIT_S) == ""
        assert bench.preflight.pid not in (pid, None)  # the checks are done by another one

    said = run(tmp_path, story, replace(SPEC, reclaim=Reclaim(0.1, 512.0, 2.0))).said
    assert "GPU memory cannot be read: its process did not answer within 2.1 s; going on all the same" in said


def test_junk_instead_of_a_reading_is_said_and_the_node_goes_on(tmp_path: Path) -> None:
    junk = GOOD.replace('"asked"', '"used_mb": ["GPU 0"], "asked"')
    program = f"import sys\nfor question in sys.stdin: print({junk!r}, flush=True)"

    async def story(bench: Bench) -> None:
        bench.start()
        assert await asyncio.wait_for(bench.preflight.prepare(1, used=True), WAIT_S) == ""

    said = run(tmp_path, story, replace(told(program), reclaim=Reclaim(1000.0, 512.0, 2.0))).said
    assert (
        "health checks said what they should not: not a reading of GPU memory: used_mb must be numbers by name" in said
    )
    assert any(line.startswith("GPU memory cannot be read: ") for line in said)


def test_without_checks_the_process_is_there_for_memory_only(tmp_path: Path) -> None:
    async def story(bench: Bench) -> None:
        bench.preflight.start()
        assert await bench.prepare() == "" and bench.preflight.pid is None
        assert await asyncio.wait_for(bench.preflight.prepare(1, used=True), WAIT_S) == ""
        assert bench.preflight.pid is not None

    spec = replace(told(memory(5)), reclaim=Reclaim(1000.0, 512.0, 2.0), checks=False)
    (said,) = run(tmp_path, story, spec).said
    assert said.startswith("GPU memory was free after ")


def test_a_preflight_that_is_closed_in_the_middle_starts_nothing_any_more(tmp_path: Path) -> None:
    """It waits for GPU memory, or for an answer, when the job ends."""
    seen = tmp_path / "seen"
    program = memory(70000).replace(
        "for question in sys.stdin:", f"for question in sys.stdin:\n    open({str(seen)!r}, 'w')"
    )

    async def story(bench: Bench) -> None:
        waiting = asyncio.ensure_future(bench.preflight.prepare(1, used=True))
        while not seen.exists():
            await asyncio.sleep(0.01)
        await bench.preflight.close()
        assert await asyncio.wait_for(waiting, WAIT_S) == "" and bench.preflight.pid is None
        assert await bench.prepare(2) == "" and bench.preflight.pid is None

    assert run(tmp_path, story, replace(told(program), reclaim=Reclaim(1000.0, 512.0, 1000.0))).said == []

    async def asked(bench: Bench) -> None:
        pid = bench.start()
        os.kill(pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(bench.preflight.prepare(0, used=False))
        await asyncio.sleep(0)
        await bench.preflight.close()
        assert await asyncio.wait_for(waiting, WAIT_S) == "" and bench.preflight.pid is None

    run(tmp_path, asked, replace(SPEC, answer_s=1000.0))
