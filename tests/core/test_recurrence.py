"""However a node fails its ranks, a spare has its place within two restarts; what fails with its rank moves no node."""

from __future__ import annotations

import pytest

from .stories import Story

NODES = {
    "device": "rule=gpu-missing",
    "library": "rule=shared-library",
    "file": "rule=storage-error",
    "shared-memory": "rule=torch-shared-memory",
    "SIGBUS": "kind=signal code=-7",
    "SIGSEGV": "kind=signal code=-11 rule=native-crash",
    "exit-1": "",
    "after-6-s": "rule=illegal-access",
    "after-10-steps": "rule=python-exception",
    "descriptors": "rule=too-many-files",
    "processes": "rule=too-many-threads",
    "killed": "kind=signal code=-9",
    "hang": "hang rule=hang-culprit",
    "not-executable": "kind=spawn",
}
CODE = "rule=python-exception sure=likely"
SCRIPTS = {name: NODES[name] for name in ("exit-1", "SIGSEGV", "hang", "after-10-steps", "file")}
SCRIPTS |= {
    "missing": "rule=file-missing",
    "NaN": "rule=not-finite",
    "value": CODE,
    "shard": "rule=data-torn",
    "3": "code=3",
}


class Job(Story):
    """So many active nodes and a spare."""

    def __init__(self, size: int, prints: bool) -> None:
        super().__init__()
        self.prints = prints
        self.begin("running", f"{size} of {size + 1} crash_loop_s=0 max_restarts=5")

    @property
    def places(self) -> dict[int, int]:
        """Infra ranks by group rank."""
        return {g: int(node_id[1 : node_id.index(".")]) for g, node_id in self.core.job.assignment.places.items()}

    def fails(self, node: int, how: str) -> list[str]:
        """The first rank of a node ends, and the workers of all nodes."""
        cycle, places, done = self.core.job.cycle, self.places, []
        self.now += 6.0
        [group_rank] = [g for g, one in places.items() if one == node]
        done += self.tell("fails", f"{node} {cycle} local={2 * (group_rank - node)} {how}")
        if self.prints:
            done += self.tell("reached", f"{cycle} 10")
        for one in places.values():
            done += self.tell("stops", f"{one} {cycle}")
        return done


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("way", NODES)
def test_a_bad_node_has_lost_its_place_after_two_restarts(way: str, size: int, prints: bool) -> None:
    job = Job(size, prints)
    for _ in range(2):
        assert job.core.state.name == "RUNNING"
        job.fails(1, NODES[way])
    assert (job.places[1], job.core.budget.history.restarts_used) == (size, 2)
    done = [word for node in job.places.values() for word in job.tell("succeeds", f"{node} 2")]
    assert "strike:h1" in done and not job.core.budget.history.excluded


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("way", SCRIPTS)
def test_a_failure_that_moves_with_its_rank_moves_no_node(way: str, size: int, prints: bool) -> None:
    """At most a spare tries it once. Where iterations tell, the job ends then: code or data."""
    job, done, tried = Job(size, prints), list[str](), 0
    while job.core.state.name == "RUNNING":
        tried += job.places[1] != 1
        done += job.fails(job.places[1], SCRIPTS[way])
    assert tried <= 1 and not [word for word in done if word.startswith("strike")]
    assert f"end:{93 if '93' in ' '.join(done) else 1}" in " ".join(done)
    assert not job.core.budget.history.excluded and (job.places[1] == 1 or "end:93" in " ".join(done))
