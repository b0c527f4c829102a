"""NVRx's gRPC log protocol: our service, alone and with the client of the 0.7.0 wheel."""

import os
import subprocess
import sys
from pathlib import Path

import grpc
import nvrx_wheel
import pytest
from log_harness import Program, foreign_client

from nvrx_slurm.logs.nvrx_service import NvrxLogService

pytestmark = pytest.mark.process


@pytest.fixture
def service(tmp_path):
    """Our service: its address, and the folder that it may write to."""
    root = tmp_path / "allowed"
    root.mkdir()
    program = Program("logs.nvrx_service", {"roots": [str(root)], "port": 0})
    try:
        yield f"127.0.0.1:{program.packet('port')}", root
        assert program.finish(2.0) == 0
    finally:
        program.close()


def test_lines_of_a_client_are_written_to_its_files(service):
    address, root = service
    lines = [(f"{root}/sub/x.log", b"1: a\n" * 100_000), (f"{root}/y.log", b"2: b\n"), (f"{root}/sub/x.log", b"c\n")]
    assert foreign_client(address, lines) == 500_007
    assert (root / "sub/x.log").read_bytes() == b"1: a\n" * 100_000 + b"c\n"
    assert (root / "y.log").read_bytes() == b"2: b\n"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "ROOT/../evil.log", "ROOT/link/evil.log", "ROOT/mine.log", "ROOT"])
def test_paths_outside_the_folder_and_files_of_our_own_are_refused(service, path):
    address, root = service
    (root / "link").symlink_to(root.parent)
    (root / "mine.log").touch()
    (root / "mine.log.idx").touch()
    with pytest.raises(grpc.RpcError):
        foreign_client(address, [(path.replace("ROOT", str(root)), b"x\n")])
    assert not (root.parent / "evil.log").exists() and (root / "mine.log").read_bytes() == b""


# The wheel's modules without its packages' __init__ files, which load its C extension (for Python 3.12).
WRITER = """
import logging, os, pathlib, queue, sys, types
root = pathlib.Path(sys.argv[1]) / "nvidia_resiliency_ext"
for name in ("", ".fault_tolerance", ".shared_utils"):
    module = sys.modules["nvidia_resiliency_ext" + name] = types.ModuleType("nvidia_resiliency_ext" + name)
    module.__path__ = [str(root / name[1:])]
from nvidia_resiliency_ext.fault_tolerance.per_cycle_logs import GrpcWriterThread
lines = queue.Queue()
writer = GrpcWriterThread(lines, sys.argv[2], "n1_7", logging.getLogger("test"))
writer.start()
for number in range(100):
    lines.put((sys.argv[3], f" {number % 8}: line {number}\\n"))
lines.put((sys.argv[4], "12: other\\n"))
while not lines.empty():
    os.sched_yield()
writer.shutdown()
writer.join(20)
print(writer.total_bytes_sent, writer.connection_errors)
"""


@pytest.mark.matrix
@pytest.mark.torch
def test_the_writer_thread_of_the_wheel_and_our_service(service):
    address, root = service
    files = [f"{root}/new/z_cycle0.log", f"{root}/z_cycle1.log"]
    command = [sys.executable, "-c", WRITER, str(nvrx_wheel.unpacked()), address, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    text = "".join(f" {number % 8}: line {number}\n" for number in range(100))
    assert Path(files[0]).read_text() == text and Path(files[1]).read_text() == "12: other\n"
    assert done.stdout.split() == [str(len(text) + 10), "0"]


def opened(root, name):
    files = {}
    try:
        NvrxLogService([str(root)])._open(str(root / name), files)
    except ValueError:
        return False
    finally:
        for fd in files.values():
            os.close(fd)
    return True


@pytest.mark.parametrize("name", [".ssh/authorized_keys", ".bashrc", "slurm.sh", "rank_0.err", ".x/a.log", "../a.log"])
def test_only_logs_are_written(tmp_path, name):
    root = tmp_path / "root"
    root.mkdir()
    assert not opened(root, name)
    assert list(root.rglob("*")) == []


def test_a_file_that_was_there_before_is_not_touched(tmp_path):
    (tmp_path / "mine.log").write_text("mine")
    assert not opened(tmp_path, "mine.log")
    assert opened(tmp_path, "theirs/a.log") and opened(tmp_path, "theirs/a.log")  # also after a restart of the service
    (tmp_path / "link.log").symlink_to(tmp_path / "mine.log")
    assert not opened(tmp_path, "link.log")
