"""Bad input at the command line: exit code 2, one sentence that names it, and nothing started or made."""

import json
import os
import subprocess
import sys

import pytest

from nvrx_slurm.cli import stacks

pytestmark = pytest.mark.process


AS_NOBODY = """
import difflib, os, sys, tempfile, nvrx_slurm.node.program, nvrx_slurm.cli.job  # while the files can still be read
from nvrx_slurm.cli.run import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
main(sys.argv[1:])
"""
VIEWS = ("status", "why", "goodput", "coordinator_logs", "report", "replay")
MODULES = ", ".join(["nvrx_slurm.cli.logs", *(f"nvrx_slurm.views.{name}" for name in VIEWS)])
PREFIX = "--ft-per-cycle-applog-prefix"
MEET = ("--nnodes=2", "--rdzv-endpoint=nosuchhost.invalid:29400", "--rdzv-conf=join_timeout=1")


@pytest.mark.parametrize(
    "words, parts",
    [
        ("--nnodes=2 train.py", ("2 nodes have to meet", "--rdzv-endpoint HOST:PORT")),
        ("--nnodes=2 --rdzv-endpoint=h:0 train.py", ("2 nodes have to meet", "29400")),
        ("--nproc-per-node=gpu train.py", ("--nproc-per-node=gpu", "a GPU on this node")),
        ("--nproc-per-node=4 --local-ranks-filter=0,4 train.py", ("names local rank 4", "has 4 workers")),
        ("--ft-cfg-path=gone.yaml train.py", ("gone.yaml does not exist", "--ft-cfg-path")),
        ("--numa-binding=node train.py", ("--numa-binding is not", "use --numa-bind auto")),
        ("--ft-segment=4 --nnodes=6:8 --rdzv-endpoint=h:1 train.py", ("--ft-segment 4", "6")),
        ("--ft-segment=4 --restart-policy=min-healthy train.py", ("--ft-segment", "min-healthy")),
        ("--ft-segment=1 train.py", ("--ft-segment 1", "NVRX_REPLACEMENT_GROUP_ID")),
        ("", ("no training script",)),
        ("gone.py", ("gone.py does not exist (in ",)),
        ("x" * 300, ("does not exist",)),
        ("--no-python ./plain", ("./plain is not an executable",)),
        # merged logs
        (f"{PREFIX}=logs/train.log train.py", (PREFIX, "absolute")),
        (f"{PREFIX}=/logs/ train.py", (PREFIX, "file")),
        (f"{PREFIX}=/logs/%q.log train.py", (PREFIX, "%j")),
        (f"{PREFIX}=/proc/no/train.log train.py", (PREFIX, "/proc/no")),
        (f"{PREFIX}=/tmp train.py", (PREFIX, "/tmp")),
        (f"{PREFIX}=/tmp/x.log --ft-nvrx-logfile=/dev/null/n.log train.py", ("--ft-nvrx-logfile", "/dev/null")),
        ("--ft-nvrx-logfile=/tmp/nvrx.log train.py", ("--ft-nvrx-logfile", PREFIX)),
        ("--ft-log-server-grpc-port=7000 train.py", ("--ft-log-server-grpc-port", PREFIX)),
        ("--ft-log-server-port=65536 train.py", ("--ft-log-server-port", "65535")),
    ],
)
def test_refused(nvrx_run, work, words, parts):
    (work / "plain").write_text("#!/bin/sh\n")
    nvrx_run(*words.split(), CUDA_VISIBLE_DEVICES="", NVRX_TOKEN="a" * 64).refused(*parts)
    assert sorted(path.name for path in work.iterdir()) == ["plain", "train.py"]


@pytest.mark.parametrize("name", ["7", "7/r0", "7/r0/events"])
def test_a_log_tree_that_another_user_may_have_prepared(nvrx_run, work, name):
    (work / "elsewhere").mkdir()
    (work / "logs" / name).parent.mkdir(parents=True)
    (work / "logs" / name).symlink_to(work / "elsewhere")
    nvrx_run("--log-dir=logs", "--rdzv-id=7", "train.py").refused(f"logs/{name} is a link", "--log-dir")
    assert list((work / "elsewhere").iterdir()) == []


def ends(code, said, *argv, **how):
    """Python with these words ends with `code` and says so in one sentence."""
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=60, **how)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1) and said in done.stderr, done


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run it as another user")
def test_files_that_the_user_may_not_read_or_write(work):
    for directory in (work, *work.parents):
        if not directory.stat().st_mode & 0o001:
            directory.chmod(0o711)
        if directory.name.startswith("pytest-of-"):
            break
    for mode, said in ((0o600, "train.py may not be read"), (0o644, "cannot be made: Permission denied")):
        (work / "train.py").chmod(mode)
        ends(2, said, "-c", AS_NOBODY, "train.py")


@pytest.mark.parametrize("closed", ["7", "7/r0"])
@pytest.mark.parametrize("command", ["status", "why", "goodput", "logs", "replay", "report"])
def test_a_run_of_somebody_else(tmp_path, command, closed):
    (tmp_path / "7" / "r0").mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / closed).chmod(0o700)
    as_nobody = AS_NOBODY.replace("run import", "toolbox import").replace(
        "import difflib", f"import {MODULES}, difflib"
    )
    argv = [sys.executable, "-c", as_nobody, command, str(tmp_path / "7")]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd="/", text=True, timeout=60)
    assert done.returncode == (1 if command == "status" else 2) and "Traceback" not in done.stdout, done.stdout
    assert str(tmp_path / "7") in done.stdout


def test_a_working_directory_that_is_gone(work):
    (work / "gone").mkdir()
    code = f"import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, {[sys.executable, '-m']!r} + sys.argv[1:])"
    argv = ("-c", code, "nvrx_slurm.cli.run", "--standalone", str(work / "train.py"))
    ends(2, "cd to one that exists", *argv, cwd=work / "gone")


@pytest.mark.parametrize(
    "rank, code, said", [(0, 2, "does not resolve"), (1, 96, "last try: nosuchhost.invalid:29400")]
)
def test_a_coordinator_that_does_not_resolve(work, rank, code, said):
    """Its own node is refused at once; the others look for it until the join timeout."""
    argv = ("-m", "nvrx_slurm.cli.run", *MEET, f"--node-rank={rank}", "train.py")
    ends(code, said, *argv, env={**os.environ, "NVRX_TOKEN": "a" * 64})


SRUN = """#!/bin/sh
while [ "$1" != "${1#-}" ]; do shift; done
exec "$@"
"""


def test_stacks_imports_nothing_of_the_folder_in_which_it_is_called(tmp_path, monkeypatch):
    """Root may look after a job from a user's folder, and srun starts tasks in the same folder."""
    for folder in ("bin", "7/r0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "bin/srun").write_text(SRUN)
    (tmp_path / "bin/srun").chmod(0o755)
    for module in ("click", "queue", "nvrx_slurm"):
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert json.loads(stacks._of_all_nodes(tmp_path / "7/r0", "7")) == []
    assert not (tmp_path / "executed").exists()
