"""The command itself: what `--dry-run` shows, what a login node says, that the programs are installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import BATCH_SCRIPT, ONE_TASK, SEVERAL, TASK

from nvrx_slurm.cli.here import StartPlace

pytestmark = pytest.mark.fast


GOLDEN = """\
place: {place}

srun line (in a batch script or salloc shell):
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --nodes=3 --ntasks=3 --ntasks-per-node=1 --input=none \
--output={logs}/agents/agent_%t.log --error={logs}/agents/agent_%t.log --open-mode=append \
--export=ALL,SLURM_CPUS_PER_TASK=4 \
--job-name=nvrx-run.PID --exclusive {python} -m nvrx_slurm.cli.run {words}

plan of cycle 0: 2 active nodes x 8 ranks, 1 spare nodes
  n1               infra rank 0      ranks 0..7
  n2               infra rank 1      ranks 8..15
  n3               infra rank 2      hot spare

logs: {logs}
worker: {python} -u train.py --lr 0.1 --dry-run

environment of rank 0, besides what is inherited:
  RANK=0
  LOCAL_RANK=0
  WORLD_SIZE=16
"""


def test_dry_run_in_a_batch_script(nvrx_run, work):
    """It needs no Slurm; the srun line is the one that would run, the script keeps its arguments."""
    env = {**BATCH_SCRIPT, "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "8"}
    flags = "--spares=1 --max-restarts=3 --srun-arg=--exclusive"
    code, out, err = nvrx_run("--dry_run", *flags.split(), "train.py", "--lr", "0.1", "--dry-run", **env)
    assert (code, err) == (0, "") and not (work / "nvrx_logs").exists()
    logs, words = work / "nvrx_logs/7/r0", f"{flags} train.py --lr 0.1 --dry-run"
    expected = GOLDEN.format(place=StartPlace.BATCH.value, python=sys.executable, logs=logs, words=words)
    assert re.sub(r"nvrx-run\.\d+", "nvrx-run.PID", out).startswith(expected)
    named = {line.strip().partition("=")[0]: line.strip().partition("=")[2] for line in out.splitlines()}
    expected_env = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "NVRX_RUN_DIR": str(logs)}
    assert expected_env.items() <= named.items()


def test_dry_run_elsewhere(nvrx_run, work, cluster):
    code, out, _ = nvrx_run("--dry-run", "--standalone", "--nproc-per-node=2", "--rdzv-id=abc", "train.py", **cluster)
    assert code == 0 and "srun line" not in out and f"  NVRX_RUN_DIR={work}/nvrx_logs/abc/r0\n" in out
    assert nvrx_run("--dry-run", "train.py", **TASK).out.startswith(f"place: {StartPlace.TASK.value}\n")
    pet = {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ENDPOINT": "h:1"}
    assert "2 active nodes x 4 ranks, 1 spare nodes" in nvrx_run("--dry-run", "train.py", **pet).out
    assert "2 active nodes x 1 ranks" in nvrx_run("--dry-run", "--nproc_per_node=1", "train.py", **pet).out


@pytest.mark.parametrize(
    "flags, nodes, plan",
    [
        ("", 1, "1 active nodes x 1 ranks, 0"), ("--spares=1 --nnodes=2", 3, "2 active nodes x 1 ranks, 1"),
        ("--spares=1", 2, "1 active nodes x 1 ranks, 1"), ("--nnodes=4:6", 6, "4 active nodes x 1 ranks, 2"),
    ],
)  # fmt: skip
def test_dry_run_on_a_login_node(nvrx_run, cluster, flags, nodes, plan):
    """As inside an allocation of that shape."""
    code, out, _ = nvrx_run("--dry-run", *flags.split(), "train.py", **cluster)
    assert code == 0 and out.startswith(f"place: {StartPlace.LOGIN.value}\n"), out
    assert f" --nodes={nodes} " in out and f"plan of cycle 0: {plan} spare" in out


def test_login_node_says_what_to_do(nvrx_run, cluster):
    done = nvrx_run("train.py", **cluster)
    assert (done.code, done.out) == (2, "")
    assert [w for w in ("login node", "sbatch", "salloc", "srun", "--standalone") if w not in done.err] == []


@pytest.mark.parametrize("program", ["nvrx-run", "ft_launcher"])
def test_installed_commands(work, program):
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        pytest.skip(f"{program} is not installed here (pip install -e .)")
    (work / "train.py").write_text("import os; print('rank', os.environ['RANK'])")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    for words, out in ((["--help"], "--nproc-per-node"), (["--standalone", "train.py"], "[rank 0] rank 0\n")):
        done = subprocess.run([path, *words], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and out in done.stdout, done


def test_the_step_has_the_tasks_of_the_job(nvrx_run, work):
    env = {**BATCH_SCRIPT, **SEVERAL, "SLURM_NTASKS_PER_NODE": "2", "SLURM_NTASKS": "6"}
    out = nvrx_run("--dry-run", "--spares=2", "train.py", **env).out
    assert " --nodes=3 --ntasks=6 --ntasks-per-node=2 " in out
    assert "4 active nodes x 1 ranks, 2 spare" in out and "LOCAL_WORLD_SIZE=2" in out


def test_min_is_a_multiple_of_the_segment(nvrx_run, work):
    (work / "srun").touch(0o755)  # this machine may have no Slurm
    batch = {**BATCH_SCRIPT, "PATH": f"{work}:{os.environ['PATH']}"}
    nvrx_run("--ft-segment=2", "train.py", **batch).refused("--ft-segment 2 does not divide 3", "--nnodes")
    done = nvrx_run("train.py", **ONE_TASK, NVRX_REPLACEMENT_GROUP_ID="rack 9")
    done.refused("NVRX_REPLACEMENT_GROUP_ID needs --ft-segment")
