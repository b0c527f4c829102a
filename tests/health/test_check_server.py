"""The check server: answers at once whatever goes on in the background, tells news only, and sleeps otherwise."""

import json
import os
import select
import signal
import subprocess
import sys

import pytest
from recorded import LUSTRE, F, P, U, ended
from standin import StandIn
from waits import WAIT_S

from nvrx_slurm.child import descendants
from nvrx_slurm.health import outcome

pytestmark = pytest.mark.process


CPUS = ("--watch", "cpu-count", "--expect", "cpus=224")
# The tests below look at these, whatever the preflight has by itself.
INCLUDED = tuple(f"--include={name}" for name in ("lustre", "mounts", "storage-paths", "cpu-count", "gpu-recovery"))
_PROGRAM = "import runpy; runpy.run_module('nvrx_slurm.health', run_name='__main__')"


class CheckServer:
    """`--serve`, and its answers."""

    def __init__(self, *args, env=None, program=_PROGRAM):
        argv = [sys.executable, "-I", "-c", program, "--serve", "--when", "preflight", *args]
        kept = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(argv, env=kept | (env or {}), stdin=pipe, stdout=pipe, stderr=pipe)

    def say(self, text):
        self.process.stdin.write(text.encode())
        self.process.stdin.flush()

    def plain(self):
        """The next line. Fails without one within a bound."""
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "nothing was said"
        return dict(json.loads(self.process.stdout.readline().decode().partition(outcome.ANSWER)[2]))

    def line(self):
        """(whether it was asked, report) of the next line."""
        found = self.plain()
        return found["asked"], outcome.from_json(json.dumps(found))

    def news(self):
        """The failures that it tells of itself, without a question."""
        asked, found = self.line()
        assert not asked
        return found.grave

    def ask(self):
        self.say("check\n")
        asked, found = self.line()
        assert asked
        return found

    def memory(self, seconds=WAIT_S):
        """(MiB by GPU, verdict, sentence)."""
        self.say(f"memory {seconds}\n")
        line = self.plain()
        assert line["asked"] is True
        (finding,) = line["findings"]
        return line["used_mb"], finding["verdict"], finding["text"]

    def silent(self):
        return not select.select([self.process.stdout], [], [], 0)[0]

    def children(self):
        return descendants.children(self.process.pid)

    def end(self):
        """(exit code, stderr) after the end of its stdin."""
        _, error = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, error.decode()


@pytest.fixture
def serve(dgx):
    """Starts check servers of the recorded node; at the end they must end well and without a word on stderr."""
    started = []

    def start(*args, env=None):
        started.append(CheckServer(f"--sysroot={dgx.root}", *INCLUDED, *args, env=env))
        return started[-1]

    yield start
    for server in started:
        assert server.process.returncode is not None or server.end() == (0, "")


def named(found, name):
    (finding,) = [finding for finding in found.findings if finding.check == name]
    return finding


class Fifo:
    """In the place of a file that a check reads: opening it blocks the check, and is seen."""

    def __init__(self, node, path):
        self.place = node / path
        self.place.unlink()
        os.mkfifo(self.place)

    def met(self):
        """Wait until it is opened; our own end."""
        return os.open(self.place, os.O_WRONLY)


def test_each_question_is_answered_by_the_report_of_the_preflight(dgx, serve):
    server = serve()
    answers = [server.ask(), server.ask()]
    _, one_shot = dgx.program("--when", "preflight", *INCLUDED)
    for answer in answers:
        assert [(f.check, f.verdict) for f in answer.findings] == [(f.check, f.verdict) for f in one_shot.findings]
        assert (answer.when, answer.verdict, answer.notes) == ("preflight", P, [])
    dgx.write(LUSTRE, "NOT HEALTHY\n")
    assert [(f.check, f.action) for f in server.ask().grave] == [("lustre", "drain")]
    files = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    for _ in range(10):
        server.ask()
    assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < files + 10, "each check leaves an open file"
    server.say("check\ncheck\n")
    assert [server.line()[0], server.line()[0]] == [True, True]


@pytest.fixture
def blocked(dgx, serve):
    """A server, and the pid of its only check, which waits for our end of a FIFO."""
    fifo = Fifo(dgx, LUSTRE)
    server = serve("--only", "lustre", "--deadline", "600")
    server.say("check\n")
    writer = fifo.met()
    yield server, *server.children()
    os.close(writer)


def test_the_end_of_its_owner_ends_it_and_its_checks(blocked):
    server, pid = blocked
    assert server.end() == (0, "") and ended(pid)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_what_slurm_sends_to_the_whole_step_does_not_end_it_but_a_check(blocked, signum):
    """Its children have the signal's default: a command of a site must not inherit that it is ignored."""
    server, child = blocked
    server.process.send_signal(signum)
    os.kill(child, signum)
    asked, told = server.line()
    assert asked and named(told, "lustre").verdict is U
    assert server.process.poll() is None


def test_only_news_about_the_watched_are_told(dgx, serve):
    server = serve("--watch", "lustre", *CPUS, "--interval", "0.05")
    server.ask()
    dgx.write(LUSTRE, "NOT HEALTHY\n")
    assert [(f.check, f.action) for f in server.news()] == [("lustre", "drain")]
    dgx.write("/sys/devices/system/cpu/online", "0-1\n")
    assert {f.check for f in server.news()} == {"lustre", "cpu-count"}
    dgx.write(LUSTRE, "healthy\n")
    assert {f.check for f in server.news()} == {"cpu-count"}
    assert {f.check for f in server.ask().grave} == {"cpu-count"} and server.silent()


def test_a_watched_check_that_hangs_holds_up_no_answer(dgx, serve):
    fifo = Fifo(dgx, "/sys/devices/system/edac/mc/mc0/ue_count")
    server = serve("--only", "lustre", "--watch", "memory-errors", "--interval", "0.05", "--deadline", "600")
    writer = fifo.met()
    answer = server.ask()
    assert server.children(), "the watched check is not at it any more"
    assert [f.verdict for f in answer.findings] == [P]
    os.close(writer)


def test_a_gpu_that_breaks_is_told_while_nvml_hangs_elsewhere(gpus, serve):
    args = ("--watch", "gpu-recovery", "--watch", "gpu-temperature", "--interval", "0.1")
    server = serve(*args, env=gpus.stand_in.env)
    assert named(server.ask(), "gpu-recovery").verdict is P
    gpus.say("nvmlDeviceGetTemperature.2 hang", "action.3 1")
    assert [f.text for f in server.news()] == ["GPU 3 (GPU-3000) needs GPU_RESET"]
    assert named(server.ask(), "gpu-recovery").verdict is F


FOUR = ("count 4", "used 3")


@pytest.fixture
def four(nvml_standin, tmp_path):
    """Four GPUs without programs."""
    stand_in = StandIn(nvml_standin, tmp_path / "state")
    stand_in.say(*FOUR)
    return stand_in


def test_memory_of_the_visible_gpus_is_read_anew_for_each_question(serve, four):
    server = serve("--no-checks", env=four.env)
    for mb in (70000, 600, 3):
        four.say(*FOUR, f"used.2 {mb}")
        used_mb, verdict, _ = server.memory()
        assert (used_mb["GPU 2 (GPU-2000)"], used_mb["GPU 3 (GPU-3000)"], verdict) == (mb, 3, "pass")
    assert server.children() == [] and server.ask().findings == []


@pytest.mark.parametrize(
    "facts, visible, expected",
    [
        (("missing.0 1",), "1", {"GPU 2 (GPU-2000)": 70000}),  # counted among those that the cgroup leaves
        (("nvmlInit 9",), "0", "not applicable"),
        (("nvmlDeviceGetMemoryInfo_v2.1 15",), "1", "unknown"),
    ],
)
def test_memory_of_the_gpus_that_a_job_may_use(serve, four, facts, visible, expected):
    four.say(*FOUR, "used.2 70000", *facts)
    used_mb, verdict, _ = serve("--no-checks", env=four.env | {"CUDA_VISIBLE_DEVICES": visible}).memory()
    assert (used_mb or verdict) == expected


def test_a_driver_that_hangs_costs_its_reader_and_no_check(serve, four):
    four.say(*FOUR, "nvmlDeviceGetMemoryInfo_v2.3 hang")
    server = serve("--only=disk-space", env=four.env)
    server.say("memory 600\n")
    while "nvmlDeviceGetMemoryInfo_v2" not in four.met():
        assert server.process.poll() is None
        select.select([], [], [], 0.01)
    (pid,) = server.children()
    server.say("check\n")
    answer = server.plain()
    assert [finding["check"] for finding in answer["findings"]] == ["disk-space"] and "used_mb" not in answer
    four.say(*FOUR)
    assert len(server.plain()["used_mb"]) == 4 and ended(pid)
    four.say(*FOUR, "nvmlDeviceGetMemoryInfo_v2.3 hang")
    used_mb, verdict, said = server.memory(0.5)
    assert (used_mb, verdict) == ({}, "unknown") and said.endswith("memory in use of GPU 3")
    assert server.children() == []
