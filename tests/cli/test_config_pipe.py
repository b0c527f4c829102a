"""--ft-cfg-path <(...): a pipe is read to its end, with bounds; what else is no file is refused."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cli_harness import BATCH, CLEAN, Run

from nvrx_slurm.config import files
from nvrx_slurm.errors import UsageError

SECTION = "fault_tolerance: {max_no_progress_cycles: 17}\n"


@pytest.fixture
def fifo(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "ft.yaml")
    return str(tmp_path / "ft.yaml")


def write(path: str, text: str) -> threading.Thread:
    """Writes one byte after the other, in a thread, once the pipe is open for reading."""

    def work() -> None:
        with open(path, "wb", buffering=0) as file:
            for byte in text.encode():
                file.write(bytes([byte]))

    writer = threading.Thread(target=work)
    writer.start()
    return writer


def test_process_substitution_reaches_a_job(work: Path) -> None:
    command = f"exec {sys.executable} -m nvrx_slurm.cli.run --ft-cfg-path <(echo '{SECTION.strip()}') train.py"
    done = subprocess.run(["/bin/bash", "-c", command], env=CLEAN, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "rank ran" in done.stdout, done


def test_it_is_read_to_its_end_and_judged_as_a_file(fifo: str) -> None:
    writer = write(fifo, SECTION)
    assert files.read_section(fifo) == ("fault_tolerance", {"max_no_progress_cycles": 17})
    writer.join(30)
    writer = write(fifo, "a: [")
    with pytest.raises(UsageError, match="not valid YAML"):
        files.read_section(fifo)
    writer.join(30)
    command = ["/bin/sh", "-c", f"yes '#' > {fifo}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL), pytest.raises(UsageError, match="larger than 256 KiB"):
        files.read_section(fifo)


@pytest.mark.parametrize("begun", [False, True])
def test_one_without_an_end_is_given_up(fifo: str, begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PIPE_S", 0.2)
    held = os.open(fifo, os.O_RDWR) if begun else -1
    if begun:
        os.write(held, SECTION.encode())
    with pytest.raises(UsageError, match=r"within 0.2 s; correct --ft-cfg"):
        files.read_section(fifo)
    if begun:
        os.close(held)


@pytest.mark.parametrize("kind", ["directory", "device", "socket"])
def test_what_is_neither_file_nor_pipe_is_refused(nvrx_run: Run, work: Path, kind: str) -> None:
    path = {"directory": str(work), "device": "/dev/zero", "socket": str(work / "s")}[kind]
    if kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
    nvrx_run("--ft-cfg-path", path, "train.py").refused(path, "correct --ft-cfg-path")


def test_a_step_cannot_read_it(nvrx_run: Run, fifo: str) -> None:
    """The step's tasks are on other nodes, and the pipe is empty by then."""
    writer = write(fifo, SECTION)
    nvrx_run("--ft-cfg-path", fifo, "train.py", **BATCH).refused(fifo, "is a pipe")
    writer.join(30)
