"""However a node fails its ranks, a spare has its place within two restarts; what fails with its rank moves no node."""

import pytest

from .stories import Story

pytestmark = pytest.mark.fast


# What the coordinator sees of each way.
NODES = """
device: rule=gpu-missing
library: rule=shared-library
file: rule=storage-error
shared memory: rule=torch-shared-memory
SIGBUS: kind=signal code=-7
SIGSEGV: kind=signal code=-11 rule=native-crash
exit 1: code=1
after 6 s: rule=illegal-access
after 10 steps: rule=python-exception
descriptors: rule=too-many-files
processes: rule=too-many-threads
killed: kind=signal code=-9
hang: hang rule=hang-culprit
not executable: kind=spawn
"""
SCRIPTS = """
value: rule=python-exception sure=likely
runtime: rule=python-exception
missing: rule=file-missing
torn: rule=data-torn
NaN: rule=not-finite
memory: rule=gpu-out-of-memory
storage: rule=storage-error
exit 3: code=3
SIGSEGV: kind=signal code=-11 rule=native-crash
hang: hang rule=hang-culprit
"""


class Job(Story):
    """`size` active nodes and a spare; with `prints` it is known that iteration 10 was reached."""

    def __init__(self, size, prints):
        super().__init__()
        self.prints, self.did = prints, []
        self.begin("running", f"{size} of {size + 1} crash_loop_s=0 max_restarts=5")

    @property
    def nodes(self):
        """By group rank."""
        return [int(node_id[1]) for _, node_id in sorted(self.core.job.assignment.places.items())]

    def fails(self, how):
        """The first rank of group rank 1 ends, and then all other workers."""
        nodes, cycle = self.nodes, self.core.job.cycle
        self.now += 6.0
        self.did += self.tell("fails", f"{nodes[1]} {cycle} local={2 - 2 * nodes[1]} {how}")
        if self.prints:
            self.tell("reached", f"{cycle} 10")
        for node in nodes:
            self.did += self.tell("stops", f"{node} {cycle}")


def each(table):
    return pytest.mark.parametrize("way", [line.partition(": ")[2] for line in table.split("\n") if line])


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("size", [2, 8])
@each(NODES)
def test_a_bad_node_has_lost_its_place_after_two_restarts(way, size, prints):
    job = Job(size, prints)
    job.fails(way), job.fails(way)
    assert (job.core.state.name, job.nodes[1]) == ("RUNNING", size)
    assert "strike:h1" in [did for node in job.nodes for did in job.tell("succeeds", f"{node} 2")]


@pytest.mark.parametrize("prints", [False, True])
@pytest.mark.parametrize("size", [2, 8])
@each(SCRIPTS)
def test_a_failure_that_moves_with_its_rank_moves_no_node(way, size, prints):
    """At most a spare tries it once. Where the iteration is known, that ends the job: code or data."""
    job, tried = Job(size, prints), 0
    while job.core.state.name == "RUNNING":
        tried += job.nodes[1] == size
        job.fails(way)
    ended = [did.partition("(")[0] for did in job.did if did.startswith(("strike", "refuse", "end"))]
    assert ended == ["end:93" if prints and "end:93(" in " ".join(job.did) else "end:1"]
    assert tried <= 1 and (job.nodes[1] == 1 or ended == ["end:93"])
