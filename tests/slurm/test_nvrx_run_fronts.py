"""The front in a batch script: several in one allocation, after a shrink, killed, and where users keep odd files."""

from __future__ import annotations

import pytest
from nvrx_job import Jobs

pytestmark = pytest.mark.slurm

# What the two nvrx-runs of one batch script do; they meet in the FIFO "go".
BY_NAME = """
which = os.environ["WHICH"]
if which == "waits":
    open("begun", "w").write("x")
    open("go").read(1)
elif which == "fails":
    sys.exit(3)
elif which == "tells":
    open("go", "w").write("x")
    signal.pause()
elif which == "holds" and CYCLE == 0:
    signal.pause()
"""


def test_several_in_one_allocation(jobs: Jobs) -> None:
    """One beside files that shadow modules, two side by side, one that is killed with its step, and one more."""
    lead = """mkfifo go begun
mkdir odd; for m in json asyncio logging socket random; do echo 'x = 1' > odd/$m.py; done
(cd odd; nvrx-run --no-python /bin/true); echo "odd: $?"
WHICH=waits nvrx-run --srun-arg=--overlap worker.py & first=$!
exec 3<> begun; read -n 1 <&3
WHICH=fails nvrx-run --srun-arg=--overlap worker.py; echo "second: $?"
echo x > go
wait $first; echo "first: $?"
WHICH=tells nvrx-run worker.py & front=$!
read -n 1 < go
kill -KILL $front; wait $front; echo "killed: $?"
export WHICH=ends"""
    job = jobs.submit(BY_NAME, nodes=1, lead=lead)
    assert job.wait_end().exit_code == 0, job.said()
    for line in ("odd: 0", "second: 1", "first: 0", "killed: 137"):
        assert line in job.said(), job.said()
    runs = sorted(path.name for path in (job.directory / "nvrx_logs" / str(job.job_id)).iterdir())
    assert runs == ["r0", "r0_2", "r0_3", "r0_4"]


def test_after_a_shrink_the_next_one_uses_the_nodes_that_are_left(jobs: Jobs) -> None:
    lead = """WHICH=holds nvrx-run --spares=2 --max-restarts=1 worker.py; echo "first: $?"
scontrol update nodename=n2 state=down reason=test
export WHICH=ends"""
    job = jobs.submit(BY_NAME, "--spares=1", lead=lead)
    job.wait_marks("up", 2)
    assert jobs.cluster.kill_node("n2")
    assert job.wait_end().exit_code == 0, job.said()
    assert "first: 0" in job.said()
    assert "--nodelist=n1,n3,n4" in (job.run_dir / "srun_command").read_text()


def test_a_step_that_slurm_does_not_start_is_given_up(jobs: Jobs) -> None:
    lead = """mkfifo go begun
srun --exact bash -c 'echo x > begun; read < go' & busy=$!
read -n 1 < begun
nvrx-run --rdzv-conf=join_timeout=7 --srun-arg=--exact worker.py; echo "waited: $?"
echo x > go; wait $busy; exit 0"""
    job = jobs.submit("", nodes=1, lead=lead)
    assert job.wait_end().exit_code == 0, job.said()
    assert "waited: 94" in job.said() and "Slurm has not started the step within 7 s" in job.said(), job.said()
