"""What an agent suspects of its node: which faults say so, and what of it reaches the epilog."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from nvrx_slurm.agent import suspicions as module
from nvrx_slurm.agent.suspicions import Suspicions, look_at
from nvrx_slurm.health.hooks import suspicion
from nvrx_slurm.types import FaultKind, RankFault

ENV = {"SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n1"}
CRASH = RankFault(FaultKind.EXIT, "n1", 0, 3, 1, 77, 1, "ValueError: x", "Traceback ...\nValueError: x")
ECC = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
NVLINK = "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A node (a --sysroot) whose site file names a directory, which the prolog of job 42 has made."""
    (tmp_path / "etc/nvrx").mkdir(parents=True)
    (tmp_path / "etc/nvrx/health.yaml").write_text(f"hooks: {{suspicions: {tmp_path}/spool}}\n")
    suspicion.allow(f"{tmp_path}/spool", "n1", "42", os.geteuid())
    return tmp_path


def left(site: Path, story: Callable[[Suspicions], None], env: dict[str, str] | None = None) -> list[tuple[str, str]]:
    """What the epilog of the job finds after `story`: kinds and checks."""

    async def play() -> None:
        suspicions = Suspicions(str(site), ENV if env is None else env)
        story(suspicions)
        await suspicions.close()
        await suspicions.close()

    asyncio.run(play())
    for thread in threads():
        thread.join(30)
    assert not threads()
    found = suspicion.parsed(suspicion.take(f"{site}/spool", "n1", "42", os.geteuid()))
    assert all(one.text for one in found)
    return [(one.kind, one.check) for one in found]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "suspicions"]


def killed(signum: int) -> RankFault:
    return RankFault(FaultKind.SIGNAL, "n1", 0, 3, 1, 77, -signum, signal.Signals(signum).name)


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (killed(signal.SIGBUS), ("uncorrectable-error", "memory-errors")),
        (killed(signal.SIGSEGV), ("", "")),
        (CRASH, ("", "")),
        (RankFault(FaultKind.EXIT, "n1", 0, exit_code=1, message=ECC), ("uncorrectable-error", "gpu-ecc")),
        (RankFault(FaultKind.EXIT, "n1", 0, exit_code=1, traceback=f"Traceback ...\n{NVLINK}\n"),
         ("uncorrectable-error", "nvlink-errors")),
        (RankFault(FaultKind.SIGNAL, "n1", 0, exit_code=-6, message="SIGABRT", traceback="cudaErrorECCUncorrectable"),
         ("uncorrectable-error", "gpu-ecc")),
        (RankFault(FaultKind.HANG, "n1", 0, message="no heartbeat", log="/nowhere/rank_0.err"), ("", "")),
    ],
)  # fmt: skip
def test_faults_that_speak_against_the_node(fault: RankFault, expected: tuple[str, str]) -> None:
    assert look_at(fault)[:2] == expected


def test_the_end_of_the_log_counts_where_there_is_no_traceback(tmp_path: Path) -> None:
    log = tmp_path / "rank_3.err"
    log.write_text(f"started\nterminate called after throwing an instance of 'c10::Error'\n  what():  {ECC}\nmore\n")
    fault = RankFault(FaultKind.SIGNAL, "n1", 0, 3, 1, 77, -6, "SIGABRT", log=str(log))
    assert look_at(fault) == (
        "uncorrectable-error",
        "gpu-ecc",
        f"rank 3 (local rank 1, pid 77) on node 0 (n1) was killed by SIGABRT: what():  {ECC}",
    )


def test_they_reach_the_epilog_each_once(site: Path) -> None:
    def story(suspicions: Suspicions) -> None:
        suspicions.failed(0, [CRASH, killed(signal.SIGBUS)])
        suspicions.check_failed("gpu-recovery", "GPU 3 needs GPU_RESET")
        suspicions.check_failed("gpu-recovery", "GPU 3 needs GPU_RESET")

    assert left(site, story) == [("uncorrectable-error", "memory-errors"), ("check-failed", "gpu-recovery")]


def test_failures_in_three_cycles_are_suspicious_once(site: Path) -> None:
    def twice(suspicions: Suspicions) -> None:
        for cycle in (0, 0, 0, 4):
            suspicions.failed(cycle, [CRASH])

    def often(suspicions: Suspicions) -> None:
        for cycle in (0, 1, 2, 2, 3, 4):
            suspicions.failed(cycle, [CRASH, CRASH])

    assert left(site, twice) == []
    suspicion.allow(f"{site}/spool", "n1", "42", os.geteuid())
    assert left(site, often) == [("repeated-failures", "")]


@pytest.mark.parametrize("env", [{}, {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n1"}, {"SLURM_JOB_ID": "42"}])
def test_outside_of_slurm_or_without_our_prolog_nothing_comes_of_it(site: Path, env: dict[str, str]) -> None:
    assert left(site, lambda suspicions: suspicions.check_failed("lustre", "sick"), env) == []
    assert os.listdir(site / "spool") == []


@pytest.mark.parametrize("text", ["hooks: {suspicions: [", "hooks: {suspicions: /nowhere}\n"])
def test_a_broken_or_wrong_site_file_costs_the_suspicion_only(site: Path, text: str) -> None:
    (site / "etc/nvrx/health.yaml").write_text(text)
    assert left(site, lambda suspicions: suspicions.check_failed("lustre", "sick")) == []


def test_a_file_system_that_hangs_holds_nobody_up(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is a FIFO that nobody writes to."""
    monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.1)
    log = site / "rank_3.err"
    os.mkfifo(log)

    async def play() -> None:
        suspicions = Suspicions(str(site), ENV)
        for _ in range(200):
            suspicions.failed(0, [RankFault(FaultKind.SIGNAL, "n1", 0, exit_code=-6, log=str(log))])
        await asyncio.wait_for(suspicions.close(), 30)

    asyncio.run(play())
    stuck = threads()
    assert len(stuck) == 1, "the log was not looked at"
    monkeypatch.setattr(module, "look_at", lambda fault: ("", "", ""))
    os.close(os.open(log, os.O_WRONLY))  # for the one that has opened it, or is about to
    stuck[0].join(30)
    assert not stuck[0].is_alive()
