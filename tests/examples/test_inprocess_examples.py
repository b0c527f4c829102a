"""The in-process examples learn the same, whichever rank is hit by whatever fault: real processes, real gloo."""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from ranks_harness import Script
from stage import await_end, free_port, running_with

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.torch]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "inprocess"
BOUND_S = 90.0  # for a run; on an idle machine it takes five seconds
STEPS = 40
TRAINING = (f"--steps={STEPS}", "--step-time=0.02", "--checkpoint-every=10")  # 0.8 s: longer than until the fault


class Runs:
    """Starts the examples; afterwards no process of theirs may be left."""

    def __init__(self, zygote, directory):
        self._zygote, self.directory = zygote, directory
        self.mark = f"NVRX_TEST_MARK={uuid.uuid4().hex}"
        self.codes = []

    def ranks(self, script, world_size, *options, **more):
        """Start the ranks themselves, with nothing but torch's environment; all output, exit codes in `codes`."""
        env = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **more}
        command = [str(EXAMPLES / script), *TRAINING, *options]
        started = [
            Script(self._zygote, command, env | {"RANK": rank, "LOCAL_RANK": rank}, self.directory / f"{rank}.err")
            for rank in map(str, range(world_size))
        ]
        try:
            text = "".join("".join(one.communicate(BOUND_S)) for one in started)
        finally:
            for one in started:
                one.close()
        self.codes = [one.returncode for one in started]
        return text

    def launched(self, script, *options, policy="min-healthy"):
        """Two ranks per node; all output, exit codes in `codes`. min-healthy: two nvrx-run, one must stay good."""
        nodes = 2 if policy == "min-healthy" else 1
        command = [sys.executable, "-m", "nvrx_slurm.cli.run", "--nproc-per-node=2", "--max-restarts=1"]
        command += [f"--nnodes=1:{nodes}", "--rdzv-conf=join_timeout=60,last_call_timeout=60"]
        command += [f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
        command += [f"--restart-policy={policy}", "--ft-preload=torch,torch._dynamo"]  # one import per node
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FT_", "NVRX_", "TORCHELASTIC_"))}
        env |= dict([self.mark.split("=")])
        with (self.directory / "out").open("ab") as out:
            started = [
                subprocess.Popen(
                    [*command, f"--node-rank={node}", str(EXAMPLES / script), *TRAINING, *options],
                    env=env, cwd=self.directory, stdout=out, stderr=subprocess.STDOUT,
                )
                for node in range(nodes)
            ]  # fmt: skip
        deadline_s = time.monotonic() + BOUND_S
        try:
            self.codes = [process.wait(max(0.0, deadline_s - time.monotonic())) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        return (self.directory / "out").read_text(errors="replace")

    def check(self):
        self._zygote.await_no_children(10.0)
        assert await_end(running_with(self.mark), 10.0) == []


@pytest.fixture
def runs(zygote, tmp_path):
    made = Runs(zygote, tmp_path)
    yield made
    made.check()


def outcome(text):
    """Step and loss of the one rank that says them."""
    said = re.findall(r"final step (\d+) loss (\S+)$", text, re.MULTILINE)
    assert len(said) == 1, text
    return int(said[0][0]), float(said[0][1])


def who_was_hit(text):
    hit = re.search(r"^(?:\[rank \d+\] )?rank (\d+) pid \d+ is hit$", text, re.MULTILINE)
    assert hit, f"the fault never came:\n{text}"
    return int(hit[1])


@pytest.fixture(scope="module")
def undisturbed(zygote, tmp_path_factory):
    """What one rank alone comes to. More ranks add in another order, hence almost the same."""
    made = Runs(zygote, tmp_path_factory.mktemp("undisturbed"))
    text = made.ranks("basic.py", 1)
    made.check()
    assert made.codes == [0], text
    step, loss = outcome(text)
    return step, pytest.approx(loss, rel=1e-9)


@pytest.mark.repeats("SIGKILL")
@pytest.mark.parametrize("fault", ["ASYNC_EXC", "SIGKILL"])
def test_basic_without_a_launcher(runs, undisturbed, fault):
    text = runs.ranks("basic.py", 3, f"--fault={fault}", "--fault-after=0.4")
    lost = {who_was_hit(text)} if fault == "SIGKILL" else set()
    assert who_was_hit(text) in range(3) and outcome(text) == undisturbed
    assert runs.codes == [-9 if rank in lost else 0 for rank in range(3)], text
    assert "iteration 0: 3 ranks" in text and f"iteration 1: {3 - len(lost)} ranks" in text


def test_a_reserve_rank_takes_over_and_goes_on_from_memory(runs, undisturbed):
    options = ("--active=2", "--hang-timeout=3", "--snapshot-every=2", "--checkpoint-every=1000")
    text = runs.ranks("advanced.py", 3, *options, "--fault=SIGSTOP", "--fault-after=0.4", "--fault-seed=1")
    assert outcome(text) == undisturbed
    assert [rank for rank, code in enumerate(runs.codes) if code < 0] == [who_was_hit(text)], (runs.codes, text)
    assert "iteration 0: 2 ranks" in text and "iteration 1: 2 ranks" in text  # the third one has taken its place
    assert re.search(r"continued from the snapshot of step [1-9]", text), text


@pytest.mark.matrix
def test_under_the_launcher_a_node_that_lost_a_rank_leaves_and_the_other_one_goes_on(runs, undisturbed):
    text = runs.launched("with_launcher.py", "--fault=SIGKILL", "--fault-after=0.4")
    assert (runs.codes, outcome(text)) == ([0, 0], undisturbed)
    assert "cycle 0 iteration 0: 4 ranks" in text and "cycle 0 iteration 1: 2 ranks" in text
    assert "was killed by SIGKILL; going on: 1 of 2 nodes are good, 1 are needed" in text
    neighbour = who_was_hit(text) ^ 1  # on the same node
    left = rf"RankDiscarded: rank {neighbour} of iteration 1 was terminated"
    ended = rf"rank {neighbour} \(.*\) was killed by SIGTERM"  # by its own monitor, where torch's store answers late
    assert re.search(f"{left}|{ended}", text), text
    assert "restart 1" not in text


@pytest.mark.matrix
@pytest.mark.parametrize("fault, lives", [("ASYNC_EXC", "iteration 1: 2 ranks"), ("SIGKILL", "restart 1 of 1")])
def test_under_the_default_policy_exceptions_stay_in_process_and_a_dead_process_restarts_all(
    runs, undisturbed, fault, lives
):
    text = runs.launched("basic.py", f"--fault={fault}", "--fault-after=0.4", policy="any-failed")
    assert (runs.codes, outcome(text)) == ([0], undisturbed) and who_was_hit(text) in range(2)
    assert lives in text and text.count("a process that ends makes nvrx-run restart all ranks") == 1
    assert ("restart 1 of 1" in text) == (fault == "SIGKILL")
    if fault == "ASYNC_EXC":
        (written,) = runs.directory.glob("nvrx_logs/*/r0/result.json")
        (note,) = json.loads(written.read_text())["inprocess_restarts"]
        assert (note["cycle"], note["iteration"]) == (0, 0) and f"rank {who_was_hit(text)}: exception" in note["why"]
