"""Jobs of real `nvrx-run` on several nodes, and gloo: nodes, keepers and bits are lost, and the weights are the same.

All ranks wait in C when a fault comes, as in a collective, and each keeper has the copies of the last iteration.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stage import free_port
from test_jobs import BOUND_S, FAULT_AT, STEPS, TRAINING, begins, keepers, launch

from nvrx_slurm.checkpoint import link
from nvrx_slurm.checkpoint import messages as m

pytest.importorskip("torch")
pytestmark = pytest.mark.process

FLAGS = (
    *("--max-restarts=3", "--ft-checkpoint-interface=lo", "--rdzv-id=copies"),
    *("--ft-keepalive-interval=2", "--ft-keepalive-timeout=2"),
)
LAST_CALL = "--rdzv-conf=join_timeout=60,last_call_timeout=30"


class Node:
    """One agent, and what it prints."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.text = ""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.text += line

    @property
    def waits(self) -> list[tuple[int, str]]:
        """Pid and keeper of each rank that waits for its fault."""
        return self.waits_in(0)

    def waits_in(self, cycle: int) -> list[tuple[int, str]]:
        found = re.findall(rf"fault \d+ \d+ (\d+) (\S+) {cycle}$", self.text, re.M)
        return [(int(pid), name) for pid, name in found]

    def kill(self) -> None:
        self.process.kill()

    def kill_keeper(self) -> None:
        (pid,) = keepers(self.process.pid)
        os.kill(pid, signal.SIGKILL)

    def kill_rank(self) -> None:
        os.kill(self.waits[1][0], signal.SIGKILL)

    def flip(self, chosen: slice = slice(None)) -> int:
        """A bit in each save of this keeper; `chosen`: of those with the last iterations. Returns how many."""
        (pid,) = keepers(self.process.pid)
        paths = [path for path in Path(f"/proc/{pid}/fd").iterdir() if "nvrx-checkpoint" in os.readlink(path)]
        for path in paths[chosen]:
            with path.open("r+b", buffering=0) as memory:
                byte = memory.read(1)
                memory.seek(0)
                memory.write(bytes([byte[0] ^ 1]))
        return len(paths)


class Job:
    """`active` nodes of two ranks, and spares."""

    def __init__(self, directory: Path, fault: str, active: int, spares: int) -> None:
        self.directory = directory
        where = (f"--nnodes={active}:{active + spares}", f"--rdzv-endpoint=127.0.0.1:{free_port()}", LAST_CALL)
        words = [str(directory / "train.py"), fault, str(FAULT_AT), str(STEPS)]
        ranks = range(active + spares)
        self.nodes = [Node(launch(directory, words, *FLAGS, *where, f"--node-rank={rank}")) for rank in ranks]
        self.active = self.nodes[:active]

    def reach_the_fault(self, cycle: int = 0) -> list[Node]:
        """The active nodes, when all ranks wait, and each keeper has the copies of the last iteration."""
        active: list[Node] = []

        def all_wait() -> bool:
            active[:] = [one for one in self.nodes if len(one.waits_in(cycle)) == 2]
            return len(active) == len(self.active)

        self._until(all_wait)
        names = [one.waits_in(cycle)[0][1] for one in active]
        self._until(lambda: all(self._copies(name, FAULT_AT + cycle) == 2 for name in names))
        return active

    def _copies(self, name: str, iteration: int) -> int:
        with link.connect(name) as connection:
            connection.send(m.requests.encode(m.AskKept()))
            answer = m.answers.decode(connection.recv(m.MAX_PACKET_BYTES))
        assert isinstance(answer, m.AllKept)
        return sum(one.iteration == iteration for one in answer.kept) - 2

    def _until(self, condition: Callable[[], bool]) -> None:
        for _ in range(int(BOUND_S * 20)):
            if condition():
                return
            select.select([], [], [], 0.05)
        raise AssertionError([one.text for one in self.nodes])

    def end(self, *lost: Node) -> set[str]:
        """The weights, when all others have ended well; nothing of theirs is left."""
        for one in self.nodes:
            one.process.wait(BOUND_S)
            one.reader.join()
        rest = [one for one in self.nodes if one not in lost]
        assert [one.process.returncode for one in rest] == [0] * len(rest), self.text
        assert [keepers(one.process.pid) for one in rest] == [[]] * len(rest)
        return set(re.findall(r"weights \d (\w+)", self.text))

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.nodes)

    def close(self) -> None:
        for one in self.nodes:
            one.process.kill()
            one.process.wait()
            for pid in keepers(one.process.pid):  # of an agent that was killed: it would linger
                os.kill(pid, signal.SIGKILL)
            one.reader.join()
            print(one.text)


@pytest.fixture
def make() -> Iterator[Callable[..., Job]]:
    with tempfile.TemporaryDirectory(prefix="nvrx-kc-") as name:
        jobs: list[Job] = []

        def job(fault: str = "once", active: int = 2, spares: int = 1) -> Job:
            directory = Path(name) / str(len(jobs))
            directory.mkdir()
            (directory / "train.py").write_text(TRAINING)
            jobs.append(Job(directory, fault, active, spares))
            if fault in ("once", "told"):
                jobs[-1].reach_the_fault()
            return jobs[-1]

        yield job
        for one in jobs:
            one.close()


_undisturbed: set[str] = set()


@pytest.fixture
def undisturbed(make: Callable[..., Job]) -> set[str]:
    """The weights of a job of two nodes without a fault."""
    if not _undisturbed:
        _undisturbed.update(make("none", spares=0).end())
        assert len(_undisturbed) == 1
    return _undisturbed


def lost_node(job: Job) -> list[Node]:
    job.active[1].kill()
    return [job.active[1]]


def lost_coordinator(job: Job) -> list[Node]:
    job.active[0].kill()
    return [job.active[0]]


def killed_rank(job: Job) -> list[Node]:
    job.active[1].kill_rank()
    return []


def killed_keeper(job: Job) -> list[Node]:
    """A rank of that node is killed, too."""
    job.active[1].kill_keeper()
    job.active[1].kill_rank()
    return []


def killed_keeper_of_the_rest(job: Job) -> list[Node]:
    """The keeper of one node and a rank of the other."""
    job.active[1].kill_keeper()
    job.active[0].kill_rank()
    return []


FAULTS = [lost_node, lost_coordinator, killed_rank, killed_keeper, killed_keeper_of_the_rest]


@pytest.mark.repeats("killed_rank", "killed_keeper_of_the_rest")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_a_fault_costs_no_more_than_the_step_that_ran(
    make: Callable[..., Job], undisturbed: set[str], fault: Callable[[Job], list[Node]]
) -> None:
    job = make()
    lost = fault(job)
    assert job.end(*lost) == undisturbed
    assert begins(job.text, 0) == {0} and begins(job.text, 1) == {FAULT_AT}
    assert f"iteration {FAULT_AT} is in memory for all ranks" in job.text
    assert ("another one starts" in job.text) == ("keeper" in fault.__name__)


def test_two_partners_that_are_lost_at_once_lead_to_the_disk(make: Callable[..., Job], undisturbed: set[str]) -> None:
    """There is none: the training begins anew."""
    job = make(spares=2)
    job.active[1].kill(), job.active[0].kill()
    assert job.end(*job.active) == undisturbed
    assert begins(job.text, 1) == {0}


def test_a_rank_and_the_node_of_its_copy_cost_no_more(make: Callable[..., Job], undisturbed: set[str]) -> None:
    """The rank's own memory is left."""
    job = make()
    job.active[0].kill_rank(), job.active[1].kill()
    assert job.end(job.active[1]) == undisturbed
    assert begins(job.text, 1) == {FAULT_AT}


def test_bits_that_flip_on_one_node_are_mended_from_its_partner(
    make: Callable[..., Job], undisturbed: set[str]
) -> None:
    job = make()
    assert job.active[1].flip() == 8  # own and copies, two of each rank
    job.active[1].kill_rank()
    assert job.end() == undisturbed
    assert begins(job.text, 1) == {FAULT_AT}
    assert "is damaged here" in job.text and "was fetched" in job.text


@pytest.mark.matrix
def test_bits_that_flip_everywhere_lead_to_the_disk(make: Callable[..., Job], undisturbed: set[str]) -> None:
    job = make()
    for one in job.active:
        one.flip()
    job.active[1].kill_rank()
    assert job.end() == undisturbed
    assert begins(job.text, 1) == {0}
    assert "is damaged here" in job.text and "cannot be fetched" in job.text


def test_two_coordinators_that_are_lost_one_after_another(make: Callable[..., Job], undisturbed: set[str]) -> None:
    """The second spare gets what the first cycle and the second one have saved."""
    job = make("told", spares=2)
    lost = lost_coordinator(job)
    job.reach_the_fault(cycle=1)
    lost += lost_node(job)
    assert job.end(*lost) == undisturbed
    assert begins(job.text, 1) == {FAULT_AT} and begins(job.text, 2) == {FAULT_AT + 1}


@pytest.mark.matrix
def test_a_rank_that_is_killed_in_a_save_of_a_job_with_copies(make: Callable[..., Job], undisturbed: set[str]) -> None:
    """Other ranks are a step further, and their copies, too: all take the iteration that each of them has."""
    job = make("in-a-save", spares=0)
    assert job.end() == undisturbed
    # The checksum of the last save may not have been compared yet: then it is the one before.
    assert begins(job.text, 1) in ({FAULT_AT}, {FAULT_AT - 1})
