"""Places of nvrx-run on a real Slurm: srun directly, several agents per node, segments, job arrays, blocks."""

import os
import signal
import subprocess
import sys

import minicluster_init as init
import pytest
from minicluster import MiniCluster
from nvrx_job import EXCLUDES_N2, Jobs, kill
from stage import free_port
from waits import WAIT_S

pytestmark = pytest.mark.slurm


SEVERAL = "export NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE=yes\n"
TELLS = "mark(f\"local-{os.environ['LOCAL_RANK']}-of-{os.environ['LOCAL_WORLD_SIZE']}\")\n"
WAITS = TELLS + "if CYCLE < 2:\n    signal.pause()\n"


@pytest.mark.matrix
def test_two_agents_per_node_survive_a_killed_rank_and_a_lost_node(jobs):
    flags = "--nnodes=4 --nproc-per-node=1 --max-restarts=3"
    job = jobs.submit(WAITS, flags, nodes=3, sbatch=("--ntasks-per-node=2",), lead=SEVERAL)

    job.wait_marks("local-0-of-2", 2, cycle=0)
    last = job.wait_marks("local-1-of-2", 2, cycle=0)[1]
    assert job.places(0) == [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
    assert (last.rank, last.node) == (3, "n2")
    kill(last.pid, signal.SIGKILL)

    job.wait_marks("local-1-of-2", 2, cycle=1)
    job.wait_marks("up", 4, cycle=1)
    assert job.places(1) == job.places(0)
    assert jobs.cluster.kill_node("n2")

    job.ends("COMPLETED", 0)
    assert job.places(2) == [(0, "n1"), (1, "n1"), (2, "n3"), (3, "n3")]
    assert [mark.rank for mark in job.marks("local-1-of-2", 2)] == [1, 3]
    result = job.result()
    assert result["restarts_used"] == 2
    assert {path.name for path in job.run_dir.glob("agents/agent_*.log")} == {f"agent_{i}.log" for i in range(6)}


@pytest.mark.matrix
def test_a_segment_of_a_replacement_group_moves_as_a_whole(jobs):
    """n1 and n2 are one group, n3 and n4 the other: the loss of n2 moves both ranks."""
    prolog = '#!/bin/bash\necho "export NVRX_REPLACEMENT_GROUP_ID=group-$((SLURM_NODEID / 2))"\n'
    lead = f"cat >group.sh <<'EOF'\n{prolog}EOF\nchmod +x group.sh\n"
    flags = "--nnodes=2 --ft-segment=2 --nproc-per-node=1 --max-restarts=1 --srun-arg=--task-prolog=$PWD/group.sh"
    job = jobs.submit("if CYCLE == 0:\n    signal.pause()\n", flags, lead=lead)
    job.wait_marks("up", 2, cycle=0)
    assert job.places(0) == [(0, "n1"), (1, "n2")]
    assert jobs.cluster.kill_node("n2")
    assert job.wait_end().exit_code == 0, job.said()
    assert job.places(1) == [(0, "n3"), (1, "n4")]
    assert "new: n3 as group rank 0, n4 as group rank 1" in job.said()


@pytest.mark.matrix
def test_a_task_of_a_job_array_is_a_replacement_group(jobs):
    """Each of two array tasks has two nodes. A lost agent of the first moves both ranks to the second."""
    job = jobs.new("if CYCLE == 0:\n    signal.pause()\n")
    script = (
        "#!/bin/bash\nsrun -i none -k --kill-on-bad-exit=0 --wait=0 --mpi=none nvrx-run --nnodes=2:4"
        f" --ft-segment=2 --rdzv-endpoint=localhost:{free_port()} --rdzv-id=$SLURM_ARRAY_JOB_ID --max-restarts=1"
        " --nproc-per-node=1 worker.py\n"
    )
    shape = ("--array=0-1", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--no-kill")
    shape += (f"--output={job.directory}/%a.out",)
    job.job_id = jobs.cluster.submit(script, *shape, *jobs.environment(job), f"--chdir={job.directory}")
    first = job.wait_marks("up", 2, cycle=0)
    _, agent, _ = init._stat(first[1].pid)
    kill(agent, signal.SIGKILL)
    second = job.wait_marks("up", 2, cycle=1)
    nodes = [{mark.node for mark in marks} for marks in (first, second)]
    assert all(len(some) == 2 for some in nodes) and not nodes[0] & nodes[1]
    jobs.cluster.wait_job(f"{job.job_id}_1", 60.0)
    jobs.cluster.wait_job(f"{job.job_id}_0", 60.0)
    said = (job.directory / "0.out").read_text()
    assert "0 of 2 active nodes keep their group rank" in said and "job ends with code 0" in said, said
    assert "--no-kill" not in said  # see test_an_srun_without_no_kill_is_said


def test_srun_directly_needs_no_token_where_munge_is_and_shows_the_highest_code(jobs):
    """Without a batch script there is no front that knows better: srun reports the worst of the tasks."""
    job = jobs.new(EXCLUDES_N2 + 'print("rank", RANK)\n')
    place = ("--nodes=3", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
    flags = ("--spares=1", "--max-restarts=1")
    out = jobs.srun(job, *place, "nvrx-run", *flags, "worker.py", code=95)
    assert job.places(1) == [(0, "n1"), (1, "n3")]
    assert all(f"[rank {rank}] rank {rank}\n" in out for rank in range(2))
    assert "job ends with code 0" in out and job.result()["code"] == 0


@pytest.mark.matrix
def test_a_segment_of_a_block_moves_as_a_whole(needs_slurm, cluster_root):
    """Three blocks of two nodes. (Debian's 22.05 has no topology of blocks.)"""
    if reason := MiniCluster.available("26.05"):
        pytest.skip(reason)
    blocks = "BlockName=left Nodes=n[1-2]\nBlockName=right Nodes=n[3-4]\nBlockName=far Nodes=n[5-6]\nBlockSizes=2\n"
    (cluster_root / "topology.conf").write_text(blocks)
    flags = "--ft-segment=2 --spares=2 --max-restarts=1"
    extra = ("TopologyPlugin=topology/block",)
    with MiniCluster(cluster_root, 6, kill_wait_s=5, die_with_owner=True, slurm="26.05", extra=extra) as cluster:
        jobs = Jobs(cluster)
        job = jobs.submit("if CYCLE == 0:\n    signal.pause()\n", flags, 6)
        assert [mark.node for mark in job.wait_marks("up", 4, cycle=0)] == ["n1", "n2", "n3", "n4"]
        assert jobs.cluster.kill_node("n3")
        assert [mark.node for mark in job.wait_marks("up", 4, cycle=1)] == ["n1", "n2", "n5", "n6"]
        job.ends("COMPLETED", 0)

        env = {**os.environ, **cluster.env(), "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-6]"}
        command = [sys.executable, "-m", "nvrx_slurm.cli.run", "--dry-run", *flags.split(), "worker.py"]
        told = subprocess.run(command, env=env, cwd=job.directory, capture_output=True, text=True, timeout=60)
        rows = [line.split() for line in told.stdout.splitlines() if line.startswith("  n")]
        assert [row[0] for row in rows if "spare" in row] == ["n5", "n6"] and len(rows) == 6, told.stdout + told.stderr
        jobs.check()


@pytest.mark.xdist_group("slurm-d")
@pytest.mark.skipif(os.geteuid() != 0, reason="nodes have an /etc/hosts of their own where root makes it")
def test_names_that_are_loopback_on_their_own_node_only(varied):
    """As Debian's installer writes /etc/hosts: the coordinator and its successor are reached by their names."""
    worker = "import socket\nmark(socket.gethostbyname(os.environ['MASTER_ADDR']))\nCYCLE or signal.pause()\n"
    job = varied.submit(worker, "--spares=1 --max-restarts=1", 3)
    (at,) = job.wait_marks("127.0.1.1", 1, cycle=0)
    (other,) = job.wait_marks("127.0.0.1", 1, cycle=0)
    assert (at.rank, other.rank) == (0, 1) and varied.cluster.kill_node(at.node)
    job.wait_end()
    assert job.result()["code"] == 0, job.said()
    assert len(job.marks("127.0.1.1", 1)) == len(job.marks("127.0.0.1", 1)) == 1


# With STARTS a rank does what scripts do that evaluate a checkpoint.
STARTS = """
import subprocess
if RANK == 1:
    mark(f"alone-{subprocess.run(['nvrx-run', 'alone.py']).returncode}")
    argv = ["sbatch", "--parsable", "--nodes=2", "--wrap", "nvrx-run --nproc-per-node=1 late.py"]
    mark("submits-" + subprocess.run(argv, capture_output=True, text=True).stdout.strip())
"""
TELLS_ALL = """import os
told = {name: os.environ[name] for name in ("WORLD_SIZE", "NVRX_RUN_DIR")}
open(os.path.basename(__file__) + os.environ["RANK"], "w").write(" ".join(told.values()))
"""


def test_what_a_rank_starts_and_submits_is_no_part_of_its_step(jobs):
    job = jobs.new(STARTS)
    for name in ("alone.py", "late.py"):
        (job.directory / name).write_text(TELLS_ALL)
    place = ("--nodes=2", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--wait=0")
    out = jobs.srun(job, *place, "nvrx-run", "--nproc-per-node=1", "--max-restarts=0", "worker.py")
    assert "job ends with code 0" in out and job.marks("alone-0"), out
    world, run_dir = (job.directory / "alone.py0").read_text().split()
    assert world == "1" and "/nvrx_logs/local-" in run_dir

    lines = (job.directory / "marks").read_text().split()
    late = next(line.removeprefix("submits-") for line in lines if line.startswith("submits-"))
    end = jobs.cluster.wait_job(int(late), WAIT_S)
    assert end.exit_code == 0, (job.directory / f"slurm-{late}.out").read_text()
    for rank in range(2):
        world, run_dir = (job.directory / f"late.py{rank}").read_text().split()
        assert world == "2" and run_dir.endswith(f"/nvrx_logs/{late}/r0")
