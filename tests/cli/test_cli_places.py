"""Where `nvrx-run` finds itself by its environment, what `--dry-run` shows of it, how the command answers people."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from nvrx_slurm.cli import place
from nvrx_slurm.cli.place import Place
from nvrx_slurm.config import resolve
from nvrx_slurm.errors import UsageError

REPO = Path(__file__).resolve().parents[2]
BATCH = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_CLUSTER_NAME": "c",
}  # fmt: skip
IN_BATCH_SCRIPT = {**BATCH, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n1"}
TASK = {
    **BATCH, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_PROCID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_STEP_NUM_NODES": "3", "SLURMD_NODENAME": "n2",
}  # fmt: skip
INTERACTIVE = {**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_PROCID": "0"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine that has Slurm's client and a slurm.conf."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    (tmp_path / "slurm.conf").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    return {"SLURM_CONF": str(tmp_path / "slurm.conf")}


@pytest.mark.parametrize(
    ("env", "flags", "expected"),
    [
        ({}, {}, Place.LOGIN),
        ({}, {"standalone": True}, Place.ALONE),
        ({}, {"nnodes": "2", "node_rank": "0", "rdzv_endpoint": "h:29400"}, Place.ALONE),
        ({}, {"master_addr": "h", "nnodes": "2"}, Place.ALONE),
        (BATCH, {}, Place.BATCH),  # an salloc shell on the login node
        (IN_BATCH_SCRIPT, {}, Place.BATCH),
        (INTERACTIVE, {}, Place.BATCH),  # salloc with LaunchParameters=use_interactive_step
        (TASK, {}, Place.TASK),
        (TASK, {"standalone": True}, Place.ALONE),
        ({**TASK, "SLURM_STEP_ID": "batch"}, {}, Place.BATCH),
        ({**TASK, "SLURM_STEP_ID": "4294967291", "SLURM_STEPID": "4294967291"}, {}, Place.BATCH),
    ],
)
def test_places(cluster: dict[str, str], env: dict[str, str], flags: dict[str, object], expected: Place) -> None:
    full = {**cluster, **env}
    assert place.find_place(resolve(flags, full).config, full).place is expected


def test_without_slurm_it_is_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert place.find_place(resolve({}, {}).config, {}).place is Place.ALONE


@pytest.mark.parametrize("counts", ["2", "1,2", "8(x3)", "1(x2),4"])
def test_more_than_one_task_per_node_is_an_error(counts: str) -> None:
    env = {**TASK, "SLURM_STEP_TASKS_PER_NODE": counts}
    with pytest.raises(UsageError, match="ntasks-per-node=1"):
        place.find_place(resolve({}, env).config, env)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (3, 3)),
        ({"spares": "1"}, (2, 3)),
        ({"nnodes": "2"}, (2, 3)),
        ({"nnodes": "1:2"}, (1, 3)),
    ],
)
def test_nodes_beyond_min_are_spares(flags: dict[str, object], expected: tuple[int, int]) -> None:
    config = resolve(flags, TASK).config
    nodes = place.node_range(config, place.find_place(config, TASK).slurm)
    assert (nodes.min, nodes.max) == expected


def test_more_nodes_than_the_allocation_has() -> None:
    config = resolve({"nnodes": "4"}, TASK).config
    with pytest.raises(UsageError, match="at least 4 nodes but the allocation has 3"):
        place.node_range(config, place.find_place(config, TASK).slurm)


# --- the command itself -----------------------------------------------------------------------------------------------


def nvrx_run(
    *words: str, cwd: Path, env: dict[str, str] | None = None, module: str = "nvrx_slurm.cli.run"
) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of one run in a clean environment."""
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(REPO), "SLURM_CONF": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=cwd,
        env=clean | (env or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    return tmp_path


ENVIRONMENT = """\
environment of rank 0, besides what is inherited:
  RANK=0
  LOCAL_RANK=0
  WORLD_SIZE={world}
  LOCAL_WORLD_SIZE={local}
  GROUP_RANK=0
  GROUP_WORLD_SIZE={groups}
  ROLE_NAME=default
  ROLE_RANK=0
  ROLE_WORLD_SIZE={world}
  MASTER_ADDR=<first active node>
  MASTER_PORT=<free port of that node, fresh per cycle>
  TORCHELASTIC_RESTART_COUNT=0
  TORCHELASTIC_MAX_RESTARTS=3
  TORCHELASTIC_RUN_ID={job}
  TORCHELASTIC_USE_AGENT_STORE=False
  TORCHELASTIC_ERROR_FILE=<its error file>
  NVRX_TERM=1
  NVRX_CYCLE=0
  NVRX_INFRA_RANK=0
  NVRX_RUN_DIR={logs}
"""

GOLDEN_BATCH = """\
place: a batch script or salloc shell: start the step and stay in front of it

srun line (in a batch script or salloc shell):
  srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=none --nodes=3 --ntasks=3 --ntasks-per-node=1 --input=none \
--output={logs}/agents/agent_%t.log --error={logs}/agents/agent_%t.log --open-mode=append --cpus-per-task=4 \
--job-name=nvrx-run.PID --exclusive {python} -m nvrx_slurm.cli.run {words}

plan of cycle 0: 2 active nodes x 8 ranks, 1 spare nodes
  n1               infra rank 0      ranks 0..7
  n2               infra rank 1      ranks 8..15
  n3               infra rank 2      hot spare

logs: {logs}
worker: {python} -u train.py --lr 0.1 --dry-run

{environment}"""


@pytest.mark.parametrize("spelling", ["--dry-run", "--dry_run"])
def test_dry_run_in_a_batch_script(work: Path, spelling: str) -> None:
    """It needs no Slurm; the srun line is the one that would run, the script keeps its arguments."""
    env = {**IN_BATCH_SCRIPT, "SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "8"}
    flags = "--spares=1 --max-restarts=3 --srun-arg=--exclusive"
    code, out, err = nvrx_run(spelling, *flags.split(), "train.py", "--lr", "0.1", "--dry-run", cwd=work, env=env)
    assert (code, err) == (0, "")
    logs = work / "nvrx_logs/7/r0"
    out = "".join(f"{line}\n" for line in out.splitlines())
    out = re.sub(r"nvrx-run\.\d+", "nvrx-run.PID", out)
    environment = ENVIRONMENT.format(world=16, local=8, groups=2, job="7", logs=logs)
    words = f"{flags} train.py --lr 0.1 --dry-run"
    assert out == GOLDEN_BATCH.format(logs=logs, python=sys.executable, words=words, environment=environment)
    assert not (work / "nvrx_logs").exists()


def test_dry_run_without_slurm(work: Path) -> None:
    flags = ("--dry-run", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--standalone", "--rdzv-id=abc")
    code, out, err = nvrx_run(*flags, "train.py", cwd=work)
    assert (code, err) == (0, "")
    logs = work / "nvrx_logs/abc/r0"
    assert "srun line" not in out
    assert "plan of cycle 0: 1 active nodes x 2 ranks, 0 spare nodes\n" in out
    assert out.endswith(ENVIRONMENT.format(world=2, local=2, groups=1, job="abc", logs=logs))


def test_dry_run_in_a_task_names_the_place(work: Path) -> None:
    code, out, _ = nvrx_run("--dry-run", "train.py", cwd=work, env=TASK)
    assert code == 0 and out.startswith("place: a task of an srun step: the agent of this node\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "no training script was given"),
        (("--nnode=2", "train.py"), "--nnode is not a flag of nvrx-run; did you mean --nnodes?"),
        (("--max_restart=2", "train.py"), "did you mean --max-restarts?"),
        (("--ft-param-rank_heartbeat_timeot=2", "train.py"), "did you mean --ft-rank-heartbeat-timeout?"),
        (("--max-restarts=lots", "train.py"), "lots"),
        (("--nnodes=3:2", "train.py"), "3:2"),
        (("--nnodes=0", "train.py"), "--nnodes"),
        (("--nnodes=2", "train.py"), "2 nodes have to meet somewhere; give all of them the same --rdzv-endpoint"),
        (("--nnodes=2", "--rdzv-endpoint=h:0", "train.py"), "needs a port that all nodes know"),
        (("--numa-binding=node", "train.py"), "--numa-binding"),
        (("--ft-segment=4", "train.py"), "--ft-segment"),
        (("--virtual-local-rank", "train.py"), "--virtual-local-rank"),
        (("--event-log-handler=x", "train.py"), "--event-log-handler"),
        (("--restart-policy=never", "train.py"), "must be any-failed or min-healthy"),
        (("--nproc-per-node=gpu", "train.py"), "NVML shows no GPU"),
        (("gone.py",), "the training script gone.py does not exist"),
    ],
)
def test_usage_errors_are_one_sentence_and_2(work: Path, words: tuple[str, ...], sentence: str) -> None:
    code, out, err = nvrx_run(*words, cwd=work, env={"CUDA_VISIBLE_DEVICES": ""})
    assert (code, out) == (2, "")
    assert err.startswith("nvrx-run: ") and err.count("\n") == 1 and sentence in err
    assert not (work / "nvrx_logs").exists()


def test_pet_variables_and_their_rank_below_flags(work: Path) -> None:
    env = {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "4", "PET_MAX_RESTARTS": "3", "PET_RDZV_ID": "abc"}
    code, out, _ = nvrx_run("--dry-run", "train.py", cwd=work, env=env)
    assert code == 0 and "2 active nodes x 4 ranks, 1 spare nodes" in out and "RUN_ID=abc" in out
    code, out, _ = nvrx_run("--dry-run", "--nproc_per_node=1", "train.py", cwd=work, env=env)
    assert code == 0 and "2 active nodes x 1 ranks, 1 spare nodes" in out


def test_login_node_says_what_to_do(work: Path, cluster: dict[str, str]) -> None:
    env = {**cluster, "PATH": str(work)}
    code, out, err = nvrx_run("train.py", cwd=work, env=env)
    assert (code, out) == (2, "")
    for word in ("login node", "sbatch", "salloc", "srun", "--standalone"):
        assert word in err


@pytest.mark.parametrize("program", ["nvrx-run", "ft_launcher"])
def test_installed_commands(work: Path, program: str) -> None:
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        pytest.skip(f"{program} is not installed here (pip install -e .)")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    done = subprocess.run([path, "--help"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and done.stderr == ""
    for flag in ("--nnodes", "--nproc-per-node", "--max-restarts", "--rdzv-endpoint", "--ft-rank-heartbeat-timeout"):
        assert flag in done.stdout
    (work / "train.py").write_text("import os; print('rank', os.environ['RANK'])")
    done = subprocess.run(
        [path, "--standalone", "train.py"], cwd=work, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and done.stdout == "[rank 0] rank 0\n"
