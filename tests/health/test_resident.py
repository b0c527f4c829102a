"""The checks' resident: answers at once whatever goes on in the background, tells news only, and sleeps otherwise."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu_harness import Examiner, GpuNode, examiners
from recorded import BOUND_S, Node, ended
from test_runner import SILENT, HungMount

from nvrx_slurm.health import report
from nvrx_slurm.health.check import Verdict

LUSTRE = "/sys/fs/lustre/health_check"
CPUS = ("--watch", "cpu-count", "--expect", "cpus=224")
# What the tests below look at is there whatever the preflight has by itself.
INCLUDED = tuple(f"--include={name}" for name in ("lustre", "mounts", "storage-paths", "cpu-count", "gpu-recovery"))


class Resident:
    """`--serve` on a recorded node, and what it says."""

    def __init__(self, node: Node, *args: str, env: dict[str, str] | None = None) -> None:
        argv = [sys.executable, "-I", "-m", "nvrx_slurm.health", "--serve", "--sysroot", str(node.root)]
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
        environ = {**os.environ, **(env or {})}
        self.process = subprocess.Popen([*argv, "--when", "preflight", *INCLUDED, *args], env=environ, **pipes)

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def line(self) -> tuple[bool, report.Report]:
        """(whether it was asked, report) of the next line. Fails without one within a bound."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], BOUND_S)[0], "nothing was said"
        text = self.process.stdout.readline().decode()
        return json.loads(text)["asked"], report.from_json(text)

    def ask(self) -> report.Report:
        self.say("check\n")
        asked, found = self.line()
        assert asked
        return found

    def silent(self) -> bool:
        assert self.process.stdout is not None
        return not select.select([self.process.stdout], [], [], 0)[0]

    def children(self) -> list[int]:
        pid = self.process.pid
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def switches(self) -> int:
        """How often it went to sleep so far."""
        status = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in status if line.startswith("voluntary_ctxt_switches"))

    def end(self) -> tuple[int, str]:
        """(exit code, stderr) after the end of its stdin."""
        _, error = self.process.communicate(timeout=BOUND_S)
        return self.process.returncode, error.decode()


def named(found: report.Report, name: str) -> Any:
    (finding,) = [finding for finding in found.findings if finding.check == name]
    return finding


class Fifo:
    """A file in the way of a check: whoever opens it hangs, and is seen."""

    def __init__(self, node: Node, path: str) -> None:
        self.place = node / path
        self.text = self.place.read_text()
        self.place.unlink()
        os.mkfifo(self.place)

    def met(self) -> int:
        """Wait until it is opened; our own end."""
        return os.open(self.place, os.O_WRONLY)

    def mend(self) -> None:
        self.place.unlink()
        self.place.write_text(self.text)


# --- questions --------------------------------------------------------------------------------------------------------


def test_each_question_is_answered_by_the_report_of_the_preflight(dgx: Node) -> None:
    resident = Resident(dgx)
    answers = [resident.ask(), resident.ask()]
    _, one_shot = dgx.program("--when", "preflight", *INCLUDED)
    for answer in answers:
        assert [(f.check, f.verdict) for f in answer.findings] == [(f.check, f.verdict) for f in one_shot.findings]
        assert (answer.when, answer.verdict, answer.notes) == ("preflight", Verdict.PASS, [])
    dgx.write(LUSTRE, "NOT HEALTHY\n")
    assert [(f.check, f.action) for f in resident.ask().grave] == [("lustre", "drain")]
    files = len(os.listdir(f"/proc/{resident.process.pid}/fd"))
    for _ in range(10):
        resident.ask()
    assert len(os.listdir(f"/proc/{resident.process.pid}/fd")) < files + 10, "each check leaves an open file"
    resident.say("check\ncheck\n")
    assert [resident.line()[0], resident.line()[0]] == [True, True]
    assert resident.end() == (0, "")


def test_what_is_no_question_is_said_and_costs_nothing(dgx: Node) -> None:
    resident = Resident(dgx, "--only", "lustre")
    resident.say("chek\n\xff\n" + "x" * 100_000 + "\nch")
    resident.say("eck\n")
    assert resident.line()[0]
    code, error = resident.end()
    assert code == 0 and len(error.splitlines()) == 3
    assert error.startswith("nvrx health: b'chek' is no question; write: check, or: memory SECONDS\n")
    assert len(error) < 500


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--watch", "gpu-recovry"), "--watch: there is no check 'gpu-recovry'; did you mean gpu-recovery?"),
        (("--include", "zzz"), "--include: there is no check 'zzz'"),
        (("--watch", "lustre", "--interval", "0"), "--interval 0: must be seconds > 0"),
        (("--interval", "nan"), "--interval nan: must be seconds > 0"),
        (("--config", "/nowhere"), "/nowhere"),
    ],
)
def test_wrong_arguments_are_one_sentence(dgx: Node, args: tuple[str, ...], said: str) -> None:
    code, error = Resident(dgx, *args).end()
    assert code == 2
    assert error.startswith("nvrx health: ") and said in error and len(error.splitlines()) == 1


def test_a_check_can_be_added_to_those_of_the_preflight(dgx: Node) -> None:
    resident = Resident(dgx, "--include", "time-sync", "--skip", "lustre")
    names = [finding.check for finding in resident.ask().findings]
    assert "time-sync" in names and "cpu-count" in names and "lustre" not in names
    resident.end()


def test_the_end_of_its_owner_ends_it_and_its_checks(dgx: Node) -> None:
    fifo = Fifo(dgx, LUSTRE)
    resident = Resident(dgx, "--only", "lustre", "--deadline", "600")
    resident.say("check\n")
    writer = fifo.met()
    (pid,) = resident.children()
    assert resident.end() == (0, "")
    assert ended(pid)
    os.close(writer)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_what_slurm_sends_to_the_whole_step_does_not_end_it_but_a_check(dgx: Node, signum: int) -> None:
    """Its children have the signal's default: a command of a site must not inherit that it is ignored."""
    fifo = Fifo(dgx, LUSTRE)
    resident = Resident(dgx, "--only", "lustre", "--deadline", "600")
    resident.say("check\n")
    writer = fifo.met()
    (child,) = resident.children()
    resident.process.send_signal(signum)
    os.kill(child, signum)
    asked, told = resident.line()
    assert asked and named(told, "lustre").verdict is Verdict.UNKNOWN
    assert resident.process.poll() is None
    os.close(writer)
    assert resident.end() == (0, "")


def test_nobody_who_reads_ends_it_too(dgx: Node) -> None:
    resident = Resident(dgx, "--only", "lustre")
    assert resident.process.stdout is not None
    resident.process.stdout.close()
    resident.say("check\n")
    assert resident.process.wait(BOUND_S) == 0
    with resident.process:
        pass


def test_neither_torch_nor_grpc_is_loaded(dgx: Node) -> None:
    program = (
        "import sys\nfrom nvrx_slurm.health.__main__ import main\n"
        f"main(['--serve', '--when', 'preflight', '--sysroot', {str(dgx.root)!r}])\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program], input="check\n", capture_output=True, text=True, timeout=BOUND_S,
        check=True,
    )  # fmt: skip
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "nvrx_slurm" in loaded and not loaded & {"torch", "grpc", "google", "yaml", "click"}


# --- ahead ------------------------------------------------------------------------------------------------------------


def test_slow_checks_are_run_ahead_and_have_an_age(dgx: Node) -> None:
    resident = Resident(dgx)
    first, second = (named(resident.ask(), "mounts") for _ in range(2))
    assert (first.verdict, second.verdict) == (Verdict.PASS, Verdict.PASS)
    assert 0 <= first.age_s < second.age_s < 30  # the first answer waits for it
    assert named(resident.ask(), "lustre").age_s == 0
    resident.end()


def test_what_was_not_there_is_looked_for_again_after_each_question(dgx: Node) -> None:
    mounts = (dgx / "/proc/self/mountinfo").read_text()
    dgx.write("/proc/self/mountinfo", "22 1 8:2 / / rw - ext4 /dev/sda1 rw\n")
    resident = Resident(dgx, "--only", "mounts")
    assert named(resident.ask(), "mounts").verdict is Verdict.NOT_APPLICABLE
    dgx.write("/proc/self/mountinfo", mounts)
    until_s = time.monotonic() + BOUND_S
    while (found := named(resident.ask(), "mounts")).verdict is not Verdict.PASS:
        assert time.monotonic() < until_s, found
    resident.end()


def test_what_failed_ahead_is_looked_at_again_before_it_is_told(dgx: Node) -> None:
    """Nobody goes for what is mended by now; what is still broken, and what breaks later, is told all the same."""
    mounts = (dgx / "/proc/self/mountinfo").read_text()
    dgx.write("/proc/self/mountinfo", "22 1 8:2 / / rw - ext4 /dev/sda1 rw\n")
    resident = Resident(dgx, "--expect", "mounts=/home")
    for _ in range(3):
        assert [finding.check for finding in resident.ask().grave] == ["mounts"]
    dgx.write("/proc/self/mountinfo", mounts)
    found = named(resident.ask(), "mounts")
    assert (found.verdict, resident.ask().grave) == (Verdict.PASS, [])
    assert resident.end() == (0, "")


def test_a_second_look_takes_no_more_than_the_time_of_its_question(dgx: Node) -> None:
    """It hangs, so that nothing is known of what has failed before."""
    mounts = dgx / "/proc/self/mountinfo"
    mounts.write_text("22 1 8:2 / / rw - ext4 /dev/sda1 rw\n")
    resident = Resident(dgx, "--only", "mounts", "--expect", "mounts=/home", "--deadline", "1")
    assert named(resident.ask(), "mounts").verdict is Verdict.FAIL
    fifo = Fifo(dgx, "/proc/self/mountinfo")
    resident.say("check\n")
    writer = fifo.met()
    asked, told = resident.line()
    found = named(told, "mounts")
    assert asked and found.verdict is Verdict.UNKNOWN and found.text.startswith("timed out") and told.grave == []
    os.close(writer)
    assert resident.end() == (0, "")


def test_a_mount_that_hangs_costs_the_first_answer_its_budget_and_later_ones_nothing(dgx: Node) -> None:
    try:
        mount = HungMount(dgx / "/home")
    except OSError as error:
        pytest.skip(f"no FUSE mount can be made here: {error}")
    try:
        resident = Resident(dgx, "--config", dgx.site(checks={"mounts": {"budget": 1}}))
        for _ in range(3):
            answer = resident.ask()
            found = named(answer, "mounts")
            assert (found.verdict, found.text) == (Verdict.UNKNOWN, f"timed out: /home did not answer{SILENT}")
        assert found.age_s > 0 and answer.seconds < BOUND_S / 10
        assert resident.end() == (0, "")
    finally:
        mount.close()


# --- watched ----------------------------------------------------------------------------------------------------------


def test_only_news_about_the_watched_are_told(dgx: Node) -> None:
    resident = Resident(dgx, "--watch", "lustre", *CPUS, "--interval", "0.05")
    resident.ask()
    dgx.write(LUSTRE, "NOT HEALTHY\n")
    asked, told = resident.line()
    assert not asked and [(f.check, f.action) for f in told.grave] == [("lustre", "drain")]
    dgx.write("/sys/devices/system/cpu/online", "0-1\n")
    asked, told = resident.line()
    assert not asked and {f.check for f in told.grave} == {"lustre", "cpu-count"}
    dgx.write(LUSTRE, "healthy\n")
    asked, told = resident.line()
    assert not asked and {f.check for f in told.grave} == {"cpu-count"}
    assert {f.check for f in resident.ask().grave} == {"cpu-count"} and resident.silent()
    resident.end()


def test_a_warning_is_no_news(dgx: Node) -> None:
    config = dgx.site(checks={"lustre": {"on_fail": "warn"}})
    resident = Resident(dgx, "--config", config, "--watch", "lustre", *CPUS, "--interval", "0.05")
    dgx.write(LUSTRE, "NOT HEALTHY\n")
    assert named(resident.ask(), "lustre").verdict is Verdict.FAIL
    dgx.write("/sys/devices/system/cpu/online", "0-1\n")
    _, told = resident.line()
    assert [f.check for f in told.grave] == ["cpu-count"], "it came only with what is worse"
    resident.end()


def test_a_watched_check_that_hangs_holds_up_no_answer(dgx: Node) -> None:
    fifo = Fifo(dgx, "/sys/devices/system/edac/mc/mc0/ue_count")
    resident = Resident(dgx, "--only", "lustre", "--watch", "memory-errors", "--interval", "0.05", "--deadline", "600")
    writer = fifo.met()
    answer = resident.ask()
    assert resident.children(), "the watched check is not at it any more"
    assert [f.verdict for f in answer.findings] == [Verdict.PASS]
    os.close(writer)
    resident.end()


def test_nothing_to_watch_is_no_wake_up(dgx: Node) -> None:
    """Without GPUs, mounts and storage paths there is nothing to be done until somebody asks."""
    dgx.write("/proc/self/mountinfo", "22 1 8:2 / / rw - ext4 /dev/sda1 rw\n")
    resident = Resident(dgx, "--watch", "gpu-recovery", "--interval", "0.05")
    answer = resident.ask()
    if named(answer, "gpu-recovery").verdict is not Verdict.NOT_APPLICABLE:
        pytest.skip("there are GPUs on this machine")
    poller = select.poll()  # its end would be an event; otherwise looks at it, with a bound
    poller.register(resident.process.stderr or 0, select.POLLIN)
    for _ in range(int(BOUND_S)):
        before = resident.switches()
        assert not poller.poll(1000)
        if resident.switches() == before:
            break
    assert resident.switches() == before and resident.children() == []
    assert resident.end() == (0, "")


# --- GPUs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examiner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examiner]:
    yield from examiners(tmp_path_factory.mktemp("nvml"))


def test_a_gpu_that_breaks_is_told_while_nvml_hangs_elsewhere(dgx: Node, examiner: Examiner) -> None:
    node = GpuNode(dgx, examiner)
    args = ("--watch", "gpu-recovery", "--watch", "gpu-temperature", "--interval", "0.1")
    resident = Resident(dgx, *args, env=node.stand_in.env)
    assert named(resident.ask(), "gpu-recovery").verdict is Verdict.PASS
    node.say("nvmlDeviceGetTemperature.2 hang", "action.3 1")
    asked, told = resident.line()
    assert not asked and [f.text for f in told.grave] == ["GPU 3 (GPU-3000) needs GPU_RESET"]
    assert named(resident.ask(), "gpu-recovery").verdict is Verdict.FAIL
    assert "nvmlDeviceGetTemperature" in node.stand_in.met()
    resident.end()
