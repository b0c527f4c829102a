"""Where `nvrx-run` finds itself by its environment, how nodes meet, what `--dry-run` shows, what is noted first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import BATCH, BATCH_SCRIPT, ONE_TASK, TASK, Run

from nvrx_slurm.cli import rendezvous
from nvrx_slurm.cli.here import StartPlace, find_here, node_range
from nvrx_slurm.cli.job import make_job
from nvrx_slurm.cli.notes import notes
from nvrx_slurm.config.layers import resolve
from nvrx_slurm.config.values import NodeRange
from nvrx_slurm.errors import UsageError
from nvrx_slurm.slurm import conf
from nvrx_slurm.slurm.munge import Munge

TWO_HOSTS = {"SLURM_STEP_NODELIST": "localhost,n2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
INTERACTIVE = {**TASK, "SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_PROCID": "0"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine that has Slurm's client and a slurm.conf."""
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 1\n")
    srun.chmod(0o755)
    (tmp_path / "slurm.conf").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    return {"SLURM_CONF": str(tmp_path / "slurm.conf"), "PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("env", "flags", "expected"),
    [
        ({}, {}, StartPlace.LOGIN),
        ({}, {"standalone": True}, StartPlace.ALONE),
        ({}, {"nnodes": "1"}, StartPlace.ALONE),
        ({}, {"nnodes": "2", "dry_run": True}, StartPlace.LOGIN),
        ({}, {"nnodes": "2", "node_rank": "0", "rdzv_endpoint": "h:29400"}, StartPlace.ALONE),
        ({}, {"master_addr": "h", "nnodes": "2"}, StartPlace.ALONE),
        (BATCH, {}, StartPlace.BATCH),  # an salloc shell on the login node
        (BATCH_SCRIPT, {}, StartPlace.BATCH),
        (INTERACTIVE, {}, StartPlace.BATCH),  # salloc with LaunchParameters=use_interactive_step
        (TASK, {}, StartPlace.TASK),
        (TASK, {"standalone": True}, StartPlace.ALONE),
    ],
)
def test_places(cluster: dict[str, str], env: dict[str, str], flags: dict[str, object], expected: StartPlace) -> None:
    full = {**cluster, **env}
    assert find_here(resolve(flags, full), full).place is expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, (3, 3)), ({"spares": "1"}, (2, 3)), ({"nnodes": "2"}, (2, 3)), ({"nnodes": "1:2"}, (1, 3)),
        ({"nnodes": "2", "spares": "1"}, (2, 3)), ({"nnodes": "4"}, None), ({"nnodes": "3", "spares": "1"}, None),
    ],
)  # fmt: skip
def test_nodes_beyond_min_are_spares(flags: dict[str, object], expected: tuple[int, int] | None) -> None:
    here = find_here(resolve(flags, TASK), TASK)
    if expected is None:
        with pytest.raises(UsageError, match="4 nodes but the allocation has 3"):
            node_range(here)
    else:
        assert node_range(here) == expected


# --- how nodes meet ---------------------------------------------------------------------------------------------------


def test_an_endpoint_with_port_0_is_one_node_that_meets_no_other() -> None:
    resolved = resolve({"rdzv_endpoint": "localhost:0", "rdzv_backend": "c10d"}, {})
    assert rendezvous.meeting(find_here(resolved, {}), NodeRange(1, 1)) is None


@pytest.mark.parametrize(
    ("in_slurm", "munge", "given", "token"),
    [
        (True, True, "", ""), (True, True, "secret", "secret"), (False, True, "", "hash"), (True, False, "", "hash"),
    ],
)  # fmt: skip
def test_where_the_token_of_an_endpoint_comes_from(
    monkeypatch: pytest.MonkeyPatch, in_slurm: bool, munge: bool, given: str, token: str
) -> None:
    """ "": MUNGE hands it over. A hash of --rdzv-id is no secret."""
    monkeypatch.setattr(Munge, "answers", lambda socket: munge)
    env = {"NVRX_TOKEN": given, "NVRX_MUNGE_SOCKET": "/s"} | (TASK if in_slurm else {})
    here = find_here(resolve({"rdzv_endpoint": "h:29400"}, {}), env)
    found = rendezvous.meeting(here, NodeRange(3, 3))
    assert found is not None and found.munge_socket == ("/s" if in_slurm else None)
    assert found.token == token or (token == "hash" and len(found.token) == 64)
    assert bool(rendezvous.token_note(here, found)) == (token == "hash")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ClusterName=c\nAuthInfo=socket=/run/m2/s,ttl=60\n", "/run/m2/s"), ("authinfo = ttl=9,socket=/m # x\n", "/m"),
        ("#AuthInfo=socket=/x\n", None), ("AuthInfo=ttl=60\n", None), ("", None),
    ],
)  # fmt: skip
def test_the_socket_of_slurms_munged_is_in_slurm_conf(tmp_path: Path, text: str, expected: str | None) -> None:
    (tmp_path / "slurm.conf").write_text(text)
    env = {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    assert conf.munge_socket(env) == expected
    assert conf.munge_socket({**env, "NVRX_MUNGE_SOCKET": "/mine"}) == "/mine"
    assert conf.munge_socket({"SLURM_CONF": str(tmp_path)}) is None


# --- what is noted at the start ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        ({"term_timeout": "100"}, {**ONE_TASK, "NVRX_KILL_WAIT": "30"}, "--term-timeout '100' is cut to 25 s"),
        ({}, {**ONE_TASK, "PET_TERM_TIMEOUT": "60"}, "PET_TERM_TIMEOUT='60' is cut to 25 s"),
        ({"term_timeout": "20"}, ONE_TASK, ""),
        ({}, ONE_TASK, ""),  # the default is not what the user asked for
        ({"ft_warn_before_end": "60"}, {**ONE_TASK, "PATH": "/nowhere"}, "time limit is unknown"),
        ({}, {**ONE_TASK, **TWO_HOSTS, "NVRX_TOKEN": "0" * 32, "PATH": "/nowhere"}, "scancel 7"),
        ({"monitor_interval": "7"}, {}, "--monitor-interval has no effect"),
        ({}, {}, ""),
    ],
)  # fmt: skip
def test_notes(work: Path, clean: None, flags: dict[str, object], env: dict[str, str], said: str) -> None:
    here = find_here(resolve(flags, env), env)
    found = [note for note in notes(here, make_job(here, "train.py", ())) if "hangs are" not in note]
    assert [said in note for note in found] == [True] * bool(said)


# --- the command itself -----------------------------------------------------------------------------------------------

GOLDEN = """\
place: {place}

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

environment of rank 0, besides what is inherited:
  RANK=0
  LOCAL_RANK=0
  WORLD_SIZE=16
"""


def test_dry_run_in_a_batch_script(nvrx_run: Run, work: Path) -> None:
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


def test_dry_run_elsewhere(nvrx_run: Run, work: Path, cluster: dict[str, str]) -> None:
    code, out, _ = nvrx_run("--dry-run", "--standalone", "--nproc-per-node=2", "--rdzv-id=abc", "train.py", **cluster)
    assert code == 0 and "srun line" not in out and f"  NVRX_RUN_DIR={work}/nvrx_logs/abc/r0\n" in out
    assert nvrx_run("--dry-run", "train.py", **TASK).out.startswith(f"place: {StartPlace.TASK.value}\n")
    pet = {"PET_NNODES": "2:3", "PET_NPROC_PER_NODE": "4", "PET_RDZV_ENDPOINT": "h:1"}
    assert "2 active nodes x 4 ranks, 1 spare nodes" in nvrx_run("--dry-run", "train.py", **pet).out
    assert "2 active nodes x 1 ranks" in nvrx_run("--dry-run", "--nproc_per_node=1", "train.py", **pet).out


@pytest.mark.parametrize(
    ("flags", "nodes", "plan"),
    [
        ("", 1, "1 active nodes x 1 ranks, 0"), ("--spares=1 --nnodes=2", 3, "2 active nodes x 1 ranks, 1"),
        ("--spares=1", 2, "1 active nodes x 1 ranks, 1"), ("--nnodes=4:6", 6, "4 active nodes x 1 ranks, 2"),
    ],
)  # fmt: skip
def test_dry_run_on_a_login_node(nvrx_run: Run, cluster: dict[str, str], flags: str, nodes: int, plan: str) -> None:
    """As inside an allocation of that shape."""
    code, out, _ = nvrx_run("--dry-run", *flags.split(), "train.py", **cluster)
    assert code == 0 and out.startswith(f"place: {StartPlace.LOGIN.value}\n"), out
    assert f" --nodes={nodes} " in out and f"plan of cycle 0: {plan} spare" in out


def test_login_node_says_what_to_do(nvrx_run: Run, cluster: dict[str, str]) -> None:
    done = nvrx_run("train.py", **cluster)
    assert (done.code, done.out) == (2, "")
    assert [w for w in ("login node", "sbatch", "salloc", "srun", "--standalone") if w not in done.err] == []


@pytest.mark.parametrize("program", ["nvrx-run", "ft_launcher"])
def test_installed_commands(work: Path, program: str) -> None:
    path = Path(sys.executable).with_name(program)
    if not path.exists():
        pytest.skip(f"{program} is not installed here (pip install -e .)")
    (work / "train.py").write_text("import os; print('rank', os.environ['RANK'])")
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    for words, out in ((["--help"], "--nproc-per-node"), (["--standalone", "train.py"], "[rank 0] rank 0\n")):
        done = subprocess.run([path, *words], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0 and out in done.stdout, done
