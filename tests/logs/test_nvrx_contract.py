"""NVRx's gRPC log protocol: our service and client, alone and with the real peers of the 0.7.0 wheel."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nvrx_wheel
import pytest
from log_harness import WAIT_S, Program, stage

from nvrx_slurm.logs import nvrx_client


@pytest.fixture
def service(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Our service: its address, and the folder that it may write to."""
    root = tmp_path / "allowed"
    root.mkdir()
    program = Program("nvrx_service", {"roots": [str(root)], "port": 0})
    try:
        yield f"127.0.0.1:{program.packet('port')}", root
        assert program.finish(2.0) == 0
    finally:
        program.close()


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The wheel's server: its address, and the folder that it may write to."""
    wheel, root = nvrx_wheel.unpacked(), tmp_path / "allowed"
    root.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-m", "nvidia_resiliency_ext.shared_utils.grpc_log_server", "--host", "127.0.0.1"]
    program += ["--port", str(port), "--allowed-root", str(root), "--graceful-shutdown-timeout", "1"]
    with subprocess.Popen(program, env={**os.environ, "PYTHONPATH": str(wheel)}, stderr=subprocess.DEVNULL) as server:
        yield f"127.0.0.1:{port}", root
        server.terminate()
        server.wait(WAIT_S)


def test_our_client_and_our_service(service: tuple[str, Path]) -> None:
    address, root = service
    lines = [(f"{root}/sub/x.log", b"1: a\n" * 100_000), (f"{root}/y.log", b"2: b\n"), (f"{root}/sub/x.log", b"c\n")]
    assert nvrx_client.send(address, lines) == 500_007
    assert (root / "sub/x.log").read_bytes() == b"1: a\n" * 100_000 + b"c\n"
    assert (root / "y.log").read_bytes() == b"2: b\n"


@pytest.mark.parametrize("path", ["", "/etc/passwd", "ROOT/../evil.log", "ROOT/link/evil.log", "ROOT/mine.log", "ROOT"])
def test_paths_outside_the_folder_and_files_of_our_own_are_refused(service: tuple[str, Path], path: str) -> None:
    address, root = service
    (root / "link").symlink_to(root.parent)
    (root / "mine.log").touch()
    (root / "mine.log.idx").touch()
    with pytest.raises(ConnectionError):
        nvrx_client.send(address, [(path.replace("ROOT", str(root)), b"x\n")])
    assert not (root.parent / "evil.log").exists() and (root / "mine.log").read_bytes() == b""


def test_a_server_that_is_not_there_is_one_sentence() -> None:
    with socket.socket() as probe:  # bound, but nothing listens
        probe.bind(("127.0.0.1", 0))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nvrx_client, "_HEALTH_S", 0.3)
            with pytest.raises(ConnectionError, match="log server at 127.0.0.1"):
                nvrx_client.send(f"127.0.0.1:{probe.getsockname()[1]}", [("/x", b"y\n")])


def test_our_client_and_the_server_of_the_wheel(foreign: tuple[str, Path]) -> None:
    address, root = foreign
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvrx_client, "_HEALTH_S", WAIT_S)  # it takes a second to start
        assert (
            nvrx_client.send(address, [(f"{root}/t_cycle0.log", b"0: a\n"), (f"{root}/t_cycle1.log", b"1: b\n")]) == 10
        )
    with stage(root.parent) as merge:
        merge.until(lambda: (root / "t_cycle1.log").exists() and (root / "t_cycle1.log").read_bytes(), "written")
    assert (root / "t_cycle0.log").read_bytes() == b"0: a\n" and (root / "t_cycle1.log").read_bytes() == b"1: b\n"
    with pytest.raises(ConnectionError, match="outside"):
        nvrx_client.send(address, [("/outside/x.log", b"y\n")])


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


@pytest.mark.torch
def test_the_writer_thread_of_the_wheel_and_our_service(service: tuple[str, Path]) -> None:
    address, root = service
    files = [f"{root}/new/z_cycle0.log", f"{root}/z_cycle1.log"]
    command = [sys.executable, "-c", WRITER, str(nvrx_wheel.unpacked()), address, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    text = "".join(f" {number % 8}: line {number}\n" for number in range(100))
    assert Path(files[0]).read_text() == text and Path(files[1]).read_text() == "12: other\n"
    assert done.stdout.split() == [str(len(text) + 10), "0"]
