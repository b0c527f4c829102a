"""nvrx-run on a real Slurm keeps a job running: crash, hang, lost node, killed agent; its log tree; how it gives up."""

import json
import os
import signal
import subprocess
import sys

import minicluster_init as init
import pytest
from nvrx_job import CLIENT, kill
from stage import await_end

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm-b")]


TWO_PLUS_TWO = "--spares=2 --nproc-per-node=2 --max-restarts=2"
ON_N1_N2 = [(0, "n1"), (1, "n1"), (2, "n2"), (3, "n2")]
BEATING = CLIENT + """
import time
for beat in range(10**9 if CYCLE < 4 else 5):
    client.send_heartbeat()
    if beat == 2:
        mark("beats")
    time.sleep(0.05)
client.shutdown_workload_monitoring()
"""  # fmt: skip


def test_a_batch_job_with_spares_finishes_and_leaves_its_log_tree(jobs):
    job = jobs.submit(
        'print("hello from", RANK, "of", os.environ["WORLD_SIZE"])\n'
        'print("careful", file=sys.stderr)\n'
        'mark("token" if "NVRX_TOKEN" in os.environ else "no-token")\n',
        f"--ft-slurm-comment=true {TWO_PLUS_TWO}",
        sbatch=("--job-name=llama",),
    )
    job.ends("COMPLETED", 0)
    shown = jobs.cluster.run("scontrol", "show", "job", str(job.job_id))
    assert "Comment=nvrx ended with code 0, 0 restarts" in str(shown)
    assert job.places(0) == ON_N1_N2
    assert len(job.marks("no-token")) == 4  # the secret is not handed to user code

    run = job.directory / "nvrx_logs" / str(job.job_id) / "r0"
    assert os.readlink(job.directory / "nvrx_logs" / "latest") == f"{job.job_id}/r0"
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    ranks = {f"cycle_0/node_{r // 2}_n{r // 2 + 1}/rank_{r}.{e}" for r in range(4) for e in ("out", "err")}
    agents = {f"agents/agent_{i}.log" for i in range(4)} | {
        f"events/{who}_{i}.jsonl" for who in ("agent", "election") for i in range(4)
    }
    assert files == ranks | agents | {
        "events/coordinator.jsonl",
        "result.json",
        "status.json",
        "srun_command",
        "console",
    }
    assert (run / "cycle_0/node_1_n2/rank_3.out").read_text() == "hello from 3 of 4\n"
    assert (run / "cycle_0/node_1_n2/rank_3.err").read_text() == "careful\n"
    status = json.loads((run / "status.json").read_text())
    labels = {"job": str(job.job_id), "run": "r0", "name": "llama", "user": "root", "partition": "main"}
    assert labels.items() <= status["job"].items()
    assert "[rank 1] hello from 1 of 4\n" in job.said()
    assert "[rank 2] careful\n" in job.agent_log(1)
    result = job.result()
    wanted = {"code": 0, "reason": "all ranks finished", "slurm_restart_count": 0, "first_cause": None, "faults": []}
    assert {name: result[name] for name in wanted} == wanted


def test_a_crash_a_hang_a_lost_node_and_a_killed_agent_are_survived(jobs):
    flags = "--spares=2 --nproc-per-node=2 --max-restarts=4 --ft-rank-heartbeat-timeout=1"
    job = jobs.submit(BEATING, f"{flags} --ft-initial-rank-heartbeat-timeout=20")

    crashed = job.wait_marks("beats", 4, cycle=0)[3]
    ask = [sys.executable, "-m", "nvrx_slurm.cli.toolbox", "stacks", str(job.run_dir)]
    inside = {"SLURM_JOB_ID": str(job.job_id), "SLURM_NNODES": "1", "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8"}
    env = os.environ | jobs.cluster.env() | {"TMPDIR": str(job.directory)} | inside  # as in the batch script
    shown = subprocess.run(ask, env=env, capture_output=True, text=True, check=False)
    assert shown.returncode == 0 and shown.stdout.count('worker.py", line ') == 4, shown
    assert all(f"\nrank {rank} on node {node}, pid " in shown.stdout for rank, node in ON_N1_N2)
    kill(crashed.pid, signal.SIGKILL)

    hung = job.wait_marks("beats", 4, cycle=1)[1]
    kill(hung.pid, signal.SIGSTOP)

    lost = job.wait_marks("beats", 4, cycle=2)
    assert job.places(0) == job.places(1) == job.places(2) == ON_N1_N2
    assert jobs.cluster.kill_node("n2")

    _, agent, _ = init._stat(job.wait_marks("beats", 4, cycle=3)[2].pid)
    family = init.descendants(agent)  # at least the workers and their monitors
    kill(agent, signal.SIGKILL)
    assert len(family) >= 4 and await_end(family, 1.0) == []

    job.wait_marks("beats", 4, cycle=4)
    job.ends("COMPLETED", 0)
    # The first spare, unless it had just been asked whether it is healthy, and the other one had answered.
    spares = [[(0, "n1"), (1, "n1"), (2, spare), (3, spare)] for spare in ("n3", "n4")]
    assert [job.places(3), job.places(4)] in (spares, spares[::-1])
    assert job.marks("up", 5) == [] and all(init.process(mark.pid) is None for mark in lost)
    said = job.said()
    assert f"rank 3 (local rank 1, pid {crashed.pid}) on node 1 (n2) was killed by SIGKILL; restart 1 of 4" in said
    assert f"rank 1 (local rank 1, pid {hung.pid}) on node 0 (n1) hung: it is stopped" in said
    assert "node 1 (n2) was lost" in said and "restart 4 of 4" in said
    stacks = (job.run_dir / "cycle_1/node_0_n1/rank_1.err").read_text()
    assert "most recent call first" in stacks and "worker.py" in stacks, stacks
