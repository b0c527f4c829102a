"""The GPU memory that the resident reads for its agent, on nvidia-ml-py and the stand-in of NVML."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded import BOUND_S, ended
from standin import StandIn

GPUS = ("count 4", "used 3")


@pytest.fixture
def gpus(nvml_standin: Path, tmp_path: Path) -> StandIn:
    """Four, of which nobody uses any memory."""
    stand_in = StandIn(nvml_standin, tmp_path / "state")
    stand_in.say(*GPUS)
    return stand_in


class Reader:
    """`--serve` without checks."""

    def __init__(self, env: dict[str, str], *args: str) -> None:
        argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--serve", *(args or ("--no-checks",))]
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        self.process = subprocess.Popen(argv, env=kept | env, **pipes)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND_S)[0], "nothing was said"
        return dict(json.loads(self.process.stdout.readline()))

    def memory(self, seconds: float = BOUND_S) -> tuple[dict[str, float], str, str]:
        """(MiB by GPU, verdict, sentence)."""
        self.say(f"memory {seconds}\n")
        line = self.line()
        assert line["asked"] is True
        (finding,) = line["findings"]
        return line["used_mb"], finding["verdict"], finding["text"]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def close(self) -> str:
        """What it said on stderr."""
        _, error = self.process.communicate(timeout=BOUND_S)
        assert self.process.returncode == 0
        return error.decode()


@pytest.fixture
def started() -> Iterator[list[Reader]]:
    """Those of the test, which end well and say nothing."""
    readers: list[Reader] = []
    yield readers
    assert [reader.close() for reader in readers] == [""] * len(readers)


@pytest.mark.parametrize(
    ("facts", "visible", "expected"),
    [
        ((), None, {0: 3, 1: 3, 2: 70000, 3: 3}),
        ((), "0,3", {0: 3, 3: 3}),
        ((), "2", {2: 70000}),
        (("missing.0 1",), "1", {2: 70000}),  # CUDA_VISIBLE_DEVICES counts among those that the cgroup leaves
        (("reserved 600",), "0", {0: 3}),  # the driver's own memory does not count
        (("nvmlDeviceGetMemoryInfo_v2 13", "reserved 0"), "2", {2: 70000}),
    ],
)
def test_it_reads_our_gpus_only(
    started: list[Reader], gpus: StandIn, facts: tuple[str, ...], visible: str | None, expected: dict[int, int]
) -> None:
    gpus.say(*GPUS, "used.2 70000", *facts)
    started.append(Reader(gpus.env | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})))
    used_mb, verdict, _ = started[0].memory()
    assert (used_mb, verdict) == ({f"GPU {index} (GPU-{index}000)": mb for index, mb in expected.items()}, "pass")


def test_each_question_is_a_new_reading_and_leaves_nothing(started: list[Reader], gpus: StandIn) -> None:
    started.append(Reader(gpus.env | {"CUDA_VISIBLE_DEVICES": "0"}))
    for mb in (70000, 600, 3):
        gpus.say(*GPUS, f"used.0 {mb}")
        assert started[0].memory()[0] == {"GPU 0 (GPU-0000)": mb}
    assert started[0].children() == []


@pytest.mark.parametrize(
    ("facts", "env", "verdict", "text"),
    [
        (("nvmlInit 9",), {}, "not applicable", "no NVML here (Driver Not Loaded)"),
        ((), {"CUDA_VISIBLE_DEVICES": "MIG-7"}, "not applicable", "a MIG instance, not a whole GPU, is assigned"),
        (("nvmlDeviceGetMemoryInfo_v2.1 15",), {}, "unknown", "GPU 1: GPU is lost"),
    ],
)
def test_what_cannot_be_read_says_why(
    started: list[Reader], gpus: StandIn, facts: tuple[str, ...], env: dict[str, str], verdict: str, text: str
) -> None:
    gpus.say(*GPUS, *facts)
    started.append(Reader(gpus.env | env))
    used_mb, found, said = started[0].memory()
    assert (used_mb, found) == ({}, verdict) and text in said


def test_a_driver_that_hangs_costs_the_time_that_was_given_and_its_reader(started: list[Reader], gpus: StandIn) -> None:
    gpus.say(*GPUS, "nvmlDeviceGetMemoryInfo_v2.3 hang")
    started.append(Reader(gpus.env))
    started[0].say("memory 600\n")
    while "nvmlDeviceGetMemoryInfo_v2" not in gpus.met():
        assert started[0].process.poll() is None
    (pid,) = started[0].children()
    gpus.say(*GPUS)
    assert started[0].line()["used_mb"]
    assert ended(pid)
    gpus.say(*GPUS, "nvmlDeviceGetMemoryInfo_v2.3 hang")
    used_mb, verdict, said = started[0].memory(0.5)
    assert (used_mb, verdict) == ({}, "unknown")
    assert said == "timed out after 0.5 s, asking NVML for the memory in use of GPU 3"
    assert started[0].children() == []


def test_a_driver_that_hangs_holds_up_no_check(started: list[Reader], gpus: StandIn) -> None:
    gpus.say(*GPUS, "nvmlDeviceGetMemoryInfo_v2 hang")
    started.append(Reader(gpus.env, "--when=preflight", "--only=disk-space"))
    started[0].say("memory 600\n")
    while not gpus.met():
        assert started[0].process.poll() is None
    started[0].say("check\n")
    answer = started[0].line()
    assert [finding["check"] for finding in answer["findings"]] == ["disk-space"] and "used_mb" not in answer
    gpus.say(*GPUS)
    assert len(started[0].line()["used_mb"]) == 4


@pytest.mark.parametrize("question", ["memory", "memory -1", "memory nan", "memory 1e9", "memory 5 6", "memory ²"])
def test_what_is_no_question_of_memory_is_said(question: str) -> None:
    reader = Reader({})
    reader.say(f"{question}\n")
    assert "is no question; write: check, or: memory SECONDS" in reader.close()


def test_without_checks_no_site_file_is_read_and_a_check_finds_nothing(started: list[Reader], tmp_path: Path) -> None:
    (tmp_path / "etc/nvrx").mkdir(parents=True)
    (tmp_path / "etc/nvrx/health.yaml").write_text("{")
    started.append(Reader({}, "--no-checks", f"--sysroot={tmp_path}"))
    started[0].say("check\n")
    assert started[0].line()["findings"] == []
