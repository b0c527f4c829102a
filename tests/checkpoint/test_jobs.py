"""Jobs of real `nvrx-run` and gloo: a fault costs one step, and nothing of ours is left when the job is gone."""

import os
import re
import select
import signal
import tempfile
from pathlib import Path

import pytest
from jobs_harness import BOUND_S, FAULT_AT, REPO, STEPS, TRAINING, begins, keepers, launch
from stage import free_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.process, pytest.mark.timeout(500)]


@pytest.fixture
def directory():
    with tempfile.TemporaryDirectory(prefix="nvrx-kt-") as name:
        (Path(name) / "train.py").write_text(TRAINING)
        yield Path(name)


def start(directory, fault, *more):
    return launch(directory, [str(directory / "train.py"), fault, str(FAULT_AT), str(STEPS)], *more)


def run(directory, fault, *more):
    """Its output, and the weights of its ranks."""
    with start(directory, fault, *more) as job:
        text, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 0, text
    assert keepers(job.pid) == []
    return text, set(re.findall(r"weights \d (\w+)", text))


def test_a_killed_rank_costs_one_step_while_the_other_waits_in_c(directory):
    _, undisturbed = run(directory, "none")
    text, weights = run(directory, "killed")
    assert len(re.findall(r"fault \d", text)) == 2
    assert begins(text, 0) == {0} and begins(text, 1) == {FAULT_AT}
    assert len(undisturbed) == 1 and weights == undisturbed


def test_all_ranks_take_the_iteration_that_each_of_them_has(directory):
    """The one that was killed in its save has not the newest of the other."""
    text, weights = run(directory, "in-a-save", "--ft-checkpoint-memory=1T")
    assert "saves may be refused" in text  # the keeper is there before the first save
    assert begins(text, 1) == {FAULT_AT}
    assert len(weights) == 1


def test_two_agents_of_one_host_have_a_keeper_each(directory):
    place = ("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=two")
    with start(directory, "killed", *place) as one, start(directory, "killed", *place) as other:
        texts = [job.communicate(timeout=BOUND_S)[0] for job in (one, other)]
    assert one.returncode == other.returncode == 0, texts
    assert [begins(text, 1) for text in texts] == [{FAULT_AT}] * 2
    assert keepers(one.pid) == keepers(other.pid) == []


def test_the_example_loses_no_more_than_a_step(directory):
    """Its disk has nothing yet when a rank is killed."""
    ends = []
    for faulty in (False, True):
        progress, place = directory / f"progress{faulty}", directory / f"disk{faulty}"
        words = ("--steps=60", "--step-time=0.02", "--memory-every=1", "--checkpoint-every=50")
        words += (f"--progress-file={progress}", f"--checkpoint-dir={place}")
        with launch(directory, [str(REPO / "examples/ddp.py"), *words]) as job:
            step, pid = 0, 0
            while faulty and step < 10:
                step, pid = map(int, read(Path(f"{progress}.1")).split() or (0, 0))
                select.select([], [], [], 0.01)
            if faulty:
                os.kill(pid, signal.SIGKILL)
            text, _ = job.communicate(timeout=BOUND_S)
        assert job.returncode == 0, text
        resumed = re.findall(r"resumed from step (\d+), in memory", text)
        assert [int(one) >= step - 1 for one in resumed] == [True] * faulty, text
        ends += re.findall(r"weights sha256=\w+", text)
    assert len(ends) == 2 and len(set(ends)) == 1


def read(path):
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def test_the_keeper_outlives_a_killed_agent_for_a_while(directory):
    with start(directory, "agent") as job:
        for line in job.stdout:
            if re.search(r"fault \d", line):
                break
        (keeper,) = keepers(job.pid)
        pidfd = os.pidfd_open(keeper)
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert not select.select([pidfd], [], [], 1.0)[0]
        assert select.select([pidfd], [], [], BOUND_S)[0]
        os.close(pidfd)
    assert keepers(job.pid) == []
