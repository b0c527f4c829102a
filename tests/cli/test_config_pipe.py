"""--ft-cfg-path <(...): a pipe is read to its end, with bounds; what else is no file is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from test_bad_input import REPO, TASK, refused

from nvrx_slurm.config import files
from nvrx_slurm.errors import UsageError

SECTION = "fault_tolerance: {max_no_progress_cycles: 17}\n"


def bash(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "PYTHONPATH": str(REPO), "SLURM_CONF": "/nonexistent"}
    argv = ["/bin/bash", "-c", command.replace("nvrx-run", f"exec {sys.executable} -m nvrx_slurm.cli.run")]
    return subprocess.run(argv, cwd=cwd, env=clean | env, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("print('rank', 'ran')")
    return tmp_path


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "ft.yaml")
    return str(tmp_path / "ft.yaml")


def test_process_substitution_is_read(work: Path) -> None:
    done = bash(f"nvrx-run --ft-cfg-path <(echo '{SECTION.strip()}') train.py", work)
    assert done.returncode == 0 and "rank ran" in done.stdout, done
    wrong = "fault_tolerance: {max_no_progress_cycles: often}"
    refused(bash(f"nvrx-run --ft-cfg-path <(echo '{wrong}') train.py", work), "max_no_progress_cycles", "often")


def test_its_mistakes_are_told_as_those_of_a_file(work: Path) -> None:
    refused(bash("nvrx-run --ft-cfg-path <(echo 'a: [') train.py", work), "/dev/fd/", "not valid YAML")
    refused(bash("nvrx-run --ft-cfg-path <(echo a: b) train.py", work), "/dev/fd/", "has no fault_tolerance: section")
    refused(bash("nvrx-run --ft-cfg-path <(:) train.py", work), "/dev/fd/", "has no fault_tolerance: section")
    refused(bash("nvrx-run --ft-cfg-path <(yes '#') train.py", work), "/dev/fd/", "is larger than 256 KiB")


def test_a_writer_that_takes_its_time_in_parts_is_waited_for(fifo: str) -> None:
    def write() -> None:
        with open(fifo, "wb", buffering=0) as file:  # returns when it is open for reading
            for at in range(len(SECTION)):
                file.write(SECTION[at : at + 1].encode())

    writer = threading.Thread(target=write)
    writer.start()
    assert files.read_section(fifo) == ("fault_tolerance", {"max_no_progress_cycles": 17})
    writer.join(30)
    assert not writer.is_alive()


@pytest.mark.parametrize("begun", [False, True])
def test_one_whose_end_nobody_writes_is_one_sentence(fifo: str, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIPE_S", 0.2)
    held = os.open(fifo, os.O_RDWR) if begun else -1
    if begun:
        os.write(held, SECTION.encode())
    with pytest.raises(UsageError, match=r"ft.yaml is a pipe whose end was not written within 0.2 s; correct --ft-cfg"):
        files.read_section(fifo)
    if begun:
        os.close(held)


def test_nobody_at_the_other_end_is_exit_code_2(work: Path, fifo: str) -> None:
    refused(bash(f"nvrx-run --ft-cfg-path {fifo} train.py", work), fifo, "was not written within 10 s")


@pytest.mark.parametrize("kind", ["directory", "device", "socket"])
def test_what_is_neither_file_nor_pipe_is_refused(work: Path, kind: str) -> None:
    path = {"directory": str(work), "device": "/dev/zero", "socket": str(work / "s")}[kind]
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
    refused(bash(f"nvrx-run --ft-cfg-path {path} train.py", work), path, "correct --ft-cfg-path or remove it")


def test_a_front_has_nothing_to_hand_on_and_says_so(work: Path) -> None:
    """The step's tasks are on other nodes, and the pipe is empty by then."""
    batch = {name: value for name, value in TASK.items() if "STEP" not in name and name != "SLURM_PROCID"}
    done = bash(f"nvrx-run --ft-cfg-path <(echo '{SECTION.strip()}') train.py", work, **batch)
    refused(done, "/dev/fd/", "is a pipe, which the tasks of the step", "write it to a file that all nodes can read")
